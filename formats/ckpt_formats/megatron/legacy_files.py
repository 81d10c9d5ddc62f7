"""The opened files of one legacy iteration, each with the ranks whose tensors it holds."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ckpt_formats.base import Shard
from ckpt_formats.errors import Corrupt, Incomplete
from ckpt_formats.identity import in_threads
from ckpt_formats.megatron.arguments import Arguments, Parallel, arguments_of, parallel_of
from ckpt_formats.megatron.folder import RankFolder, rank_folders
from ckpt_formats.torchfile import TorchFile, open_file
from ckpt_formats.values import Value

_MIXED = "Files of several iterations or runs were mixed: copy all files of one iteration again."
_ALL = "Copy the folders of all ranks into one."
_SAME = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "padded_vocab_size",
)


@dataclass(frozen=True)
class RankFile:
    """What one rank saved, and which rank it is in each group."""

    name: str
    model: TorchFile
    optimizer: TorchFile | None
    tp: int
    pp: int
    ep: int
    etp: int

    @property
    def root(self) -> Mapping[str, Value]:
        found: Mapping[str, Value] = self.model.root
        return found

    def chunks(self) -> list[Value]:
        """The state dicts of the model chunks: several with a virtual pipeline."""
        if "model" in self.root:
            return [self.root["model"]]
        names = (f"model{i}" for i in count())
        found: list[Value] = []
        for name in names:
            if name not in self.root:
                break
            found.append(self.root[name])
        return found


@dataclass(frozen=True)
class Legacy:
    """All ranks' files, and what their arguments say."""

    path: Path
    args: Arguments
    parallel: Parallel
    ranks: tuple[RankFile, ...]

    @property
    def first(self) -> RankFile:
        return self.ranks[0]

    def of_stage(self, pp: int) -> list[RankFile]:
        return [rank for rank in self.ranks if rank.pp == pp]

    def files(self) -> Iterator[TorchFile]:
        for rank in self.ranks:
            yield rank.model
            if rank.optimizer is not None:
                yield rank.optimizer

    def shards(self) -> Iterator[Shard]:
        for rank in self.ranks:
            where = {"tp": rank.tp, "pp": rank.pp} | ({"ep": rank.ep} if self.parallel.ep > 1 else {})
            yield Shard(rank.model.path, rank.model.path.stat().st_size, "model", where)
            if rank.optimizer is not None:
                yield Shard(rank.optimizer.path, rank.optimizer.path.stat().st_size, "optimizer", where)


def open_legacy(path: Path) -> Legacy:
    """Open all files. Raises `Incomplete` if a rank is missing, `Corrupt` if they are not of one iteration."""
    folders = rank_folders(path)
    for folder in folders:
        if not folder.model.is_file():
            raise Incomplete(f"{folder.model.name} is missing in {folder.path.name}", where=path, hint=_ALL)
    models = in_threads(open_file, [folder.model for folder in folders])
    found = [folder.optimizer for folder in folders]
    optimizers = in_threads(lambda file: None if file is None else open_file(file), found)
    for file in models:
        if not isinstance(file.root, dict):
            raise Corrupt("a file of a Megatron checkpoint holds a mapping", where=file.path)
    args = arguments_of(models[0].root, models[0].path)
    parallel = parallel_of(args)
    _check_one_iteration(models, path)
    ranks = _ranks(folders, models, optimizers, parallel, path)
    chunks = {len(rank.chunks()) for rank in ranks}
    if len(chunks) != 1 or 0 in chunks:
        raise Corrupt(f"ranks hold {sorted(chunks)} model chunks: as many on each were expected", where=path)
    if len({rank.optimizer is None for rank in ranks}) > 1:
        without = next(rank.name for rank in ranks if rank.optimizer is None)
        raise Incomplete(f"distrib_optim.pt is missing in {without}, but other ranks have it", where=path, hint=_ALL)
    return Legacy(path, args, parallel, ranks)


def _ranks(
    folders: Sequence[RankFolder],
    models: Sequence[TorchFile],
    optimizers: Sequence[TorchFile | None],
    parallel: Parallel,
    path: Path,
) -> tuple[RankFile, ...]:
    """Every rank that should be there, in the order of stages, tensor- and expert-parallel ranks."""
    files = {f.numbers: (f.path.name, m, o) for f, m, o in zip(folders, models, optimizers, strict=True)}
    made = []
    for numbers, tp, pp, ep, etp in saving_ranks(parallel):
        if numbers not in files:
            name = folder_name(numbers)
            raise Incomplete(
                f"{name} is missing: the run had tp {parallel.tp}, pp {parallel.pp}, ep {parallel.ep}, "
                f"{len(files)} folders are here",
                where=path,
                hint=_ALL,
            )
        made.append(RankFile(*files.pop(numbers), tp, pp, ep, etp))
    if files:
        name = folder_name(next(iter(files)))
        what = f"the arguments state tp {parallel.tp}, pp {parallel.pp}, ep {parallel.ep}: there is no rank of {name}"
        raise Corrupt(what, where=path, hint=_MIXED)
    if missing := set(range(parallel.tp)) - {rank.tp for rank in made}:
        raise Incomplete(
            f"Megatron saved nothing of tensor-parallel rank {min(missing)}: it saves one rank of each set of experts, "
            f"and with etp {parallel.etp} and ep {parallel.ep} these are not all",
            where=path,
            hint="Save with --ckpt-format torch_dist.",
        )
    return tuple(made)


def saving_ranks(parallel: Parallel) -> Iterator[tuple[tuple[int, ...], int, int, int, int]]:
    """(numbers in the folder's name, tp, pp, ep, etp) of every rank that saves.

    Within a stage ranks are counted by tp first; those that save hold the first
    copy of each set of experts. If etp is tp, they are a grid.
    """
    for pp in range(parallel.pp):
        for rank in range(parallel.etp * parallel.ep):
            tp, etp, ep = rank % parallel.tp, rank % parallel.etp, rank // parallel.etp
            numbers = (tp, *((pp,) if parallel.pp > 1 else ()), *((ep,) if parallel.ep > 1 else ()))
            yield numbers, tp, pp, ep, etp


def folder_name(numbers: Sequence[int]) -> str:
    return "_".join([f"mp_rank_{numbers[0]:02}", *(f"{number:03}" for number in numbers[1:])])


def _check_one_iteration(models: Sequence[TorchFile], path: Path) -> None:
    for key in ("iteration", "checkpoint_version"):
        values = {str(file.root.get(key)): file.path.parent.name for file in models}
        _agree(key, values, path)
    for key in _SAME:
        _agree(
            key,
            {str(arguments_of(file.root, file.path).record.get(key)): file.path.parent.name for file in models},
            path,
        )


def _agree(key: str, values: Mapping[str, str], path: Path) -> None:
    if len(values) > 1:
        (a, first), (b, second) = list(values.items())[:2]
        raise Corrupt(f"`{key}` is {a} in {first} but {b} in {second}", where=path, hint=_MIXED)
