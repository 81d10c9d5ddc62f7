"""A rank's file that holds more than a model: its optimizer, too, and what else a script puts into one dict."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import get_args

from ckpt_formats.containers.torchfile import TensorRef
from ckpt_formats.core.errors import Unsupported
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value
from ckpt_formats.engines.fsdp_ranks.leaves import Leaf
from ckpt_formats.engines.fsdp_ranks.merge import RankMerge
from ckpt_formats.engines.fsdp_ranks.rank_file import RankFile
from ckpt_formats.state_dicts.model import MODEL_KEYS
from ckpt_formats.state_dicts.optimizer_form import optimizers_in, without_optimizers

Files = dict[str, dict[int, RankFile]]
"""By role, then by rank."""

_LEAVES = tuple(get_args(Leaf))


def sorted_files(files: Files) -> Files:
    """With the optimizers and extras of model files as files of those roles. Raises `Unsupported` for several."""
    found: Files = {role: dict(ranks) for role, ranks in files.items()}
    for rank, file in files["model"].items():
        optimizers = optimizers_in(file.root)
        if len(optimizers) > 1:
            names = ", ".join(printable(one.title) for one in optimizers)
            raise Unsupported(f"holds the states of several optimizers: {names}", where=file.path)
        tree = without_optimizers(file.root, optimizers)
        key = next((key for key in MODEL_KEYS if _holds_leaf(tree.get(key))), None)
        if not optimizers and key is None:
            continue
        model = {k: v for k, v in tree.items() if isinstance(v, _LEAVES)} if key is None else tree[key]
        rest = {k: v for k, v in tree.items() if (k not in model if key is None else k != key)}
        found["model"][rank] = replace(file, root=model)
        for one in optimizers:
            if rank in files.get("optimizer", {}):
                raise Unsupported(
                    f"holds the states of an optimizer, and {files['optimizer'][rank].path.name} does, too",
                    where=file.path,
                )
            own = {k: one.inside[k] for k in one.keys}
            found.setdefault("optimizer", {})[rank] = replace(file, root=own)
        if rest:
            before = found.setdefault("extra", {}).get(rank)
            root = {**rest, **(before.root if before is not None else {})}
            found["extra"][rank] = replace(file, root=root)
    return found


def merged_extras(files: Mapping[int, RankFile]) -> tuple[dict[int, RankFile], dict[str, Value]]:
    """Extras without the entries that the ranks hold together, such as averages of the weights; and those, whole."""
    spread = {
        str(key) for file in files.values() for key, value in file.root.items() if _holds_leaf(value, whole=False)
    }
    whole = {
        key: RankMerge().tree({rank: file.root[key] for rank, file in files.items() if key in file.root}, key)
        for key in sorted(spread)
    }
    rest = {
        rank: replace(file, root={k: v for k, v in file.root.items() if str(k) not in spread})
        for rank, file in files.items()
    }
    return rest, whole


def _holds_leaf(value: Value, *, whole: bool = True) -> bool:
    """In a dict, or in dicts in it: a tensor; unless `whole`, one of which a rank may have a part."""
    if not isinstance(value, dict):
        return False
    kinds = _LEAVES if whole else tuple(kind for kind in _LEAVES if kind is not TensorRef)
    return any(isinstance(leaf, kinds) for leaf in _values(value))


def _values(tree: Mapping[Value, Value]) -> Iterator[Value]:
    for value in tree.values():
        if isinstance(value, dict):
            yield from _values(value)
        else:
            yield value
