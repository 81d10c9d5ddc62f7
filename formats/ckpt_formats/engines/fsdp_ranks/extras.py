"""Collect the items of all ranks other than the model and its optimizer: schedulers, RNG states, data loaders."""

from collections.abc import Mapping

from ckpt_formats.containers.typed_json import same
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.fsdp_ranks.rank_file import RankFile
from ckpt_formats.state_dicts.optimizer_form import is_optimizer


def collect_extras(files: Mapping[int, RankFile], differing: Mapping[int, Mapping[str, Value]]) -> dict[str, Value]:
    """The extras: the items of the first rank, and under `ranks` the items of other ranks that differ.

    `differing` are values in the ranks' models that are no tensors and not the same on all ranks.
    Raises `CorruptError` if the ranks' schedulers are at different steps.
    """
    _check_one_epoch(files)
    first: dict[str, Value] = {}
    ranks: dict[str, dict[str, Value]] = {}
    for rank, file in files.items():
        items = _items(file)
        if rank == min(files):
            first = items
        elif other := {key: value for key, value in items.items() if key not in first or not same(value, first[key])}:
            ranks[str(rank)] = other
    if any(key in ("model", "optim", "ranks") or is_optimizer(value) for key, value in first.items()):
        first = {"extra_state": first}
    extras = {**first, "ranks": ranks} if ranks else first
    return with_rank_items(extras, {rank: {"model": dict(items)} for rank, items in differing.items()})


def with_rank_items(extras: Mapping[str, Value], ranks: Mapping[int, Mapping[str, Value]]) -> dict[str, Value]:
    """The extras with more items of ranks. `ranks` are the items by rank."""
    known = extras.get("ranks", {})
    added = {str(rank): {**known.get(str(rank), {}), **items} for rank, items in ranks.items()}
    return {**extras, "ranks": {**known, **added}} if ranks else dict(extras)


def _check_one_epoch(files: Mapping[int, RankFile]) -> None:
    seen: dict[str, tuple[Value, RankFile]] = {}
    for file in files.values():
        for key, value in file.root.items():
            epoch = value.get("last_epoch") if isinstance(value, dict) else None
            if isinstance(epoch, int):
                first, other = seen.setdefault(str(key), (epoch, file))
                if first != epoch:
                    raise CorruptError(
                        f"`{printable(str(key))}` counted to {first} in {other.path.name}, but to {epoch} here",
                        where=file.path,
                        hint="Files of several steps were mixed: copy all files of one step again.",
                    )


def _items(file: RankFile) -> dict[str, Value]:
    if file.path.name.startswith("random_states"):
        return {"random_states": file.root}
    return {str(key): value for key, value in file.root.items()}
