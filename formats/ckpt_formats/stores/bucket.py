"""A bucket that is written: objects that are created or replaced on conditions, so that no writer overwrites another's.

A request may be carried out although its answer is lost. So each object that is created has a number of the attempt
in its attributes: if the store then says that the object exists, it may be this very one.

What a store acknowledges is compared with what was sent: by the e_tag where that is an MD5, else by reading back.
"""

import errno
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, NotModifiedError, PreconditionError

from ckpt_formats.core.claims import MAX_LIST
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.place import ObjectEntry, Version, absent, ends_early, too_large
from ckpt_formats.core.store_path import StoreError
from ckpt_formats.stores.clients import ClientRequests, client_of
from ckpt_formats.stores.e_tags import RunningTag, sampled, tag_of
from ckpt_formats.stores.listed_store import StoredObject
from ckpt_formats.stores.object_store import bare_tag, body_of, described, listed
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
_REPLACEMENTS = 4
"""How often an object is replaced that the store damages."""
_SIGNED_FOR = timedelta(seconds=60)
"""How long a signed request for a deletion is valid, and may take."""


@dataclass
class _Naming:
    """What a store has shown of its e_tags: whether they are MD5s, by whether the object was uploaded in parts."""

    gives_md5: dict[bool, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class _Sent:
    """What was sent as an object."""

    nbytes: int
    tag: str
    """The e_tag that most stores give to it."""
    range: Callable[[int, int], bytes]
    in_parts: bool = False

    @classmethod
    def of(cls, data: bytes, tag: str | None = None) -> "_Sent":
        return cls(len(data), tag or tag_of(data), lambda begin, end: data[begin:end])


@dataclass(frozen=True)
class Bucket:
    """A bucket, by its URL: to send it to another process sends no credentials. Threads may share it.

    All methods raise `OSError` that names the object if the store refuses, or still fails after some attempts.
    """

    url: str
    read_back: bool = False
    """Whether all that is uploaded is read back, whatever the store says of it."""
    anonymous: bool = False
    """Whether requests are not signed: to read a public bucket."""

    def list(self, folder: str) -> dict[str, StoredObject]:
        """All objects below a folder, by their keys, without those that only stand for a folder."""
        return self._attempt(
            folder, lambda: listed(self._client, folder, f"{self.url}/{folder}", self._repeated.policy.silence)
        )

    def read(self, key: str, max_nbytes: int = MAX_LIST) -> tuple[bytes, Version] | None:
        """A small object; None if there is none. Raises `UnsafeError` if it has more than `max_nbytes`."""

        def read() -> tuple[bytes, Version] | None:
            try:
                return self._whole(key, {}, max_nbytes)
            except (NotFoundError, FileNotFoundError) as error:
                _check_absence(error)
                return None

        return self._attempt(key, read)

    def read_if_changed(self, key: str, version: Version, max_nbytes: int) -> tuple[bytes, Version] | None:
        """As `read`, if the object has another version now; else None. Raises `FileNotFoundError` if there is none."""
        options = {"if_none_match": version.e_tag} if version.e_tag else {}
        where = f"{self.url}/{key}"

        def read() -> tuple[bytes, Version] | None:
            try:
                there = self._whole(key, options, max_nbytes)
            except NotModifiedError:
                return None
            except (NotFoundError, FileNotFoundError) as error:
                _check_absence(error)
                raise absent(where) from None
            return None if there[1] == version and version.e_tag else there  # some stores ignore the condition

        return self._attempt(key, read)

    def _whole(self, key: str, options: Any, max_nbytes: int) -> tuple[bytes, Version]:
        """An object, by one request, and its version."""
        result = obstore.get(self._client, key, options=options)
        if result.meta["size"] > max_nbytes:
            raise too_large(result.meta["size"], max_nbytes, f"{self.url}/{key}")
        data = bytes(result.bytes())
        if len(data) != result.meta["size"]:
            raise Transient("the store answers with fewer bytes than the object has", is_wrong=True)
        return data, Version(result.meta["e_tag"], result.meta["version"])

    def read_range(self, key: str, offset: int, nbytes: int) -> memoryview:
        """The bytes of an object from `offset` on: (nbytes,) uint8.

        Raises `FileNotFoundError` if there is no object, `CorruptError` if it has fewer bytes.
        """
        where = f"{self.url}/{key}"

        def check(size: int) -> None:
            if size < offset + nbytes:
                raise ends_early(size, offset + nbytes, where)

        def read() -> memoryview:
            try:
                result = obstore.get(self._client, key, options={"range": (offset, offset + nbytes)})
                check(result.meta["size"])
                return body_of(result, nbytes)
            except (NotFoundError, FileNotFoundError) as error:
                _check_absence(error)
                raise absent(where) from None
            except BaseError:
                check(obstore.head(self._client, key)["size"])  # what a store answers then differs
                raise

        return self._attempt(key, read) if nbytes else memoryview(b"")

    def head(self, key: str) -> StoredObject | None:
        """What the store says of an object; None if there is none."""

        meta = self._meta(key)
        return None if meta is None else described(meta)

    def _meta(self, key: str) -> Any:
        """All that the store says of an object; None if there is none."""

        def head() -> Any:
            try:
                return obstore.head(self._client, key)
            except (NotFoundError, FileNotFoundError) as error:
                _check_absence(error)
                return None

        return self._attempt(key, head)

    def create(self, key: str, data: bytes) -> Version:
        """Create an object in one request. Raises `FileExistsError` if there is one.

        It is for notes: where the store's e_tags say nothing, they are not read back.
        """
        version = self._create(key, data)
        self._check(key, _Sent.of(data), version, is_note=True)
        return version

    def _create(self, key: str, data: bytes) -> Version:
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
            except (AlreadyExistsError, PreconditionError) as error:
                own = self._of_attempt(key, attempt)
                if own is not None:
                    return own
                _check_decision(error)
                raise FileExistsError(errno.EEXIST, "the object exists already", f"{self.url}/{key}") from None

        return self._attempt(key, create)

    def replace(self, key: str, data: bytes, version: Version) -> Version:
        """Replace an object. Raises `FileExistsError` if it is of another version now, or was deleted.

        What the store then has is compared with `data`, and replaced again if it is something else.
        """
        for _ in range(_REPLACEMENTS):
            version = self._replace(key, data, version)
            if self._has(key, _Sent.of(data), version, is_note=True):
                return version
        raise self._damaged(key)

    def _replace(self, key: str, data: bytes, version: Version) -> Version:
        attempt = uuid4().hex
        options: Any = {"use_multipart": False, "attributes": {_ATTEMPT: attempt}}

        def replace() -> Version:
            try:
                return _version(obstore.put(self._client, key, data, mode=version.as_mode(), **options))
            except (AlreadyExistsError, PreconditionError, NotFoundError, FileNotFoundError) as error:
                own = self._of_attempt(key, attempt)
                if own is not None:
                    return own
                _check_decision(error)
                raise FileExistsError(errno.EEXIST, "another process replaced it", f"{self.url}/{key}") from None

        return self._attempt(key, replace)

    def _of_attempt(self, key: str, attempt: str) -> Version | None:
        """The version of an object if an attempt has put it whose answer was lost; else None."""
        with suppress(NotFoundError, FileNotFoundError):
            there = obstore.get(self._client, key)
            if there.attributes.get(_ATTEMPT) == attempt:
                return Version(there.meta["e_tag"], there.meta["version"])
        return None

    def upload(
        self, key: str, file: Path, check: Callable[[], None], parts_at_once: int = 2, tag: str | None = None
    ) -> str:
        """Create an object from a file of any size; the e_tag. Raises `FileExistsError` if there is one.

        `check` is called before an upload in parts is completed, and may raise: no store makes that conditional.
        Each of `parts_at_once` takes 8 MiB of memory, and more for files of more than 70 GB. `tag`: the e_tag that most
        stores will give to it, if it is known. What the store has then is compared with the file; if it is something
        else, it is removed.
        """
        if not part_nbytes(file.stat().st_size):
            data = file.read_bytes()
            version = self._create(key, data)
            self._check(key, _Sent.of(data, tag), version)
            return version.e_tag or ""
        if self.head(key) is not None:
            raise FileExistsError(errno.EEXIST, "the object exists already", f"{self.url}/{key}")
        version, sent = self._put_parts(key, file, check, parts_at_once, tag)
        self._check(key, sent, version)
        return version.e_tag or ""

    def replace_from(self, key: str, file: Path, there: ObjectEntry) -> None:
        """Replace an object by a file of any size. Raises `FileExistsError` if it is not the one of the entry now.

        Large files are sent in parts, whose end no store makes conditional: then the object is compared right before.
        """

        def version_there() -> Version:
            meta = self._meta(key)
            now = None if meta is None else described(meta)
            if now is None or (now.nbytes, bare_tag(now.e_tag)) != (there.nbytes, bare_tag(there.e_tag)):
                raise FileExistsError(errno.EEXIST, "another process replaced it", f"{self.url}/{key}")
            return Version(meta["e_tag"], meta["version"])

        def check() -> None:
            version_there()

        version = version_there()
        if not part_nbytes(file.stat().st_size):
            self.replace(key, file.read_bytes(), version)
            return
        version, sent = self._put_parts(key, file, check, 4, None)
        if not self._has(key, sent, version):
            raise self._damaged(key)

    def _put_parts(
        self, key: str, file: Path, check: Callable[[], None], parts_at_once: int, tag: str | None
    ) -> tuple[Version, _Sent]:
        """Put a file in parts, and return what was sent. `check` and `tag` as in `upload`."""
        nbytes = file.stat().st_size
        part = part_nbytes(nbytes)
        running: RunningTag | None = None

        def upload() -> Version:
            nonlocal running
            running = None if tag else RunningTag(part)
            return _version(
                obstore.put(
                    self._in_parts,
                    key,
                    _parts(file, part, check, running),
                    use_multipart=True,
                    chunk_size=part,
                    max_concurrency=parts_at_once,
                )
            )

        version = self._attempt(key, upload, takes_place=False)
        return version, _Sent(
            nbytes, tag or (running.text() if running else ""), partial(_range_of, file), in_parts=True
        )

    def _check(self, key: str, sent: _Sent, version: Version, is_note: bool = False) -> None:
        """Remove an object that has other bytes than were sent. Raises `StoreError` then."""
        if not self._has(key, sent, version, is_note):
            with suppress(OSError):
                self.delete([key])
            raise self._damaged(key)

    def _has(self, key: str, sent: _Sent, version: Version, is_note: bool = False) -> bool:
        """Whether an object has the bytes that were sent, as far as that is known.

        It has if the e_tag says so. Else it is read: all of it in a store whose e_tags are MD5s, or if that is wanted;
        where e_tags say nothing, a sample, and nothing of notes.
        """
        known = self._naming.gives_md5
        is_named = (version.e_tag or "").strip('"') == sent.tag
        if is_named:
            known[sent.in_parts] = True
        gives_md5 = known.get(sent.in_parts)
        wanted = self.read_back and not is_note
        if not wanted and (is_named or (is_note and gives_md5 is False)):
            return True
        whole = wanted or gives_md5 is not False
        ranges = _in_blocks(sent.nbytes) if whole else sampled(sent.nbytes)
        if any(self._range(key, begin, end, sent.nbytes) != sent.range(begin, end) for begin, end in ranges):
            return False
        known.setdefault(sent.in_parts, False)
        return True

    def _range(self, key: str, begin: int, end: int, nbytes: int) -> bytes | None:
        """A range of an object; None if there is none, or one of another size."""

        def read() -> bytes | None:
            try:
                options: Any = {"range": (begin, end)} if end else {}
                result = obstore.get(self._client, key, options=options)
                return bytes(result.bytes()) if result.meta["size"] == nbytes else None
            except (NotFoundError, FileNotFoundError) as error:
                _check_absence(error)
                return None

        return self._attempt(key, read)

    def _damaged(self, key: str) -> StoreError:
        text = "the store has other bytes than were sent, or none, though it acknowledged them"
        return StoreError(text, f"{self.url}/{key}")

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
        """Delete objects. Those that do not exist are no error.

        They are deleted singly in a store that does not delete many at once.
        """
        names = sorted(keys)
        if names:
            try:
                self._attempt(names[0], partial(self._delete, names))
            except OSError as error:
                self._delete_singly(names, error)

    def _delete(self, names: Sequence[str]) -> None:
        try:
            obstore.delete(self._client, names)
        except (NotFoundError, FileNotFoundError):
            for name in names if len(names) > 1 else ():  # some stores say so of one, and leave the rest
                self._delete([name])

    def _delete_singly(self, names: Sequence[str], error: OSError) -> None:
        """Delete objects by one request each. Raises `error`, that of a request for all, if the store refuses this too.

        The client has no such request for S3, so it is signed by the client, and sent here.
        """
        for name in names:
            url = obstore.sign(self._client, "DELETE", name, _SIGNED_FOR)
            request = urllib.request.Request(url, method="DELETE")
            try:
                urllib.request.urlopen(request, timeout=_SIGNED_FOR.total_seconds()).close()
            except urllib.error.HTTPError as answer:
                answer.close()
                if answer.code != HTTPStatus.NOT_FOUND:
                    raise error from None
            except OSError:
                raise error from None

    def now(self, folder: str) -> float:
        """The time by the clock of the store, in seconds since 1970, from an object that is created for it."""
        key = f"{folder}/clock-{uuid4().hex}"
        self.create(key, b"")
        there = self.head(key)
        with suppress(OSError):  # without the right to delete, it stays
            self.delete([key])
        return time.time() if there is None else there.modified

    def ignored_condition(self, key: str, version: Version, data: bytes) -> str | None:
        """The condition that the store ignores; None if it keeps both. Some servers overwrite, and say nothing.

        The object `key` of this version exists; where a condition is ignored, it has the bytes `data` then.
        """
        with suppress(FileExistsError):
            self.create(key, data)
            return "If-None-Match"
        with suppress(FileExistsError):
            self._replace(key, data, version.other())
            return "If-Match"
        return None

    def __getstate__(self) -> dict[str, Any]:
        return {"url": self.url, "read_back": self.read_back, "anonymous": self.anonymous}

    @cached_property
    def _naming(self) -> _Naming:
        return _Naming()

    @cached_property
    def _repeated(self) -> Repetition:
        return ClientRequests()

    @cached_property
    def _client(self) -> Any:
        return client_of(self.url, self._repeated.policy.http(), anonymous=self.anonymous, retries=ONCE)

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


def _check_decision(error: BaseException) -> None:
    """Raise an error unless it says that a condition does not hold.

    A store may say instead that another request for the object goes on: perhaps an earlier one of this process, whose
    answer was lost, and which may yet put it.
    """
    if Refusal.of(error).is_undecided:
        raise error


def part_nbytes(nbytes: int) -> int:
    """The bytes of each part in which `Bucket.upload` puts a file of `nbytes`; 0 if it takes one request."""
    return 0 if nbytes <= _SINGLE_REQUEST else max(_PART, -(-nbytes // _MAX_PARTS))


def _version(stored: Any) -> Version:
    return Version(stored["e_tag"], stored["version"])


def _in_blocks(nbytes: int) -> Iterator[tuple[int, int]]:
    """All of an object, in ranges."""
    yield from ((begin, min(begin + _PART, nbytes)) for begin in range(0, max(1, nbytes), _PART))


def _range_of(file: Path, begin: int, end: int) -> bytes:
    with file.open("rb", buffering=0) as opened:
        opened.seek(begin)
        return opened.read(end - begin)


def _parts(file: Path, nbytes: int, check: Callable[[], None], tag: RunningTag | None) -> Iterator[bytes]:
    with file.open("rb", buffering=0) as opened:
        while part := opened.read(nbytes):
            if tag is not None:
                tag.update(part)
            yield part
    # obstore drives this generator within its runtime, which panics if the same thread makes a request, as a check may.
    with ThreadPoolExecutor(1, "ckpt-requests") as pool:
        pool.submit(check).result()
