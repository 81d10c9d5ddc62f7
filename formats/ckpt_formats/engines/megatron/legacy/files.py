"""Open the files of one legacy iteration, and find the rank that wrote each."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from ckpt_formats.containers.torchfile import TorchFile, open_file
from ckpt_formats.core.checkpoint import SourceFile
from ckpt_formats.core.errors import CorruptError, IncompleteError
from ckpt_formats.core.identity import in_threads
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.megatron.shared.arguments import Arguments, Parallel, arguments_of, parallel_of
from ckpt_formats.engines.megatron.shared.folder import ITERATION_FOLDER, RankFolder, rank_folders
from ckpt_formats.state_dicts.statements import Statement, check_agreement, step_in_name, whole

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
    "expert_tensor_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "world_size",
    "ffn_hidden_size",
    "kv_channels",
    "num_query_groups",
    "group_query_attention",
    "swiglu",
    "quick_geglu",
    "num_experts",
    "moe_ffn_hidden_size",
    "untie_embeddings_and_output_weights",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "ddp_bucket_size",
    "transformer_impl",
    "consumed_train_samples",
)
"""Arguments that must be equal on all ranks: those that determine how files are read, and a counter."""
_CHUNK = re.compile(r"model\d*")


@dataclass(frozen=True)
class RankFile:
    """The files of one rank, and its coordinates."""

    name: str
    model: TorchFile
    optimizer: TorchFile | None
    tp: int
    pp: int
    ep: int
    etp: int

    @property
    def root(self) -> Mapping[str, Value]:
        root: Mapping[str, Value] = self.model.root
        return root

    def chunks(self) -> list[Value]:
        """The state dicts of the model chunks: several if there is a virtual pipeline."""
        if "model" in self.root:
            return [self.root["model"]]
        names = (f"model{i}" for i in count())
        chunks: list[Value] = []
        for name in names:
            if name not in self.root:
                break
            chunks.append(self.root[name])
        return chunks


@dataclass(frozen=True)
class LegacyFiles:
    """The files of all ranks, and the arguments."""

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

    def shards(self) -> Iterator[SourceFile]:
        for rank in self.ranks:
            where = {"tp": rank.tp, "pp": rank.pp} | ({"ep": rank.ep} if self.parallel.ep > 1 else {})
            yield SourceFile(rank.model.path, rank.model.path.stat().st_size, "model", where)
            if rank.optimizer is not None:
                yield SourceFile(rank.optimizer.path, rank.optimizer.path.stat().st_size, "optimizer", where)


def open_legacy(path: Path) -> LegacyFiles:
    """Open all files.

    Raises `IncompleteError` if a rank is missing, `CorruptError` if files are of different iterations.
    """
    folders = rank_folders(path)
    for folder in folders:
        if not folder.model.is_file():
            raise IncompleteError(f"{folder.model.name} is missing in {folder.path.name}", where=path, hint=_ALL)
    models = in_threads(open_file, [folder.model for folder in folders])
    optimizer_files = [folder.optimizer for folder in folders]
    optimizers = in_threads(lambda file: None if file is None else open_file(file), optimizer_files)
    for file in models:
        if not isinstance(file.root, dict):
            raise CorruptError("it does not contain a mapping, as files of Megatron checkpoints do", where=file.path)
    args = arguments_of(models[0].root, models[0].path)
    parallel = parallel_of(args)
    _check_one_iteration(models, path)
    ranks = _ranks(folders, models, optimizers, parallel, path)
    _check_chunks(ranks, args, parallel, path)
    _check_numbers(ranks, args, parallel)
    if len({rank.optimizer is None for rank in ranks}) > 1:
        without = next(rank.name for rank in ranks if rank.optimizer is None)
        raise IncompleteError(
            f"distrib_optim.pt is missing in {without}, but other ranks have it", where=path, hint=_ALL
        )
    _check_optimizers(ranks, path)
    return LegacyFiles(path, args, parallel, ranks)


def _ranks(
    folders: Sequence[RankFolder],
    models: Sequence[TorchFile],
    optimizers: Sequence[TorchFile | None],
    parallel: Parallel,
    path: Path,
) -> tuple[RankFile, ...]:
    """Every rank that the arguments imply, in the order of stages, tensor- and expert-parallel ranks.

    Raises: IncompleteError if a folder is missing, CorruptError if there is a folder of no such rank.
    """
    files = {f.numbers: (f.path.name, m, o) for f, m, o in zip(folders, models, optimizers, strict=True)}
    ranks = []
    for numbers, tp, pp, ep, etp in saving_ranks(parallel):
        if numbers not in files:
            name = folder_name(numbers)
            raise IncompleteError(
                f"{name} is missing: the run has tp {parallel.tp}, pp {parallel.pp}, ep {parallel.ep}, "
                f"but {len(files)} folders are present",
                where=path,
                hint=_ALL,
            )
        ranks.append(RankFile(*files.pop(numbers), tp, pp, ep, etp))
    if files:
        name = folder_name(next(iter(files)))
        message = (
            f"the arguments state tp {parallel.tp}, pp {parallel.pp}, ep {parallel.ep}, so there is no rank {name}"
        )
        raise CorruptError(message, where=path, hint=_MIXED)
    if missing := set(range(parallel.tp)) - {rank.tp for rank in ranks}:
        raise IncompleteError(
            f"Megatron did not save tensor-parallel rank {min(missing)}: it saves one rank for each set of experts, "
            f"and with etp {parallel.etp} and ep {parallel.ep} these do not include all ranks",
            where=path,
            hint="Save with --ckpt-format torch_dist.",
        )
    return tuple(ranks)


def saving_ranks(parallel: Parallel) -> Iterator[tuple[tuple[int, ...], int, int, int, int]]:
    """(numbers in the folder's name, tp, pp, ep, etp) of every rank that saves.

    In a stage, ranks are numbered by tp first. The ranks that save are those with the first copy of each set of
    experts. If etp equals tp, they are a grid of tp and ep.
    """
    for pp in range(parallel.pp):
        for rank in range(parallel.etp * parallel.ep):
            tp, etp, ep = rank % parallel.tp, rank % parallel.etp, rank // parallel.etp
            numbers = (tp, *((pp,) if parallel.pp > 1 else ()), *((ep,) if parallel.ep > 1 else ()))
            yield numbers, tp, pp, ep, etp


def folder_name(numbers: Sequence[int]) -> str:
    """The name of a rank's folder: `mp_rank_00_001` for (0, 1)."""
    return "_".join([f"mp_rank_{numbers[0]:02}", *(f"{number:03}" for number in numbers[1:])])


def _check_one_iteration(models: Sequence[TorchFile], path: Path) -> None:
    statements = list[Statement]()
    for file in models:
        name, args = file.path.parent.name, arguments_of(file.root, file.path).record
        for key in ("iteration", "checkpoint_version"):
            statements.append(Statement(f"`{key}`", name, _comparable(file.root.get(key))))
        for key in _SAME:
            statements.append(Statement(f"`{key}`", name, _comparable(args.get(key))))
    check_agreement((*statements, step_in_name(path, ITERATION_FOLDER, "`iteration`")), path, _MIXED)


def _comparable(value: Value) -> Value:
    """A number, text or flag as it is, `not set` for None. Other values cannot be compared: None."""
    return value if isinstance(value, (bool, int, float, str)) else "not set" if value is None else None


def _check_chunks(ranks: Sequence[RankFile], args: Arguments, parallel: Parallel, path: Path) -> None:
    """Raise `CorruptError` unless every rank has the number of model chunks that the arguments state, and no others."""
    for rank in ranks:
        count = len(rank.chunks())
        known = {"model"} if "model" in rank.root else {f"model{i}" for i in range(count)}
        if odd := sorted(str(key) for key in rank.root if _CHUNK.fullmatch(str(key)) and key not in known):
            raise CorruptError(
                f"{rank.name} has the model chunks {', '.join(sorted(known)) or 'none'}, and also {printable(odd[0])}",
                where=rank.model.path,
                hint="A chunk between them is missing, or two checkpoints were merged into one.",
            )
    chunks = {len(rank.chunks()) for rank in ranks}
    if len(chunks) != 1 or 0 in chunks:
        raise CorruptError(
            f"ranks have {sorted(chunks)} model chunks: the number should be equal and not 0", where=path
        )
    stated = args.optional("virtual_pipeline_model_parallel_size") if parallel.pp > 1 else None
    if stated and stated not in chunks:
        raise CorruptError(
            f"`virtual_pipeline_model_parallel_size` is {stated}, but each rank has {max(chunks)} model chunks",
            where=path,
            hint=_MIXED,
        )


def _check_numbers(ranks: Sequence[RankFile], args: Arguments, parallel: Parallel) -> None:
    """Raise `CorruptError` if the `rank` in a file is not that of its folder. Converters write one rank in all
    files."""
    numbers = [whole(arguments_of(rank.root, rank.model.path).record.get("rank")) for rank in ranks]
    world = args.optional("world_size")
    if None in numbers or len(set(numbers)) == 1 or not world or world % parallel.pp:
        return
    per_stage = world // parallel.pp
    for number, rank in zip(numbers, ranks, strict=True):
        assert number is not None
        places = [("tensor", rank.tp, number % parallel.tp)]
        if not args.flag("use_tp_pp_dp_mapping"):
            places.append(("pipeline", rank.pp, number // per_stage))
            places.append(("expert", rank.ep, number % per_stage // parallel.etp % parallel.ep))
        for kind, place, stated in places:
            if place != stated:
                raise CorruptError(
                    f"{rank.name} was written by rank {number}, which is {kind}-parallel rank {stated}, not {place}",
                    where=rank.model.path,
                    hint="Was a folder renamed, or copied over that of another rank?",
                )


def _check_optimizers(ranks: Sequence[RankFile], path: Path) -> None:
    """Raise `IncompleteError` if only some ranks have an optimizer."""
    without = [rank.name for rank in ranks if rank.root.get("optimizer") is None]
    if without and len(without) < len(ranks):
        raise IncompleteError(f"there is no optimizer in {without[0]}, but other ranks have one", where=path, hint=_ALL)
    if without and (extra := next((rank.name for rank in ranks if rank.optimizer is not None), None)):
        raise IncompleteError(
            f"{extra} has a distrib_optim.pt, but its model_optim_rng.pt has no groups of the optimizer",
            where=path,
            hint=_ALL,
        )
