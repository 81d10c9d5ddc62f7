"""The stages of a `PipelineModule`: which layers are on which stage, and which are tied. File names do not state it.

Parameters of layer L are called `L.rest`; those of a tied module are called
`tied_modules.KEY.rest`, on every stage that uses it. A layer has a file of its own
unless it is only a function, such as a tied embedding that is used as the head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from ckpt_formats.core.errors import InvalidArgumentError, UnsupportedError
from ckpt_formats.core.values import Value, is_natural

_TIED = "tied_modules."


@dataclass(frozen=True)
class Pipeline:
    """The stages of a pipeline."""

    stages: tuple[tuple[int, ...], ...]
    """By stage: the layers that have files."""
    tied: Mapping[str, tuple[int, ...]]
    """By key: the layers whose files contain the tied module."""
    users: Mapping[str, tuple[int, ...]]
    """By key: the stages that have the tied module."""

    def stages_of(self, name: str) -> tuple[int, ...]:
        """The stages that have the parameter of this name."""
        key, layer, _ = split_name(name)
        if key is not None:
            return self.users.get(key, (0,))
        return self._stages_by_layer.get(layer, ())

    @cached_property
    def _stages_by_layer(self) -> Mapping[int, tuple[int, ...]]:
        by_layer: dict[int, tuple[int, ...]] = {}
        for stage, layers in enumerate(self.stages):
            for layer in dict.fromkeys(layers):
                by_layer[layer] = (*by_layer.get(layer, ()), stage)
        return by_layer

    def layers_of(self, name: str) -> tuple[int, ...]:
        """The layers whose files contain the parameter of this name."""
        key, layer, _ = split_name(name)
        return (layer,) if key is None else self.tied.get(key, ())

    def split(self, pp: int, firsts: Sequence[int] | None) -> "Pipeline":
        """The same layers on `pp` stages; `firsts` are the first layers of each.

        Raises `UnsupportedError` if the number of stages changes and `firsts` is None:
        the training script decides where stages begin, and no file records it. Raises `InvalidArgumentError` for
        `firsts` that are none of `pp` stages.
        """
        if firsts is None and pp == len(self.stages):
            return self
        layers = sorted(layer for stage in self.stages for layer in stage)
        firsts = (0,) if firsts is None and pp == 1 else firsts
        if firsts is None:
            raise UnsupportedError(
                f"the first layers of {pp} pipeline stages are not known: the model has layers {layers[0]} to "
                f"{layers[-1]}, and the training script's partition_method decides",
                hint="State the first layer of each stage, such as --stages 0,4,8.",
            )
        if len(firsts) != pp or list(firsts) != sorted(set(firsts)) or firsts[0] != 0:
            raise InvalidArgumentError(
                f"--stages {','.join(map(str, firsts))} for layers {layers[0]} to {layers[-1]} and {pp} stages",
                hint="State the first layer of each stage, from 0 on, such as --stages 0,4,8.",
            )
        ends = (*firsts[1:], layers[-1] + 1)
        stages = tuple(tuple(n for n in layers if a <= n < b) for a, b in zip(firsts, ends, strict=True))
        last = len(self.stages) - 1
        users: dict[str, tuple[int, ...]] = {}
        for key, old in self.users.items():
            files = set(self.tied.get(key, ()))
            new_users = {s for s, stage in enumerate(stages) if files & set(stage)}
            without = {s for s in old if not files & set(self.stages[s])}
            if without or len(files) == 1:  # its other user is the last layer: a function, which has no file
                if without - {last} or last not in old:
                    where = min(without - {last} or old)
                    raise UnsupportedError(f"tied module `{key}` is used on stage {where} by a layer without a file")
                new_users.add(pp - 1)
            users[key] = tuple(sorted(new_users))
        return Pipeline(stages, self.tied, users)

    def to_json(self) -> dict[str, Value]:
        """The pipeline as JSON, for the origin of a checkpoint."""
        return {
            "stages": [list(stage) for stage in self.stages],
            "tied": {key: list(layers) for key, layers in self.tied.items()},
            "users": {key: list(stages) for key, stages in self.users.items()},
        }


def pipeline_of(fields: Value) -> Pipeline | None:
    """The pipeline from its JSON; None if the value is no pipeline."""
    if not isinstance(fields, dict) or set(fields) != {"stages", "tied", "users"}:
        return None
    lists = [*fields["stages"], *fields["tied"].values(), *fields["users"].values()]
    if not all(isinstance(one, list) and all(map(is_natural, one)) for one in lists):
        return None
    return Pipeline(
        tuple(map(tuple, fields["stages"])),
        {key: tuple(layers) for key, layers in fields["tied"].items()},
        {key: tuple(stages) for key, stages in fields["users"].items()},
    )


def split_name(name: str) -> tuple[str | None, int, str]:
    """(key of the tied module, or None; layer, or -1; name within the layer)."""
    if name.startswith(_TIED):
        _, key, rest = name.split(".", 2)
        return key, -1, rest
    layer, _, rest = name.partition(".")
    return None, int(layer) if layer.isdigit() else -1, rest


def find_pipeline(by_stage: Sequence[Sequence[str]], layer_of_tied: Mapping[str, Sequence[int]]) -> Pipeline:
    """The pipeline whose stages have parameters of these names. `layer_of_tied` are layers by key of tied module."""
    stages: list[set[int]] = []
    users: dict[str, list[int]] = {}
    for number, names in enumerate(by_stage):
        split = [split_name(name) for name in names]
        stages.append({layer for key, layer, _ in split if key is None and layer >= 0})
        for key in dict.fromkeys(key for key, _, _ in split if key is not None):
            users.setdefault(key, []).append(number)
    for key, numbers in users.items():
        for layer, stage in zip(layer_of_tied.get(key, ()), numbers, strict=False):
            stages[stage].add(layer)
    tied = {key: tuple(layers) for key, layers in layer_of_tied.items()}
    return Pipeline(
        tuple(tuple(sorted(stage)) for stage in stages), tied, {key: tuple(numbers) for key, numbers in users.items()}
    )
