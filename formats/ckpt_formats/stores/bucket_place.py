"""A prefix of a bucket as a place."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ckpt_formats.core.claims import MAX_LIST
from ckpt_formats.core.errors import LockedError
from ckpt_formats.core.place import ObjectEntry, Place, Version
from ckpt_formats.stores.bucket import Bucket
from ckpt_formats.stores.listed_store import StoredObject


@dataclass(frozen=True)
class BucketPlace(Place):
    """The objects whose keys begin with a prefix."""

    look_seconds: ClassVar[float] = 5.0
    batch_seconds: ClassVar[float] = 5.0
    is_consistent: ClassVar[bool] = False
    local: ClassVar[None] = None

    bucket: Bucket
    prefix: str
    """Without a slash at its end; empty for a whole bucket."""

    def within(self, name: str) -> "BucketPlace":
        return BucketPlace(self.bucket, self._key(name))

    def where(self, key: str = "") -> str:
        return f"{self.bucket.url}/{self._key(key)}" if key else f"{self.bucket.url}/{self.prefix}"

    def list(self) -> dict[str, StoredObject]:
        start = len(self._key(""))
        return {key[start:]: one for key, one in self.bucket.list(self.prefix).items()}

    def head(self, key: str) -> StoredObject | None:
        return self.bucket.head(self._key(key))

    def read(self, key: str, max_nbytes: int = MAX_LIST) -> tuple[bytes, Version] | None:
        return self.bucket.read(self._key(key), max_nbytes)

    def read_range(self, key: str, offset: int, nbytes: int) -> memoryview:
        return self.bucket.read_range(self._key(key), offset, nbytes)

    def read_if_changed(
        self, key: str, version: Version, max_nbytes: int = MAX_LIST, seconds: float = 0.0
    ) -> tuple[bytes, Version] | None:
        return self.bucket.read_if_changed(self._key(key), version, max_nbytes)

    def create(self, key: str, data: bytes) -> Version:
        return self.bucket.create(self._key(key), data)

    def create_from(
        self, key: str, file: Path, check: Callable[[], None], parts_at_once: int = 4, tag: str | None = None
    ) -> str:
        def check_both() -> None:
            """No store makes the end of an upload in parts conditional."""
            check()
            if self.head(key) is not None:
                raise FileExistsError

        check()
        return self.bucket.upload(self._key(key), file, check_both, parts_at_once, tag)

    def replace_from(self, key: str, file: Path, there: ObjectEntry | None) -> None:
        if there is None:
            self.create_from(key, file, lambda: None)
        else:
            self.bucket.replace_from(self._key(key), file, there)

    def tag_if_equal(self, key: str, file: Path) -> str | None:
        return self.bucket.tag_if_equal(self._key(key), file)

    def replace(self, key: str, data: bytes, version: Version | None) -> Version:
        return self.create(key, data) if version is None else self.bucket.replace(self._key(key), data, version)

    def replace_stale(self, key: str, data: bytes, version: Version) -> Version:
        return self.replace(key, data, version)

    def renew(self, key: str, data: bytes, version: Version) -> Version:
        return self.replace(key, data, version)

    def delete(self, keys: Iterable[str]) -> None:
        self.bucket.delete(map(self._key, keys))

    def remove(self, names: Iterable[str], first: str) -> None:
        keys = [key for name in names for key in (self.bucket.list(self._key(name)) or [self._key(name)])]
        firsts = {key for key in keys if key.rpartition("/")[2] == first}
        self.bucket.delete(firsts)
        self.bucket.delete(set(keys) - firsts)

    def remove_drafts(self, key: str) -> None:
        """Nothing: an object appears by one request."""

    def truncate(self, key: str, nbytes: int) -> None:
        """Nothing: an object can only be written again."""

    def now(self) -> float:
        return self.bucket.now(self.prefix)

    @contextmanager
    def opened(self) -> Iterator["BucketPlace"]:
        yield self

    @contextmanager
    def lock(self, key: str, error: LockedError, required: bool) -> Iterator[bool]:
        yield False

    def ignored_condition(self, key: str, version: Version, data: bytes) -> str | None:
        return self.bucket.ignored_condition(self._key(key), version, data)

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}" if self.prefix else name
