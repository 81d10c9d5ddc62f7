"""A bucket that is written: objects that are created or replaced on conditions, so that no writer overwrites another's.

A request may be carried out although its answer is lost. So each object that is created has a number of the attempt
in its attributes: if the store then says that the object exists, it may be this very one.
"""

import errno
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError

from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.store_path import StoreError
from ckpt_formats.stores.clients import client_of
from ckpt_formats.stores.listed_store import StoredObject
from ckpt_formats.stores.object_store import described, listed
from ckpt_formats.stores.refusals import Refusal
from ckpt_formats.stores.repetition import ONCE, Repetition, Transient

T = TypeVar("T")

_SINGLE_REQUEST = 16 << 20
"""Bytes of a file that is uploaded by one request, and read as a whole. Larger ones are uploaded in parts."""
_PART = 8 << 20
_MAX_PARTS = 9_000
"""Stores allow 10,000."""
_ATTEMPT = "ckptattempt"
"""Azure takes only names that are identifiers."""
_SMALL = 1 << 20
"""Bytes that are sent in one request without more time for that."""


@dataclass(frozen=True)
class Version:
    """A version of an object, by which it is replaced only if nobody else has replaced it."""

    e_tag: str | None
    version: str | None

    def as_mode(self) -> Any:
        return {name: value for name, value in (("e_tag", self.e_tag), ("version", self.version)) if value}


@dataclass(frozen=True)
class Bucket:
    """A bucket, by its URL: to send it to another process sends no credentials. Threads may share it.

    All methods raise `OSError` that names the object if the store refuses, or still fails after some attempts.
    """

    url: str

    def list(self, folder: str) -> dict[str, StoredObject]:
        """All objects below a folder, by their keys, without those that only stand for a folder."""
        return self._attempt(folder, lambda: listed(self._client, folder, f"{self.url}/{folder}"))

    def read(self, key: str) -> tuple[bytes, Version] | None:
        """A small object; None if there is none."""

        def read() -> tuple[bytes, Version] | None:
            try:
                result = obstore.get(self._client, key)
                data = bytes(result.bytes())
            except (NotFoundError, FileNotFoundError) as error:
                _check_absence(error)
                return None
            if len(data) != result.meta["size"]:
                raise Transient("the store answers with fewer bytes than the object has", is_wrong=True)
            return data, Version(result.meta["e_tag"], result.meta["version"])

        return self._attempt(key, read)

    def head(self, key: str) -> StoredObject | None:
        """What the store says of an object; None if there is none."""

        def head() -> StoredObject | None:
            try:
                return described(obstore.head(self._client, key))
            except (NotFoundError, FileNotFoundError) as error:
                _check_absence(error)
                return None

        return self._attempt(key, head)

    def create(self, key: str, data: bytes) -> Version:
        """Create an object in one request. Raises `FileExistsError` if there is one."""
        attempt, client = uuid4().hex, self._client if len(data) <= _SMALL else self._sending

        def create() -> Version:
            try:
                return _version(
                    obstore.put(
                        client,
                        key,
                        data,
                        mode="create",
                        use_multipart=False,
                        attributes={_ATTEMPT: attempt},
                    )
                )
            except (AlreadyExistsError, PreconditionError):
                there = obstore.get(self._client, key)
                if there.attributes.get(_ATTEMPT) == attempt:
                    return Version(there.meta["e_tag"], there.meta["version"])
                raise FileExistsError(errno.EEXIST, "the object exists already", f"{self.url}/{key}") from None

        return self._attempt(key, create)

    def replace(self, key: str, data: bytes, version: Version) -> Version:
        """Replace an object. Raises `FileExistsError` if it is of another version now, or was deleted."""

        def replace() -> Version:
            try:
                return _version(obstore.put(self._client, key, data, mode=version.as_mode(), use_multipart=False))
            except (AlreadyExistsError, PreconditionError, NotFoundError, FileNotFoundError):
                there = self.read(key)
                if there is not None and there[0] == data:
                    return there[1]
                raise FileExistsError(errno.EEXIST, "another process replaced it", f"{self.url}/{key}") from None

        return self._attempt(key, replace)

    def upload(self, key: str, file: Path, check: Callable[[], None], parts_at_once: int = 2) -> str:
        """Create an object from a file of any size; the e_tag. Raises `FileExistsError` if there is one.

        `check` is called before an upload in parts is completed, and may raise: no store makes that conditional.
        Each of `parts_at_once` takes 8 MiB of memory, and more for files of more than 70 GB.
        """
        part = part_nbytes(file.stat().st_size)
        if not part:
            return self.create(key, file.read_bytes()).e_tag or ""
        if self.head(key) is not None:
            raise FileExistsError(errno.EEXIST, "the object exists already", f"{self.url}/{key}")

        def upload() -> str:
            stored = obstore.put(
                self._in_parts,
                key,
                _parts(file, part, check),
                use_multipart=True,
                chunk_size=part,
                max_concurrency=parts_at_once,
            )
            return stored["e_tag"] or ""

        return self._attempt(key, upload, takes_place=False)

    def tag_if_equal(self, key: str, file: Path) -> str | None:
        """The e_tag of an object if it has the bytes of a file, else None. It is read for that."""
        there = self.head(key)
        if there is None or there.nbytes != file.stat().st_size:
            return None
        unchanged: dict[str, Any] = {"if_match": there.e_tag} if there.e_tag else {}
        with file.open("rb", buffering=0) as opened:
            at = 0
            while part := opened.read(_PART):
                options: Any = {**unchanged, "range": (at, at + len(part))}

                def read(options: Any = options) -> bytes:
                    try:
                        return bytes(obstore.get(self._client, key, options=options).bytes())
                    except (PreconditionError, NotFoundError, FileNotFoundError):
                        return b""

                if self._attempt(key, read) != part:
                    return None
                at += len(part)
        return there.e_tag

    def delete(self, keys: Iterable[str]) -> None:
        """Delete objects. Those that do not exist are no error."""
        names = sorted(keys)

        def delete() -> None:
            try:
                obstore.delete(self._client, names)
            except (NotFoundError, FileNotFoundError):
                if len(names) > 1:  # some stores say so of one, and leave the rest
                    for name in names:
                        self.delete([name])

        if names:
            self._attempt(names[0], delete)

    def now(self, folder: str) -> float:
        """The time by the clock of the store, in seconds since 1970, from an object that is created for it."""
        key = f"{folder}/clock-{uuid4().hex}"
        self.create(key, b"")
        there = self.head(key)
        self.delete([key])
        return time.time() if there is None else there.modified

    def keeps_conditions(self, key: str) -> bool:
        """Whether the store refuses to create an object that exists. Some servers overwrite it and say nothing."""
        try:
            self.create(key, b"")
        except FileExistsError:
            return True
        return False

    def __getstate__(self) -> dict[str, str]:
        return {"url": self.url}

    @cached_property
    def _repeated(self) -> Repetition:
        return Repetition()

    @cached_property
    def _client(self) -> Any:
        return client_of(self.url, self._repeated.policy.http(), retries=ONCE)

    @cached_property
    def _sending(self) -> Any:
        """The client of requests that send up to 16 MiB."""
        return client_of(self.url, self._repeated.policy.http(_SINGLE_REQUEST), retries=ONCE)

    @cached_property
    def _in_parts(self) -> Any:
        """The client of uploads in parts, each of which it repeats by itself."""
        policy = self._repeated.policy
        return client_of(self.url, policy.http(_SINGLE_REQUEST), retries=policy.of_parts())

    def _attempt(self, key: str, request: Callable[[], T], takes_place: bool = True) -> T:
        """The result of a request, which is repeated if the store or the line fails."""
        where = f"{self.url}/{key}"

        def attempt() -> T:
            try:
                return request()
            except (FileExistsError, StoreError, CkptError):
                raise
            except (BaseError, OSError) as error:
                raise Refusal.of(error).error(where) from None

        return self._repeated(attempt, where, takes_place)


def _check_absence(error: BaseException) -> None:
    """Raise an error unless it says that there is no such object: there may be no such bucket."""
    if not Refusal.of(error).is_absence:
        raise error


def part_nbytes(nbytes: int) -> int:
    """The bytes of each part in which `Bucket.upload` puts a file of `nbytes`; 0 if it takes one request."""
    return 0 if nbytes <= _SINGLE_REQUEST else max(_PART, -(-nbytes // _MAX_PARTS))


def _version(stored: Any) -> Version:
    return Version(stored["e_tag"], stored["version"])


def _parts(file: Path, nbytes: int, check: Callable[[], None]) -> Iterator[bytes]:
    with file.open("rb", buffering=0) as opened:
        while part := opened.read(nbytes):
            yield part
    # obstore drives this generator within its runtime, which panics if the same thread makes a request, as a check may.
    with ThreadPoolExecutor(1, "ckpt-requests") as pool:
        pool.submit(check).result()
