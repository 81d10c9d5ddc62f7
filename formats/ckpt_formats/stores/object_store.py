"""A bucket, through `obstore`: one listing of what lies below the checkpoint, then ranges of objects.

Each range is requested with the e_tag of the listing, so an object that changes while it is read is refused.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import obstore
from obstore.exceptions import BaseError, PreconditionError

from ckpt_formats.core.claims import MAX_LIST
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ckpt_formats.core.store_path import StoreError, StorePath
from ckpt_formats.stores.clients import ClientRequests, client_of
from ckpt_formats.stores.e_tags import TagChecks
from ckpt_formats.stores.joined import joined
from ckpt_formats.stores.listed_store import ListedStore, StoredObject
from ckpt_formats.stores.refusals import Refusal
from ckpt_formats.stores.repetition import ONCE, Repetition, Transient

_MAX_OBJECTS = 500_000
"""Objects below a path. More would exhaust memory, and no checkpoint has as many."""
_ATTEMPTS = 4
"""How often a path is opened whose objects are replaced meanwhile."""
_LIST = "chain.json"
"""An object that is replaced, while those beside it stay."""
_PLACEHOLDER = "_$folder$"
"""The end of the names of objects without bytes that stand for folders, as Hadoop writes them."""
_CLOCK_STEP = 2.0
"""Seconds between the times that two answers give for one version of an object: one of them is rounded."""
_MAX_SKIPPED = 64 << 20
"""Bytes that are read and dropped of an object whose store answers the whole of it in place of a range."""
_CHANGED = "was changed or replaced while it was read"
_WAIT = "Read it when no process writes it any longer."


class ObjectStore(ListedStore):
    """A bucket."""

    def __init__(
        self,
        url: str,
        objects: Mapping[str, StoredObject],
        root: str,
        anonymous: bool = False,
        unlisted: Sequence[str] = (),
    ) -> None:
        """`anonymous`: requests are not signed."""
        super().__init__(url, objects, root, unlisted)
        self._unlisted = tuple(unlisted)
        self.anonymous = anonymous
        self._repeated = ClientRequests()
        self._tags = TagChecks()
        self._answers_whole = False
        """Whether the store answered a range with a whole object: then whole ones are requested without a range."""
        self._client = client_of(url, self._repeated.policy.http(), anonymous=anonymous, retries=ONCE)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._url, self._objects, self._root, self.anonymous, self._unlisted)

    def get(self, key: str, offset: int, nbytes: int) -> memoryview:
        where, request = f"{self._url}/{key}", partial(self._request, key, offset, nbytes)
        data = self._repeated(request, where)
        listed = self._objects[key]
        if nbytes == listed.nbytes and not self._tags.fits(key, listed.e_tag, data):
            data = self._repeated(request, where)  # damaged on its way, perhaps
            self._tags.check(key, listed.e_tag, data, where)
        return data

    def _request(self, key: str, offset: int, nbytes: int) -> memoryview:
        """A range of an object. Raises `Transient`, `CorruptError`, `IncompleteError` or `StoreError`."""
        where = f"{self._url}/{key}"
        try:
            if not (self._answers_whole and nbytes == self._objects[key].nbytes):
                with suppress(_WholeAnswer):
                    return self._range(key, offset, nbytes)
                self._answers_whole = True
            return self._of_whole(key, offset, nbytes)
        except PreconditionError:
            raise CorruptError(_CHANGED, where=where, hint=_WAIT) from None
        except (BaseError, OSError) as error:
            if isinstance(error, (StoreError, CkptError)):
                raise
            refusal = Refusal.of(error)
            if refusal.is_absence:
                raise IncompleteError("was removed while it was read", where=where) from None
            raise refusal.error(where) from None

    def _range(self, key: str, offset: int, nbytes: int) -> memoryview:
        """A range, by a request for it. Raises `_WholeAnswer` if the store answers with all of the object."""
        options: Any = {"range": (offset, offset + nbytes), **self._objects[key].condition()}
        try:
            answer = obstore.get(self._client, key, options=options)
        except BaseError as error:
            if "Received non-partial response" in str(error):
                raise _WholeAnswer from None
            raise
        self._check_answer(key, answer)
        return body_of(answer, nbytes)

    def _of_whole(self, key: str, offset: int, nbytes: int) -> memoryview:
        """A range, from an answer that has all of the object."""
        if offset > _MAX_SKIPPED:
            raise UnsupportedError(
                "the store does not answer ranges of objects",
                where=f"{self._url}/{key}",
                hint="Copy the checkpoint to a disk first, with the tools of the store.",
            )
        options: Any = self._objects[key].condition()
        answer = obstore.get(self._client, key, options=options)
        self._check_answer(key, answer)
        if offset == 0 and nbytes == self._objects[key].nbytes:
            return body_of(answer, nbytes)
        data, at, stop = bytearray(), 0, offset + nbytes
        for part in answer.stream(min_chunk_size=1 << 16):
            view = memoryview(part)
            data += view[max(0, offset - at) : max(0, stop - at)]
            at += view.nbytes
            if at >= stop:
                break
        if len(data) != nbytes:
            raise _of_other_length(at, stop)
        return memoryview(data).toreadonly()

    def _check_answer(self, key: str, answer: Any) -> None:
        """Compare what an answer says of the object with the listing. Some stores ignore the condition of a request.

        Raises `CorruptError` if the object is another one now.
        """
        listed, now = self._objects[key], described(answer.meta)
        tags = now.e_tag and listed.e_tag and bare_tag(now.e_tag) != bare_tag(listed.e_tag)
        times = now.modified and listed.modified and abs(now.modified - listed.modified) > _CLOCK_STEP
        if tags or times or now.nbytes != listed.nbytes:
            raise CorruptError(_CHANGED, where=f"{self._url}/{key}", hint=_WAIT)

    def _single(self, key: str) -> StoredObject | None:
        return _single(self._client, self._repeated, key, f"{self._url}/{key}")

    def level(self, key: str) -> tuple[Mapping[str, StoredObject], list[str]]:
        """A folder that was not named: what the store refuses to list is as if it were not there."""

        def listed() -> Any:
            with _requests(self._url):
                return obstore.list_with_delimiter(self._client, f"{key}/" if key else None)

        try:
            answer = self._repeated(listed, f"{self._url}/{key}")
        except StoreError as error:
            if not error.is_denied:
                raise
            return {}, []
        objects = {meta["path"]: described(meta) for meta in answer["objects"]}
        folders = [path.rstrip("/").rpartition("/")[2] for path in answer["common_prefixes"]]
        return {path: one for path, one in objects.items() if not _is_placeholder(path, one, key)}, folders


def body_of(answer: Any, nbytes: int) -> memoryview:
    """The body of an answer, if it has `nbytes`: not more of it is kept in memory. Else raises `Transient`."""
    data, total = memoryview(b""), 0
    for part in answer.stream(min_chunk_size=nbytes):  # all of it is one part
        data, total = memoryview(part), total + len(part)
        if total > nbytes:
            break
    if data.nbytes != nbytes or total != nbytes:
        raise _of_other_length(total, nbytes)
    return data


def _of_other_length(got: int, wanted: int) -> Transient:
    return Transient(f"the store answers with {got:,} bytes in place of {wanted:,}", is_wrong=True)


class _WholeAnswer(Exception):
    """A store answers a request for a range with the whole object."""


def open_store(url: str, key: str, anonymous: bool = False) -> StorePath:
    """The path of an object or of a folder of objects. Raises `NotFoundError` if the store cannot be read."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(CorruptError, IncompleteError):  # it was replaced since it was listed
            return _open_once(url, key, anonymous)
    return _open_once(url, key, anonymous)


def open_level(url: str, key: str, anonymous: bool = False) -> StorePath:
    """The path of a folder, of which only what is directly in it is listed. Raises as `open_store`.

    A bucket that may not be listed seems empty.
    """
    store = ObjectStore(url, {}, key, anonymous)
    try:
        objects, folders = store.level(key)
    except StoreError as error:
        raise _unreadable(error.strerror, error.hint, f"{url}/{key}") from None
    return StorePath(ObjectStore(url, objects, key, anonymous, folders), key)


def _unreadable(text: str, hint: str | None, where: str) -> NotFoundError:
    return NotFoundError(f"the store cannot be read: {text}", where=where, hint=hint)


def _open_once(url: str, key: str, anonymous: bool) -> StorePath:
    repeated = ClientRequests()
    try:
        with _requests(f"{url}/{key}"):
            client = client_of(url, repeated.policy.http(), anonymous=anonymous, retries=ONCE)
        root, objects = key, _objects_at(client, repeated, url, key)
        if not objects and "@" in key.rpartition("/")[2]:  # a state of a chain, such as `run.chain@1234`
            root = key.rpartition("@")[0]
            objects = _objects_at(client, repeated, url, root)
        sizes = {path: one.nbytes for path, one in objects.items()}
        store = joined(ObjectStore(url, objects, root, anonymous), sizes)
        # The list of a chain is read at once, so that it is of the same moment as the listing.
        list_key = f"{root}/{_LIST}"
        if 0 < sizes.get(list_key, 0) <= MAX_LIST:
            StorePath(store, list_key).read_bytes()
    except (StoreError, Transient) as error:
        text = error.strerror if isinstance(error, StoreError) else error.text
        raise _unreadable(text, error.hint, f"{url}/{key}") from None
    return StorePath(store, key)


def _objects_at(client: Any, repeated: Repetition, url: str, key: str) -> dict[str, StoredObject]:
    """The objects below a key, or that of the key itself. A single object needs no right to list the bucket."""
    where = f"{url}/{key}"
    try:
        objects = repeated(partial(listed, client, key, where, repeated.policy.silence), where)
    except StoreError as error:
        single = _single(client, repeated, key, where) if key and error.is_denied else None
        if single is None:
            raise
        return {key: single}
    single = _single(client, repeated, key, where) if key and not objects else None
    return objects if single is None else {key: single}


def _single(client: Any, repeated: Repetition, key: str, where: str) -> StoredObject | None:
    """The object of a key; None if there is none, or if the store does not say."""

    def describe() -> StoredObject | None:
        try:
            return described(obstore.head(client, key))
        except (BaseError, OSError) as error:
            refusal = Refusal.of(error)
            if refusal.is_absence or refusal.is_denied:
                return None
            raise refusal.error(where) from None

    return repeated(describe, where)


def listed(client: Any, key: str, where: str, silence: float) -> dict[str, StoredObject]:
    """All objects below a folder, by their keys, without those that only stand for a folder.

    `silence`: seconds in which a store that answers must name an object: some answer with empty pages for ever.
    For a `Repetition`: raises `Transient` or `StoreError` if the store fails or lists what was not requested, and
    `UnsafeError` if there are too many objects.
    """
    above = f"{key}/" if key else ""
    objects: dict[str, StoredObject] = {}
    with _requests(where):
        for page in _pages(client, above, silence):
            for meta in page:
                path, one = meta["path"], described(meta)
                if _is_placeholder(path, one, key):
                    continue
                if not path.startswith(above):
                    raise Transient("the store lists objects that were not requested", is_wrong=True)
                if one.nbytes and objects.get(path, one).nbytes and path in objects:
                    raise Transient("the store lists the same objects twice", is_wrong=True)
                if one.nbytes or path not in objects:
                    objects[path] = one
            if len(objects) > _MAX_OBJECTS:
                raise UnsafeError(
                    f"there are more than {_MAX_OBJECTS:,} objects below this path",
                    where=where,
                    hint="Name the folder of one checkpoint.",
                )
    return without_folders(objects)


def _pages(client: Any, above: str, silence: float) -> Iterator[Any]:
    """The pages of a listing. Raises `Transient` if the next one does not come, whatever the store answers."""

    async def next_of(stream: Any) -> Any:
        # The client has its own time-out for each request, so this one is for many of them.
        return await asyncio.wait_for(anext(stream, None), 2 * silence)

    stream = obstore.list(client, above or None, chunk_size=1000).__aiter__()
    with ThreadPoolExecutor(1, "ckpt-listing") as pool:  # this thread may be in an event loop of its own
        try:
            while (page := pool.submit(asyncio.run, next_of(stream)).result()) is not None:
                yield page
        except (asyncio.TimeoutError, TimeoutError):
            raise Transient("the store names no object, page after page", is_wrong=True) from None


def without_folders(objects: Mapping[str, StoredObject]) -> dict[str, StoredObject]:
    """Objects without those of no bytes that others lie below: consoles make them in the place of folders."""
    empty = {path for path, one in objects.items() if not one.nbytes}
    folders = {path[:at] for path in objects for at in _slashes(path) if path[:at] in empty} if empty else set()
    return {path: one for path, one in objects.items() if path not in folders}


def _slashes(path: str) -> Iterator[int]:
    at = path.find("/")
    while at >= 0:
        yield at
        at = path.find("/", at + 1)


def _is_placeholder(path: str, one: StoredObject, folder: str) -> bool:
    """Whether an object in the listing of a folder only stands for a folder: for that one, or as Hadoop writes it."""
    return not one.nbytes and (path == folder or path.endswith(_PLACEHOLDER))


class _requests:
    """Within, an error of `obstore` becomes `Transient` or `StoreError`."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: object) -> None:
        if isinstance(error, (BaseError, OSError)) and not isinstance(error, (StoreError, CkptError)):
            raise Refusal.of(error).error(self._where) from None


def bare_tag(e_tag: str) -> str:
    """An e_tag without quotation marks and the mark of a weak one: servers in between add it."""
    return e_tag.removeprefix("W/").strip('"')


def described(meta: Any) -> StoredObject:
    """What an answer or a listing says of an object."""
    return StoredObject(int(meta["size"]), meta["e_tag"] or "", meta["last_modified"].timestamp())
