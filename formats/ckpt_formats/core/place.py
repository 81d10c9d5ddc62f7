"""Places: where bytes are written under names, on conditions, so that no writer overwrites another's.

A place is a folder of the file system (`core.folder_place`), or a prefix of a bucket (`stores.bucket_place`). What
holds a target or a chain together (the exclusive right, the journal, publication) is written once, on this interface.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ckpt_formats.core.claims import MAX_LIST
from ckpt_formats.core.errors import CorruptError, LockedError, NotFoundError, UnsafeError


@dataclass(frozen=True)
class Version:
    """A version of an object, by which it is replaced only if nobody else has replaced it."""

    e_tag: str | None
    version: str | None = None

    def as_mode(self) -> Any:
        return {name: value for name, value in (("e_tag", self.e_tag), ("version", self.version)) if value}

    def other(self) -> "Version":
        """A version that the object does not have, of the same form."""
        return Version(*(None if one is None else _changed(one) for one in (self.e_tag, self.version)))


def _changed(text: str) -> str:
    """An e_tag or a number with another last digit."""
    at = max((i for i, one in enumerate(text) if one.isalnum()), default=0)
    return f"{text[:at]}{'1' if text[at : at + 1] == '0' else '0'}{text[at + 1 :]}"


class ObjectEntry(Protocol):
    """What a listing says of an object."""

    @property
    def nbytes(self) -> int: ...

    @property
    def e_tag(self) -> str:
        """What a store calls this version; empty in a folder."""

    @property
    def modified(self) -> float:
        """Seconds since 1970, by the clock of the place."""


class ReadPlace(ABC):
    """Names such as `journal/3f` below one folder, prefix or URL, and the bytes that they have. Threads may share it.

    Plain data, to be sent to other processes. All methods raise `OSError` that names the object; none lists.
    """

    look_seconds: ClassVar[float]
    """Seconds between two looks at what another process does: a look costs a request in a store."""

    @abstractmethod
    def within(self, name: str) -> "ReadPlace":
        """The place below a name."""

    def past_caches(self) -> "ReadPlace":
        """The same place, whose reads no cache on the way answers by itself."""
        return self

    @abstractmethod
    def where(self, key: str = "") -> str:
        """The path or URL of an object, for messages."""

    @abstractmethod
    def read(self, key: str, max_nbytes: int = MAX_LIST) -> tuple[bytes, Version] | None:
        """A small object; None if it does not exist. Raises `UnsafeError` if it has more than `max_nbytes`."""

    @abstractmethod
    def read_range(self, key: str, offset: int, nbytes: int) -> memoryview:
        """The bytes of an object from `offset` on: (nbytes,) uint8.

        Raises `FileNotFoundError` if it does not exist, `CorruptError` if it has fewer bytes.
        """

    @abstractmethod
    def read_if_changed(
        self, key: str, version: Version, max_nbytes: int = MAX_LIST, seconds: float = 0.0
    ) -> tuple[bytes, Version] | None:
        """As `read`, if the object has another version now than `version`, that of an earlier read; else None.

        `seconds`: how long to wait for another version; a bucket, and most servers, answer at once. Raises
        `FileNotFoundError` if the object does not exist.
        """


class Place(ReadPlace):
    """A `ReadPlace` that can be listed and written."""

    batch_seconds: ClassVar[float]
    """Seconds for which notes are collected before they are written: a killed process loses so much of its work."""
    can_append: ClassVar[bool] = False
    is_consistent: ClassVar[bool]
    """Whether a read shows the last write, whoever wrote it; else only conditions do."""

    @property
    @abstractmethod
    def local(self) -> Path | None:
        """The folder of the file system that this place is; None in a store."""

    @abstractmethod
    def within(self, name: str) -> "Place":
        """The place below a name."""

    def absolute(self) -> "Place":
        """The place for processes that run in other folders."""
        return self

    @abstractmethod
    def list(self) -> Mapping[str, ObjectEntry]:
        """All objects of the place and below it, by their names; none if there is no such folder."""

    @abstractmethod
    def head(self, key: str) -> ObjectEntry | None:
        """What is known of one object; None if it does not exist."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> Version:
        """Create an object, which appears whole. Raises `FileExistsError` if it exists."""

    def append(self, key: str, data: bytes) -> None:
        """Add bytes to the end of an object, which is created if it does not exist. Only if `can_append`."""
        raise NotImplementedError(f"{type(self).__name__} cannot append")

    @abstractmethod
    def create_from(
        self, key: str, file: Path, check: Callable[[], None], parts_at_once: int = 4, tag: str | None = None
    ) -> str:
        """Create an object from a file, which is then the place's; it is durable when this returns. Returns its e_tag.

        `check` is called before the object appears, and may raise. `tag`: the e_tag that most stores will give to it,
        if it is known. Raises `FileExistsError` if the object exists.
        """

    @abstractmethod
    def replace_from(self, key: str, file: Path, there: ObjectEntry | None) -> None:
        """Replace an object by a file, or create it if `there` is None. The file is then the place's, and durable.

        `there`: what a listing or `head` said of the object. Raises `FileExistsError` if it is another one now. In a
        folder this is exact among processes that hold the same lock.
        """

    @abstractmethod
    def tag_if_equal(self, key: str, file: Path) -> str | None:
        """The e_tag of an object if it is the file that another attempt of the same job has written; else None."""

    @abstractmethod
    def replace(self, key: str, data: bytes, version: Version | None) -> Version:
        """Replace an object, or create it if `version` is None; it is durable when this returns.

        Raises `FileExistsError` if it is of another version now. In a folder this is exact among processes that hold
        the same lock.
        """

    @abstractmethod
    def replace_stale(self, key: str, data: bytes, version: Version) -> Version:
        """As `replace`, for an object whose owner is taken for dead; it needs no lock."""

    @abstractmethod
    def renew(self, key: str, data: bytes, version: Version) -> Version:
        """Give an object the time of now. `data`: what it may have then. Raises as `replace`."""

    @abstractmethod
    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. Those that do not exist are no error."""

    @abstractmethod
    def remove(self, names: Iterable[str], first: str) -> None:
        """Delete objects, and all below these names, those called `first` before the others. Follows no link."""

    @abstractmethod
    def remove_drafts(self, key: str) -> None:
        """Remove what killed processes have left of an object that they were writing. Nobody else may write it now."""

    @abstractmethod
    def truncate(self, key: str, nbytes: int) -> None:
        """Remove the end of an object that is no longer needed, if the place can do so."""

    @abstractmethod
    def now(self) -> float:
        """The time by the clock of the place, in seconds since 1970."""

    @abstractmethod
    def opened(self) -> AbstractContextManager["Place"]:
        """The place, to create objects from files. If a folder is removed or renamed meanwhile, they go with it."""

    @abstractmethod
    def lock(self, key: str, error: LockedError, required: bool) -> AbstractContextManager[bool]:
        """Hold a lock of the file system, which ends with the process; gives False where a place has none.

        Raises `error` if another process holds it, and `OutputError` if it is `required` and the file system cannot
        lock.
        """

    @abstractmethod
    def ignored_condition(self, key: str, version: Version, data: bytes) -> str | None:
        """The condition that the place ignores; None if it keeps all. Some servers overwrite, and report nothing.

        The object `key` of this version exists; where a condition is ignored, it has the bytes `data` then.
        """


def absent(where: str) -> NotFoundError:
    """The error of an object that does not exist."""
    return NotFoundError("there is no such file or object", where=where)


def too_large(nbytes: int | None, max_nbytes: int, where: str) -> UnsafeError:
    """The error of an object that has `nbytes`; None: more than `max_nbytes`."""
    has = f"more than {max_nbytes:,}" if nbytes is None else f"{nbytes:,}"
    return UnsafeError(f"has {has} bytes, more than it can need ({max_nbytes:,})", where=where)


def ends_early(nbytes: int, needed: int, where: str) -> CorruptError:
    """The error of an object that has `nbytes`, and not the `needed` ones."""
    return CorruptError(f"has {nbytes:,} bytes, and {needed:,} are needed", where=where)
