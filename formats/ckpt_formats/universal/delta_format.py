"""The universal format as a delta: the states of a checkpoint, coded against those of an earlier one."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_codecs.delta import DeltaCodec, StatePair, StepInfo
from ckpt_codecs.registry import delta_from_config
from ckpt_formats.core.checkpoint import Checkpoint, FilePlan, Goal, Group, Parameter, Receipt
from ckpt_formats.core.encoding import EncodingOptions
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.universal import Universal
from ckpt_formats.universal.delta_plan import DeltaBase, sample
from ckpt_formats.universal.manifest import Parent


class Delta(Universal):
    """Writes a checkpoint against `earlier`, which is what can be read of the parent, not what was once saved.

    `codecs` gives the codec of each parameter by its name; None stores it alone.
    """

    def __init__(
        self,
        earlier: Checkpoint | None,
        parent: Parent | None,
        codecs: Mapping[str, DeltaCodec],
        content: str | None = None,
    ) -> None:
        self.earlier = earlier
        self.parent = parent
        self.content = content
        self._codecs = codecs

    @property
    def codecs(self) -> list[DeltaCodec]:
        """What it codes with: one of each kind."""
        return list({codec.name: codec for codec in self._codecs.values()}.values())

    def settings(self) -> object:
        return self.content, self.parent, {name: codec.config() for name, codec in self._codecs.items()}

    def beside(self) -> tuple[Checkpoint, ...]:
        return () if self.earlier is None else (self.earlier,)

    def plan(self, source: Checkpoint, goal: Goal) -> tuple[FilePlan, ...]:
        return tuple(self._part(part, source) for part in super().plan(source, goal))

    def _part(self, part: FilePlan, source: Checkpoint) -> FilePlan:
        (parameter,) = part.parameters
        codec = self._codecs.get(parameter.name)
        earlier = None if self.earlier is None else self.earlier.parameters.get(parameter.name)
        if codec is None or (self.earlier is not None and earlier is None):
            return part
        what = {**part.what, "delta": codec.config(), "step": _step(source, self.earlier, parameter, earlier)}
        parameters = (parameter,) if earlier is None else (parameter, earlier)
        return replace(part, parameters=parameters, what=what, size=parameter.nbytes)

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        return self._write(
            folder, part, transfer, EncodingOptions.of_json(part.what.get("coding")), delta_base(part, transfer)
        )


def delta_base(part: FilePlan, transfer: Transfer) -> DeltaBase | None:
    """What a part's parameter is to be coded against, and how; None if it is to be stored alone."""
    if "delta" not in part.what:
        return None
    earlier = part.parameters[1] if len(part.parameters) > 1 else None
    step = StepInfo(**part.what["step"])
    before = step.before if earlier is None else _read_count(earlier, transfer, step.before)
    step = replace(step, before=before, after=_read_count(part.parameters[0], transfer, step.after))
    return DeltaBase(earlier, delta_from_config(dict(part.what["delta"])), step)


def fitted_to_checkpoint(
    codec: DeltaCodec, names: Collection[str], source: Checkpoint, earlier: Checkpoint | None, transfer: Transfer
) -> DeltaCodec:
    """The codec with what it must know of the whole state, from a chunk of each of these parameters at a time."""

    def samples() -> Iterator[tuple[int, StatePair]]:
        for name in names:
            parameter, before = source.parameters[name], None if earlier is None else earlier.parameters.get(name)
            if earlier is None or before is not None:
                found = sample(parameter, DeltaBase(before, codec), transfer)
                if found is not None:
                    yield found

    return codec.survey(samples(), next(iter(_steps(source, earlier)), StepInfo()))


def warnings_for(codec: DeltaCodec, source: Checkpoint) -> list[str]:
    """What the user of a codec should know about this run."""
    steps = _steps(source, None) or [StepInfo()]
    return list(dict.fromkeys(said for step in steps if (said := codec.warning(step)) is not None))


def _steps(source: Checkpoint, before: Checkpoint | None) -> list[StepInfo]:
    """The way from one to the other, for each group of the optimizer."""
    steps = None if before is None else before.origin.step, source.origin.step
    return [StepInfo(*steps, _options(group)) for group in source.groups]


def _options(group: Group) -> dict[str, Any]:
    return {key: value for key, value in group.options.items() if _plain(value)}


def _step(
    source: Checkpoint, before: Checkpoint | None, parameter: Parameter, earlier: Parameter | None
) -> dict[str, Any]:
    """What is known of the way from one to the other: the fields of `StepInfo`."""
    options = next((_options(group) for group in source.groups if parameter.name in group.names), {})
    return {
        "before": None if before is None or earlier is None else _count(before, earlier),
        "after": _count(source, parameter),
        "options": options,
    }


def _count(source: Checkpoint, parameter: Parameter) -> int | None:
    """Steps that the optimizer has done with a parameter, else with all."""
    said = parameter.values.get("step")
    if isinstance(said, (int, float)) and not isinstance(said, bool) and said == said // 1:
        return int(said)
    return source.origin.step


def _read_count(parameter: Parameter, transfer: Transfer, known: int | None) -> int | None:
    """The same where the optimizer keeps it as a tensor."""
    tensor = parameter.states.get("step")
    if tensor is None or tensor.size != 1 or tensor.dtype.kind not in "iuf":
        return known
    box = Box.whole(tensor.shape)
    value = float(transfer.fetch(tensor, box, "step", counted=False).reshape(-1)[0])
    return int(value) if value.is_integer() else known


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(isinstance(item, (int, float)) for item in value)
    return value is None or isinstance(value, (int, float))
