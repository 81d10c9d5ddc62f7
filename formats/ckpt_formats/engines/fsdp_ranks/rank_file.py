"""Open one rank's file: its tree, in which every tensor states which part of a complete tensor it is.

The trees of all ranks are in memory at the same time. To save memory, the tensors of all
ranks share equal meshes and specs, of which a model has few.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt_formats.containers.torchfile import TorchFile, open_file
from ckpt_formats.core.claims import MAX_STATE_DEPTH, MAX_VALUES
from ckpt_formats.core.errors import CorruptError, UnsafeError
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value, kind_of
from ckpt_formats.engines.fsdp_ranks.dtensor import MeshCache
from ckpt_formats.engines.fsdp_ranks.leaves import SharedLeaves, leaf_of

_RANK = re.compile(r"rank_?(\d{1,9})")
"""The rank in a file's name, and in the name it was saved under, which is in its archive."""
_WRAPPERS = ("model", "state_dict", "optimizer", "optim")


@dataclass(frozen=True)
class RankFile:
    """A file that one rank saved. `root` has a `Leaf` for each tensor; the tree of extras is unchanged."""

    rank: int
    path: Path
    root: dict[Value, Value]
    file: TorchFile
    """The opened file without its tree."""


def open_rank(path: Path, role: str, rank: int, world: int, known: SharedLeaves) -> RankFile:
    """Open a file. Only headers are read. Raises `CorruptError`, `UnsupportedError` or `UnsafeError`."""
    file = open_file(path)
    saved, named = (_RANK.findall(name) for name in (file.stem, path.stem))
    if saved and named and int(saved[-1]) != int(named[-1]):
        raise CorruptError(
            f"was saved as {printable(file.stem)}: it is another rank's file, renamed",
            where=path,
            hint="Copy the files of all ranks again, under their own names.",
        )
    root = file.root
    if role == "extra":
        root = root if isinstance(root, dict) else {"extra": root}
    else:
        if isinstance(root, dict) and len(root) == 1 and next(iter(root)) in _WRAPPERS:
            (root,) = root.values()
        if not isinstance(root, dict):
            raise CorruptError(f"holds {kind_of(root)}, not a state dict", where=path)
        root = _Leaves(role == "optimizer", MeshCache(rank, path, known.meshes, known.specs), world, known).tree(root)
    return RankFile(rank, path, root, replace(file, root=None))


@dataclass
class _Leaves:
    """Replaces tensors in a tree by leaves. Counts values: a file may share dicts so that the tree is huge."""

    lists: bool
    """Replace tensors in lists, too: an optimizer's lists may have tensors."""
    meshes: MeshCache
    world: int
    known: SharedLeaves
    count: int = 0

    def tree(self, value: dict[Value, Value], depth: int = 0) -> dict[Value, Value]:
        """The tree with leaves instead of tensors. Raises `UnsafeError` if it is too deep or too large."""
        self.count += len(value)
        if depth > MAX_STATE_DEPTH or self.count > MAX_VALUES:
            raise UnsafeError("dicts are nested or repeated without end", where=self.meshes.where)
        return {key: self._one(item, depth) for key, item in value.items()}

    def _one(self, value: Value, depth: int) -> Value:
        if isinstance(value, dict):
            return self.tree(value, depth + 1)
        if self.lists and type(value) is list:
            return list(self.tree(dict(enumerate(value)), depth + 1).values())
        leaf = leaf_of(value, self.meshes, self.world, self.known)
        return value if leaf is None else leaf
