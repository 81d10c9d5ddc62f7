"""Plan all files of a new checkpoint: model and optimizer of every rank, and the layers of a pipeline.

A file is planned by the coordinates of its rank, and laid out when it is written. At planning, only the first and the
last file of each kind are laid out, so that errors that depend on the layout are found; the sizes of others follow
from theirs.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from ckpt_formats.containers.torchfile import FileOutline
from ckpt_formats.containers.torchfile_tree import outline_nbytes, tree_outline, tree_part
from ckpt_formats.core.checkpoint import MODEL, Group, Parameter
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.format import Counts, FileLayouts, FilePlan, TensorRanges
from ckpt_formats.core.layout import is_even
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.values import StdDict, Value
from ckpt_formats.engines.deepspeed import write_model, write_optimizer
from ckpt_formats.engines.deepspeed.pipeline import Pipeline, split_name
from ckpt_formats.engines.deepspeed.write_layout import WriteLayout
from ckpt_formats.engines.deepspeed.write_model import model3_file, model_file, shards_of_rank
from ckpt_formats.engines.deepspeed.write_optimizer import (
    FlatGroup,
    FlatRows,
    RankShards,
    SubGroup,
    flat_groups,
    partition,
    sub_groups,
    zero3_file,
    zero12_file,
)

_RECENT = 4
"""Model-parallel ranks whose shards stay in memory, for the files of their data-parallel ranks."""

T = TypeVar("T")


@dataclass(frozen=True)
class ModelFile:
    """The model file of a model-parallel rank at stages 0 to 2; at stage 3, that of one data-parallel rank of it."""

    pp: int
    tp: int
    dp: int | None = None


@dataclass(frozen=True)
class OptimizerFile:
    """The optimizer file of a rank."""

    pp: int
    tp: int
    dp: int


@dataclass(frozen=True)
class LayerFile:
    """The file of a layer of a pipeline, and of a tensor-parallel rank."""

    tp: int
    layer: int


Coordinates = ModelFile | OptimizerFile | LayerFile


def parts(target: WriteLayout) -> Iterator[FilePlan]:
    """The files of every rank. Raises `UnsupportedError` or `RulesError` for what DeepSpeed could not load."""
    layouts = RankLayouts(target)
    coordinates = list(coordinates_of_files(target, layouts))
    exact: dict[Coordinates, int] = {}
    for kind in (ModelFile, OptimizerFile, LayerFile):
        members = [one for one in coordinates if isinstance(one, kind)]
        for one in dict.fromkeys((*members[:1], *members[-1:])):
            exact[one] = layouts.lay_out(layouts.plan(one, 0)).nbytes
    sizes = _Sizes(layouts)
    for one in coordinates:
        yield layouts.plan(one, exact[one] if one in exact else sizes.of(one))


def coordinates_of_files(target: WriteLayout, layouts: "RankLayouts") -> Iterator[Coordinates]:
    """Yield the coordinates of each file that is written: of models, of optimizers, then of layers of a pipeline."""
    for pp in range(target.pp):
        for tp in range(target.tp):
            yield from (ModelFile(pp, tp, dp) for dp in range(target.dp)) if target.stage == 3 else [ModelFile(pp, tp)]
            yield from (OptimizerFile(pp, tp, dp) for dp in range(target.dp if target.stage else 0))
    for tp in range(target.tp if target.pipeline is not None else 0):
        yield from (LayerFile(tp, layer) for layer in sorted(layouts.names_by_layer))


@dataclass(frozen=True)
class RankLayouts(FileLayouts):
    """What all files share: the target, and tables of the ranks whose files were written last."""

    target: WriteLayout

    def plan(self, file: Coordinates, size: int) -> FilePlan:
        """A file by its coordinates."""
        step = self.target.source.origin.step
        folder = f"global_step{0 if step is None else step}"
        if isinstance(file, LayerFile):
            name = f"layer_{file.layer:02}-model_{file.tp:02}-model_states.pt"
            return self._plan(f"{folder}/{name}", file, size, "model", {"tp": file.tp, "layer": file.layer})
        rank = {"pp": file.pp, "tp": file.tp} | ({} if file.dp is None else {"dp": file.dp})
        if isinstance(file, ModelFile):
            name = f"{folder}/{self.rank_name(file)}_model_states.pt"
            return self._plan(name, file, size, "model", rank)
        bf16 = "bf16_" if self.target.dtype.name == "bfloat16" else ""
        name = f"{folder}/{bf16}{self.rank_name(file)}_optim_states.pt"
        return self._plan(name, file, size, "optimizer", rank)

    def _plan(self, name: str, file: Coordinates, size: int, role: str, rank: Mapping[str, int]) -> FilePlan:
        return FilePlan(name, (), file, size, role, rank, (), self)

    def rank_name(self, file: ModelFile | OptimizerFile) -> str:
        """The rank's name in file names."""
        mp = f"mp_rank_{file.pp * self.target.tp + file.tp:02}"
        return mp if file.dp is None else f"zero_pp_rank_{file.dp}_{mp}"

    def lay_out(self, file: FilePlan) -> FilePlan:
        """The file as it is written. Raises `UnsupportedError` or `RulesError` for what DeepSpeed could not load."""
        one = file.content
        if isinstance(one, LayerFile):
            shards = self.shards(None, one.tp)
            members = [shards[name] for name in self.names_by_layer[one.layer]]
            return tree_part(file.file, self.layer(one), members, file.role, file.rank)
        assert isinstance(one, (ModelFile, OptimizerFile))
        tree = self.model(one, self.rank_name(one)) if isinstance(one, ModelFile) else self.optimizer(one)
        return tree_part(file.file, tree, self.shards(one.pp, one.tp).values(), file.role, file.rank)

    def model(self, file: ModelFile, rank: str) -> dict[str, Value]:
        """The tree of a model file; `rank` is the name of the rank whose own items it gets."""
        stage, shards = self.stages[file.pp], self.shards(file.pp, file.tp)
        if file.dp is not None:
            return model3_file(stage, shards, self.sub_groups(file.pp, file.tp), file.dp, rank)
        tree = model_file(stage, shards, rank)
        # The weights of a pipeline are in the layers' files.
        return tree if stage.pipeline is None else tree | {"module": None, "buffer_names": []}

    def optimizer(self, file: OptimizerFile) -> dict[str, Value]:
        """The tree of an optimizer file."""
        stage, rank = self.stages[file.pp], self.rank_name(file)
        if stage.stage == 3:
            return zero3_file(stage, self.sub_groups(file.pp, file.tp), file.dp, rank)
        return zero12_file(stage, self.flat_groups(file.pp, file.tp), file.dp, rank)

    def layer(self, file: LayerFile) -> StdDict:
        """The tree of a layer's file."""
        shards, tree = self.shards(None, file.tp), StdDict()
        for name in self.names_by_layer[file.layer]:
            tree[split_name(name)[2]] = shards[name].states[MODEL]
        return tree

    def shards(self, pp: int | None, tp: int) -> RankShards:
        """The parameters of a model-parallel rank; with `pp` None, those of all stages."""
        stage = self.target if pp is None or self.target.pipeline is None else self.stages[pp]
        key = ("shards", None if self.target.pipeline is None else pp, tp)
        shards: RankShards = self._recent.get(key, lambda: shards_of_rank(stage, tp))
        return shards

    def flat_groups(self, pp: int, tp: int) -> list[FlatGroup]:
        shards = self.shards(pp, tp)
        groups: list[FlatGroup] = self._recent.get(("flat", pp, tp), lambda: flat_groups(self.stages[pp], shards))
        return groups

    def sub_groups(self, pp: int, tp: int) -> list[SubGroup]:
        shards = self.shards(pp, tp)
        groups: list[SubGroup] = self._recent.get(("sub", pp, tp), lambda: sub_groups(self.stages[pp], shards))
        return groups

    @cached_property
    def _recent(self) -> "_Recent":
        return _Recent(3 * _RECENT)

    @cached_property
    def stages(self) -> list[WriteLayout]:
        """The target of each pipeline stage, with the parameters of the stage alone."""
        pipeline = self.target.pipeline
        return [self.target] if pipeline is None else _stages(self.target, pipeline)

    @cached_property
    def names_by_layer(self) -> Mapping[int, tuple[str, ...]]:
        """The names of the parameters in the file of each layer of a pipeline."""
        by_layer: dict[int, list[str]] = {}
        pipeline = self.target.pipeline
        for name, parameter in self.target.source.parameters.items() if pipeline is not None else ():
            for layer in pipeline.layers_of(name) if pipeline is not None and parameter.role != "extra" else ():
                by_layer.setdefault(layer, []).append(name)
        return {layer: tuple(names) for layer, names in by_layer.items()}

    def names(self, file: FilePlan) -> Sequence[str]:
        one = file.content
        if isinstance(one, LayerFile):
            return self.names_by_layer[one.layer]
        assert isinstance(one, (ModelFile, OptimizerFile))
        return self._names[one.pp]

    def ranges(self, file: FilePlan) -> Sequence[TensorRanges]:
        one = file.content
        if isinstance(one, OptimizerFile):
            return [self._ranges(one), TensorRanges.whole(self._other_tensors(one, write_optimizer.rank_items))]
        if isinstance(one, ModelFile) and one.dp is not None:
            return [self._ranges(one), TensorRanges.whole(self._other_tensors(one, write_model.rank_items))]
        return [TensorRanges.whole(self.lay_out(file).tensors)]

    def _ranges(self, file: ModelFile | OptimizerFile) -> TensorRanges:
        """The values in the vectors of a file; in a model file of stage 3, those are slices of frozen parameters."""
        rows = self._rows(file)
        key = ("tensors", type(file), file.pp, file.tp)
        tensors: list[Tensor] = self._recent.get(key, lambda: [tensor for one in rows for tensor in one.tensors])
        starts, stops = np.concatenate([one.starts for one in rows]), np.concatenate([one.stops for one in rows])
        return TensorRanges(tensors, starts, stops)

    def _rows(self, file: ModelFile | OptimizerFile) -> list[FlatRows]:
        dp, dp_rank = self.target.dp, file.dp or 0
        if isinstance(file, ModelFile):
            frozen = self._recent.get(("frozen", file.pp, file.tp), lambda: self._frozen(file))
            return [FlatRows.sliced(*frozen, dp, dp_rank)]
        if self.target.stage == 3:
            by_group = [group.rows(dp, dp_rank) for group in self.sub_groups(file.pp, file.tp)]
        else:
            by_group = partition(self.target, self.flat_groups(file.pp, file.tp), dp_rank)
        return [rows for by_state in by_group for rows in by_state.values()]

    def _frozen(self, file: ModelFile) -> tuple[list[Tensor], Counts]:
        tensors = [p.states[MODEL] for p in self.shards(file.pp, file.tp).values() if p.role == "frozen"]
        return tensors, np.array([tensor.size for tensor in tensors], np.int64)

    def _other_tensors(
        self, file: ModelFile | OptimizerFile, items_of: Callable[[WriteLayout, str], Value]
    ) -> Sequence[Tensor]:
        """The tensors in a file that are not sharded over data-parallel ranks."""
        stage, shards = self.stages[file.pp], self.shards(file.pp, file.tp)
        rank = self.rank_name(file)
        own = _tensors_of(items_of(stage, rank if stage.of_rank(rank) else _NO_RANK))
        if isinstance(file, ModelFile):
            return [*own, *(p.states[MODEL] for p in shards.values() if p.role == "buffer")]
        groups: Sequence[FlatGroup | SubGroup]
        groups = (self.sub_groups if self.target.stage == 3 else self.flat_groups)(file.pp, file.tp)
        return [*own, *_tensors_of([value for g in groups for s, value in g.state.items() if s not in g.vectors])]

    @cached_property
    def _names(self) -> list[tuple[str, ...]]:
        return [tuple(n for n, p in stage.source.parameters.items() if p.role != "extra") for stage in self.stages]


def _stages(target: WriteLayout, pipeline: Pipeline) -> list[WriteLayout]:
    """The target of each stage.

    Raises `UnsupportedError` if a group of the optimizer has no parameter on one of them.
    """
    source = target.source
    stages_of = {
        name: frozenset(pipeline.stages_of(name)) for name, p in source.parameters.items() if p.role != "extra"
    }
    every: frozenset[int] = frozenset(range(target.pp))
    by_stage: list[dict[str, Parameter]] = [{} for _ in range(target.pp)]
    for name, parameter in source.parameters.items():
        for pp in sorted(stages_of.get(name, every)):
            if pp < target.pp:
                by_stage[pp][name] = parameter
    result = []
    for pp_rank, parameters in enumerate(by_stage):
        groups = tuple(Group(one.options, tuple(n for n in one.names if n in parameters)) for one in source.groups)
        for g, group in enumerate(groups):
            if not group.names:
                raise UnsupportedError(f"pipeline stage {pp_rank} has no parameter of the optimizer's group {g}")
        aliases = {alias: name for alias, name in source.aliases.items() if name in parameters}
        result.append(replace(target, source=replace(source, parameters=parameters, groups=groups, aliases=aliases)))
    return result


class _Sizes:
    """The sizes of files that are not laid out.

    Files of one kind differ in what their ranks have of their own, and at stages 1 and 2 in the parameters that a
    partition has. All else is pickled once.
    """

    def __init__(self, layouts: RankLayouts) -> None:
        self._layouts = layouts
        self._target = layouts.target
        self._is_even = all(map(is_even, layouts.target.layout.rules))
        self._outlines: dict[object, FileOutline] = {}

    def of(self, file: Coordinates) -> int:
        """Bytes of a file; of a rank with items of its own, a few more or less."""
        tp = 0 if self._is_even else file.tp
        if isinstance(file, LayerFile):
            layer = replace(file, tp=tp)
            return outline_nbytes(self._once(layer, lambda: self._layouts.layer(layer)))
        if isinstance(file, OptimizerFile) and self._target.stage < 3:
            return self._partition(file, tp)
        dp = None if file.dp is None else min(file.dp, 1)  # only the first rank's files differ from the others'
        stage, rank = self._layouts.stages[file.pp], self._layouts.rank_name(file)
        if isinstance(file, ModelFile):
            model = ModelFile(file.pp, tp, dp)
            common = self._once(model, lambda: self._layouts.model(model, _NO_RANK))
            return outline_nbytes(self._with_items(common, write_model.rank_items, stage, rank))
        groups = self._layouts.sub_groups(file.pp, tp)
        common = self._once(("zero3", file.pp, tp), lambda: zero3_file(stage, groups, 0, _NO_RANK, "lengths"))
        return outline_nbytes(self._with_items(common, write_optimizer.rank_items, stage, rank))

    def _partition(self, file: OptimizerFile, tp: int) -> int:
        """Bytes of an optimizer file at stages 1 and 2."""
        stage, groups = self._layouts.stages[file.pp], self._layouts.flat_groups(file.pp, tp)
        own = tree_outline(zero12_file(stage, groups, file.dp, self._layouts.rank_name(file), "lengths"))
        if stage.own_bf16:
            return outline_nbytes(own)
        # The paddings are the same for all ranks, and there is one for each parameter.
        paddings = self._once(("paddings", file.pp, tp), lambda: [list(group.paddings) for group in groups])
        empty = self._once(("empty", len(groups)), lambda: [[] for _ in groups])
        return outline_nbytes(
            replace(own, pickle_nbytes=own.pickle_nbytes + paddings.pickle_nbytes - empty.pickle_nbytes)
        )

    def _with_items(
        self, common: FileOutline, items_of: Callable[[WriteLayout, str], Value], stage: WriteLayout, rank: str
    ) -> FileOutline:
        """The outline of a file with the items that the rank has of its own."""
        if not stage.of_rank(rank):
            return common
        first = self._once(("items", items_of, stage.pp), lambda: items_of(stage, _NO_RANK))
        own = tree_outline(items_of(stage, rank))
        storages = list(common.storages)
        for nbytes in first.storages:
            storages.remove(nbytes)
        return FileOutline(common.pickle_nbytes + own.pickle_nbytes - first.pickle_nbytes, (*storages, *own.storages))

    def _once(self, key: object, tree: Callable[[], Value]) -> FileOutline:
        if key not in self._outlines:
            self._outlines[key] = tree_outline(tree())
        return self._outlines[key]


_NO_RANK = ""
"""The name of no rank of the source: what has it has no items of its own."""


class _Recent:
    """The results that were needed last."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._results: OrderedDict[object, Any] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: object, compute: Callable[[], T]) -> T:
        """The result for this key. Threads that need the same one wait for it."""
        with self._lock:
            if key not in self._results:
                self._results[key] = compute()
                while len(self._results) > self._count:
                    self._results.popitem(last=False)
            self._results.move_to_end(key)
            result: T = self._results[key]
            return result


def _tensors_of(tree: Value) -> tuple[Tensor, ...]:
    """The tensors in a tree."""
    return tree_part("", tree, ()).tensors
