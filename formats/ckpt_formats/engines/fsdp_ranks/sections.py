"""Split a rank's file that contains more than a model: also an optimizer and other items in one dict."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import get_args

from ckpt_formats.containers.torchfile import TensorRef
from ckpt_formats.core.errors import UnsupportedError
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.fsdp_ranks.leaves import Leaf
from ckpt_formats.engines.fsdp_ranks.merge import RankMerge
from ckpt_formats.engines.fsdp_ranks.rank_file import RankFile
from ckpt_formats.state_dicts.model import MODEL_KEYS
from ckpt_formats.state_dicts.optimizer_form import optimizers_in, without_optimizers

Files = dict[str, dict[int, RankFile]]
"""Files by role, then by rank."""

_LEAVES = tuple(get_args(Leaf))


def sorted_files(files: Files) -> Files:
    """The files, with optimizers and extras in model files as separate files of those roles.

    Raises `UnsupportedError` if there are several optimizers.
    """
    result: Files = {role: dict(ranks) for role, ranks in files.items()}
    for rank, file in files["model"].items():
        optimizers = optimizers_in(file.root)
        if len(optimizers) > 1:
            names = ", ".join(printable(one.title) for one in optimizers)
            raise UnsupportedError(f"holds the states of several optimizers: {names}", where=file.path)
        tree = without_optimizers(file.root, optimizers)
        key = next((key for key in MODEL_KEYS if _has_leaf(tree.get(key))), None)
        if not optimizers and key is None:
            continue
        model = {k: v for k, v in tree.items() if isinstance(v, _LEAVES)} if key is None else tree[key]
        rest = {k: v for k, v in tree.items() if (k not in model if key is None else k != key)}
        result["model"][rank] = replace(file, root=model)
        for one in optimizers:
            if rank in files.get("optimizer", {}):
                raise UnsupportedError(
                    f"holds the states of an optimizer, as {files['optimizer'][rank].path.name} also does",
                    where=file.path,
                )
            own = {k: one.inside[k] for k in one.keys}
            result.setdefault("optimizer", {})[rank] = replace(file, root=own)
        if rest:
            earlier = result.setdefault("extra", {}).get(rank)
            root = {**rest, **(earlier.root if earlier is not None else {})}
            result["extra"][rank] = replace(file, root=root)
    return result


def merged_extras(files: Mapping[int, RankFile]) -> tuple[dict[int, RankFile], dict[str, Value]]:
    """(extras without sharded entries, by rank; the merged sharded entries, such as averages of the weights)."""
    sharded = {
        str(key) for file in files.values() for key, value in file.root.items() if _has_leaf(value, replicas=False)
    }
    merged = {
        key: RankMerge().tree({rank: file.root[key] for rank, file in files.items() if key in file.root}, key)
        for key in sorted(sharded)
    }
    rest = {
        rank: replace(file, root={k: v for k, v in file.root.items() if str(k) not in sharded})
        for rank, file in files.items()
    }
    return rest, merged


def _has_leaf(value: Value, *, replicas: bool = True) -> bool:
    """Does a dict, or a dict in it, contain a tensor? Without `replicas`, only sharded tensors count."""
    if not isinstance(value, dict):
        return False
    kinds = _LEAVES if replicas else tuple(kind for kind in _LEAVES if kind is not TensorRef)
    return any(isinstance(leaf, kinds) for leaf in _values(value))


def _values(tree: Mapping[Value, Value]) -> Iterator[Value]:
    for value in tree.values():
        if isinstance(value, dict):
            yield from _values(value)
        else:
            yield value
