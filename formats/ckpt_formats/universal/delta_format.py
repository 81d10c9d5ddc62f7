"""The universal format as a delta: the states of a checkpoint, encoded against those of an earlier one."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ckpt_codecs.delta import DeltaCodec, StatePair, StepInfo
from ckpt_codecs.registry import delta_from_config
from ckpt_formats.core.checkpoint import Checkpoint, Group, Parameter
from ckpt_formats.core.encoding import AUTO
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.format import FilePlan, Plan
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.universal import DeltaContent, PackContent
from ckpt_formats.universal.delta_plan import DeltaBase, sample
from ckpt_formats.universal.manifest import Parent
from ckpt_formats.universal.member_format import ChainMember


@dataclass(frozen=True, kw_only=True)
class Delta(ChainMember):
    """A checkpoint stored against an earlier one."""

    codec: str | None = AUTO
    earlier: Checkpoint | None = None
    """The parent as it can be read, which may differ from what was saved; None: no state needs a parent."""
    stored_against: Parent | None = None
    """Where the parent is, and its content id."""
    delta_codecs: Mapping[str, DeltaCodec] = field(default_factory=dict)
    """The delta codec of each parameter by its name; other parameters are stored without a delta."""

    @property
    def parent(self) -> Parent | None:
        return self.stored_against

    def identity(self) -> object:
        configurations = {name: codec.config() for name, codec in self.delta_codecs.items()}
        own = self.encoding, self.content, self.pack_nbytes, self.stored_against, configurations
        return own if self.unchanged is None else (*own, self.unchanged.identity)

    def inputs(self) -> tuple[Checkpoint, ...]:
        return (*super().inputs(), *(() if self.earlier is None else (self.earlier,)))

    def plan(self, source: Checkpoint) -> Plan:
        if self.single_file:
            raise UnsupportedError("a delta is a folder", hint="Give a target whose name does not end in .ucp.")
        plan = super().plan(source)
        return replace(plan, files=tuple(self._file(file, source) for file in plan.files))

    def _file(self, file: FilePlan, source: Checkpoint) -> FilePlan:
        assert isinstance(file.content, PackContent)
        deltas = {parameter.name: self.delta(parameter, source) for parameter in file.parameters}
        content = replace(file.content, deltas={name: delta for name, delta in deltas.items() if delta is not None})
        return replace(file, content=content, size=file.nbytes)

    def delta(self, parameter: Parameter, source: Checkpoint) -> DeltaContent | None:
        """How a parameter is to be stored as a delta; None if it is stored without one."""
        codec = self.delta_codecs.get(parameter.name)
        earlier = None if self.earlier is None else self.earlier.parameters.get(parameter.name)
        if codec is None or (self.earlier is not None and earlier is None):
            return None
        return DeltaContent(earlier, codec.config(), _step(source, self.earlier, parameter, earlier))

    def bases(self, file: FilePlan, transfer: Transfer) -> dict[str, DeltaBase]:
        assert isinstance(file.content, PackContent)
        deltas = file.content.deltas
        return {p.name: delta_base(p, deltas[p.name], transfer) for p in file.parameters if p.name in deltas}


def delta_base(parameter: Parameter, delta: DeltaContent, transfer: Transfer) -> DeltaBase:
    """What a parameter is to be encoded against, and its codec."""
    step = StepInfo(**delta.step)
    before = step.before if delta.earlier is None else _read_count(delta.earlier, transfer, step.before)
    step = replace(step, before=before, after=_read_count(parameter, transfer, step.after))
    return DeltaBase(delta.earlier, delta_from_config(dict(delta.codec)), step)


def fitted_to_checkpoint(
    codec: DeltaCodec, names: Collection[str], source: Checkpoint, earlier: Checkpoint | None, transfer: Transfer
) -> DeltaCodec:
    """The codec with the figures that it needs of the full state, taken from chunks of these parameters."""

    def samples() -> Iterator[tuple[int, StatePair]]:
        for name in names:
            parameter, before = source.parameters[name], None if earlier is None else earlier.parameters.get(name)
            if earlier is None or before is not None:
                chunk_sample = sample(parameter, DeltaBase(before, codec), transfer)
                if chunk_sample is not None:
                    yield chunk_sample

    return codec.survey(samples(), next(iter(_steps(source, earlier)), StepInfo()))


def warnings_for(codec: DeltaCodec, source: Checkpoint) -> list[str]:
    """What the user should know about a codec for this run."""
    steps = _steps(source, None) or [StepInfo()]
    return list(dict.fromkeys(warning for step in steps if (warning := codec.warning(step)) is not None))


def _steps(source: Checkpoint, before: Checkpoint | None) -> list[StepInfo]:
    """The step numbers before and after, and the options, for each group of the optimizer."""
    steps = None if before is None else before.origin.step, source.origin.step
    return [StepInfo(*steps, _options(group)) for group in source.groups]


def _options(group: Group) -> dict[str, Any]:
    return {key: value for key, value in group.options.items() if _plain(value)}


def _step(
    source: Checkpoint, before: Checkpoint | None, parameter: Parameter, earlier: Parameter | None
) -> dict[str, Any]:
    """What is known of the steps from `before` to `source` for a parameter: the fields of `StepInfo`."""
    options = next((_options(group) for group in source.groups if parameter.name in group.names), {})
    return {
        "before": None if before is None or earlier is None else _count(before, earlier),
        "after": _count(source, parameter),
        "options": options,
    }


def _count(source: Checkpoint, parameter: Parameter) -> int | None:
    """The number of steps that the optimizer has done for a parameter, else for all; None if it is not known."""
    count = parameter.values.get("step")
    if isinstance(count, (int, float)) and not isinstance(count, bool) and count == count // 1:
        return int(count)
    return source.origin.step


def _read_count(parameter: Parameter, transfer: Transfer, known: int | None) -> int | None:
    """The number of steps if the optimizer has it as a tensor, else `known`."""
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
