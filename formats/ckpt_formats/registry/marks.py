"""What is at a path if a format detects it: names and first bytes, as data.

A format is imported only if one of its marks is there, because to import all of them takes longer than to read a small
checkpoint. Marks are necessary, not sufficient: `Format.detect` decides.
"""

import re
from fnmatch import fnmatchcase
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from ckpt_formats.containers.file_starts import SAFETENSORS, TAR
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.folders import entries_of


class Marks(NamedTuple):
    """The marks of a format; one of them is enough. In a pattern, `*` stands for any text."""

    paths: tuple[str, ...] = ()
    """Paths from a folder."""
    entries: tuple[str, ...] = ()
    """Patterns of the names in a folder, in lower case."""
    files: tuple[str, ...] = ()
    """Patterns of the name of a single file, in lower case."""
    starts: re.Pattern[bytes] | None = None
    """What the first bytes of a single file match."""


_START_NBYTES = 320
_POINTER_OF_MEGATRON = "latest_checkpointed_iteration.txt"
_DICT_OF_MSGPACK = re.compile(rb"[\x81-\x8f\xde\xdf]")
_SAFETENSORS = ("*.safetensors", "*.safetensors.index.json")
_TORCH = ("*.pt", "*.pth", "*.bin", "*.ckpt")

MARKS: dict[str, Marks] = {
    "universal": Marks(("manifest.json",), (), ("*.ucp",)),
    "chain": Marks(("chain.json",)),
    "deepspeed-universal": Marks(("zero/optimizer_state.pt", "latest_universal")),
    "megatron": Marks(("common.pt", _POINTER_OF_MEGATRON)),
    "megatron-legacy": Marks((_POINTER_OF_MEGATRON,), ("mp_rank_*/model_optim_rng.pt",)),
    "deepspeed": Marks(("latest",), ("*_model_states.pt", "*_optim_states.pt")),
    "torchtune": Marks(("recipe_state/recipe_state.pt",)),
    "fairseq2": Marks(("model/pp_00", "pp_00")),
    "hf": Marks(
        ("model_index.json", "modules.json", "sharded"),
        ("*.bin", "*.bin.index.json", *_SAFETENSORS, "pytorch_model_fsdp_*"),
    ),
    "fsdp-ranks": Marks((), ("*rank*",), ("*rank*",)),
    # Its folders may be inside folders of any names, those of the steps of a run.
    "dcp": Marks((".metadata", "pytorch_model_fsdp_0", "optimizer_0", "checkpoint"), ("*",), ("*.metadata", "__*")),
    "safetensors": Marks((), _SAFETENSORS, _SAFETENSORS, SAFETENSORS),
    "flax": Marks(("flax_model.msgpack", "flax_model.msgpack.index.json"), (), ("*.msgpack",), _DICT_OF_MSGPACK),
    "numpy": Marks((), (), ("*.npz",), re.compile(rb"PK\x03\x04.{26}[^\0]{1,255}?\.npy", re.DOTALL)),
    "stable-baselines3": Marks((), (), ("*.zip",), re.compile(rb"PK\x03\x04.{26}(data[^./]|\w+\.pth)", re.DOTALL)),
    "tar": Marks((), (), ("*.tar", "*.nemo"), TAR),
    "torch": Marks((), (), _TORCH, re.compile(rb"[P\x80]")),
    "torch-folder": Marks((), (*_TORCH, "*.pkl", "*.tar")),
}
"""The marks of each format. The `detect` of a format without marks is called for every path."""


_MARKING_NAMES = frozenset(path.rpartition("/")[2] for marks in MARKS.values() for path in marks.paths)


def is_mark(file: str) -> bool:
    """Whether a file, by its path in a checkpoint, is one by which a format knows the whole."""
    name = file.rpartition("/")[2]
    return name.endswith(".index.json") or name in _MARKING_NAMES


class PathMarks:
    """A path, and what is at it: each thing is looked at once, and only if a mark needs it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def has_marks_of(self, name: str) -> bool:
        """Whether the format of this name may detect the path. Never raises."""
        if name not in MARKS:
            return True
        marks = MARKS[name]
        return (
            any(_may_exist(self._path / path) for path in marks.paths)
            or any(map(self._has_entry, marks.entries))
            or any(fnmatchcase(self._file_name, pattern) for pattern in marks.files)
            or (marks.starts is not None and self._start != b"" and marks.starts.match(self._start) is not None)
        )

    @cached_property
    def _entries(self) -> list[tuple[str, str]]:
        """The names in a folder, in lower case and as they are; none if it cannot be read."""
        try:
            return [(entry.name.lower(), entry.name) for entry in entries_of(self._path)]
        except CkptError:
            raise
        except (OSError, ValueError):  # ValueError: no path has a zero byte
            return []

    @cached_property
    def _file_name(self) -> str:
        """The name of a single file, in lower case; empty for anything else."""
        return self._path.name.lower() if self._path.is_file() else ""

    @cached_property
    def _start(self) -> bytes:
        """The first bytes of a single file; empty for anything else."""
        if not self._file_name:
            return b""
        try:
            with self._path.open("rb") as file:
                return file.read(_START_NBYTES)
        except CkptError:
            raise
        except OSError:
            return b""

    def _has_entry(self, pattern: str) -> bool:
        """Whether a name in the folder matches; after a slash, the pattern has the path of a file in that entry."""
        pattern, _, inner = pattern.partition("/")
        matching = (name for lower, name in self._entries if fnmatchcase(lower, pattern))
        return any(not inner or _may_exist(self._path / name / inner) for name in matching)


def _may_exist(path: Path) -> bool:
    """Whether there is something at a path; True also if that cannot be determined, so that the format reports why."""
    try:
        path.lstat()
    except CkptError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True
