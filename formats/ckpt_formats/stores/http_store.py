"""What lies below a URL as paths: of `ckpt serve`, which lists its files; or of any web server, which does not.

Where nothing is listed, a path exists if the server answers for it, and a folder shows only what is needed to know what
kind of checkpoint it is: the list of a chain, or the files that a manifest and an index name.
"""

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote

from ckpt_formats.core.errors import CorruptError, IncompleteError, NotFoundError, UnsafeError
from ckpt_formats.core.store_path import StoreError, StorePath
from ckpt_formats.core.values import is_natural
from ckpt_formats.stores.http_client import NO_CREDENTIALS, HttpAnswer
from ckpt_formats.stores.http_place import MAX_SKIPPED, HttpPlace, range_of, seconds_of, split_url, total_of
from ckpt_formats.stores.listed_store import ListedStore, StoredObject

_MAX_LISTING = 1 << 27
"""Bytes of a list."""
_MAX_FILES = 500_000
_MAX_PARTS, _MAX_PART = 8, 255
"""The parts of a file's name within its folder, and the characters of each."""
_MAX_TAG = 200
"""Characters of an e_tag."""
_MAX_NBYTES = 1 << 50
_LIST = "chain.json"
_MARKS = (_LIST, "published/head.json", "manifest.json")
"""Names in a folder that show what it is, for a server that lists nothing."""
_CHANGED = "was changed or replaced while it was read"
_WAIT = "Read it when no process writes it any longer."


class HttpStore(ListedStore):
    """What a web server has."""

    def __init__(
        self, place: HttpPlace, objects: Mapping[str, StoredObject], root: str, is_listed: bool, anonymous: bool
    ) -> None:
        """`place`: the server. `objects`: all of those below the key `root`, or those that are known."""
        super().__init__(place.url, objects, root)
        self._place, self._is_listed, self.anonymous = place, is_listed, anonymous

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._place, self._objects, self._root, self._is_listed, self.anonymous)

    def get(self, key: str, offset: int, nbytes: int) -> memoryview:
        listed, where = self._objects[key], self._place.where(key)
        headers = {"Range": f"bytes={offset}-{offset + nbytes - 1}"}
        query = f"v={quote(listed.e_tag, safe='')}" if self._is_listed else ""
        if listed.e_tag and not listed.e_tag.startswith("W/"):
            headers["If-Match"] = listed.e_tag
        answer = self._place.request(key, headers, nbytes + MAX_SKIPPED, query=query)
        if answer.status in (404, 410):
            raise IncompleteError("was removed while it was read", where=where)
        if answer.status == 412 or not _fits(answer, listed):
            raise CorruptError(_CHANGED, where=where, hint=_WAIT)
        return range_of(answer, offset, nbytes, where)

    def _has_listed(self, key: str) -> bool:
        return self._is_listed and super()._has_listed(key)

    def _single(self, key: str) -> StoredObject | None:
        return None if self._is_listed else _single(self._place, key)  # `ckpt serve` has nothing beside the chain

    def level(self, key: str) -> tuple[Mapping[str, StoredObject], list[str]]:
        """What is known of a folder that was not listed."""
        if self._is_listed:  # one beside the chain: only the chain is served
            return {}, []
        start = f"{key}/" if key else ""
        inside = [one for one in self._objects if one.startswith(start)]
        objects = {one: self._objects[one] for one in inside if "/" not in one[len(start) :]}
        return objects, sorted({one[len(start) :].partition("/")[0] for one in inside if one not in objects})


def _fits(answer: HttpAnswer, known: StoredObject) -> bool:
    """Whether an answer may be of the object that is known. Some servers ignore conditions."""
    tag, modified = answer.headers.get("etag"), seconds_of(answer.headers.get("last-modified"))
    if (tag and known.e_tag and tag != known.e_tag) or (modified and known.modified and modified != known.modified):
        return False
    total = len(answer.body) if answer.status == 200 else total_of(answer)
    return total is None or total >= known.nbytes  # a log grows


def open_web(url: str, anonymous: bool = False) -> StorePath:
    """The path of what is at a URL. Raises `NotFoundError` if the server cannot be reached, or has nothing there."""
    origin, key = split_url(url)
    server = HttpPlace(origin, NO_CREDENTIALS if anonymous else None)
    root = key.rpartition("@")[0] if "@" in key.rpartition("/")[2] else key  # a state, such as `run.chain@1234`
    try:
        for one in dict.fromkeys((key, root)):
            if (objects := _listed(server, one)) is not None:
                store = HttpStore(server, objects, one, True, anonymous)
                if f"{one}/{_LIST}" in objects:  # read at once, so that it is of the same moment as the list
                    StorePath(store, f"{one}/{_LIST}").read_bytes()
                return StorePath(store, key)
        return StorePath(_unlisted(server, key, root, anonymous), key)
    except StoreError as error:
        raise NotFoundError(f"the server cannot be read: {error.strerror}", where=url, hint=error.hint) from None


def _listed(server: HttpPlace, root: str) -> dict[str, StoredObject] | None:
    """The files below a folder of a chain, as `ckpt serve` lists them; None if the server lists nothing there."""
    try:
        answer = server.request(f"{root}/", {"Accept": "application/json"}, _MAX_LISTING, query="list")
    except (StoreError, UnsafeError) as error:
        if isinstance(error, StoreError) and not error.is_denied:
            raise
        return None
    if answer.status != 200 or not answer.headers.get("content-type", "").startswith("application/json"):
        return None
    files = listing_of(answer, server.where(root))[1]
    return {f"{root}/{name}" if root else name: one for name, one in files.items()}


def listing_of(answer: HttpAnswer, where: str) -> tuple[str, dict[str, StoredObject]]:
    """The e_tag of chain.json, and the files below a folder, from a list of `ckpt serve`.

    Raises `CorruptError` if it cannot be read, `UnsafeError` for a name that leaves the folder.
    """
    damaged = CorruptError("the list of the server cannot be read", where=where)
    try:
        fields = json.loads(bytes(answer.body))
    except (ValueError, RecursionError):
        raise damaged from None
    chain, rows = (fields.get("chain"), fields.get("files")) if isinstance(fields, dict) else (None, None)
    if not isinstance(chain, str) or not isinstance(rows, dict) or len(rows) > _MAX_FILES:
        raise damaged
    files = dict[str, StoredObject]()
    for name, row in rows.items():
        if not (isinstance(row, list) and len(row) == 2 and is_natural(row[0]) and isinstance(row[1], str)):
            raise damaged
        if row[0] >= _MAX_NBYTES or len(row[1]) > _MAX_TAG or not _is_file_name(name):
            raise UnsafeError(f"the name {name!r:.80} leaves its folder, or is none of a file of a chain", where=where)
        files[name] = StoredObject(row[0], row[1], 0.0)
    return chain, files


def _is_file_name(name: str) -> bool:
    """Whether it is the name of a file in a chain: of letters that every file system has, and not deep."""
    parts = name.split("/")
    named = len(parts) <= _MAX_PARTS and all(0 < len(one) <= _MAX_PART and one not in (".", "..") for one in parts)
    return named and name.isascii() and name.isprintable()


def _unlisted(server: HttpPlace, key: str, root: str, anonymous: bool) -> HttpStore:
    """A server that lists nothing, with what it has at a key: a file, or what shows the kind of a folder."""
    single = _single(server, key) if key else None
    if single is not None:
        return HttpStore(server, {key: single}, key, False, anonymous)
    names = [f"{root}/{name}" if root else name for name in _MARKS]
    objects = {name: one for name in names if (one := _single(server, name)) is not None}
    if not objects:
        server.request(names[0], method="HEAD")  # raises if the server refuses
        raise NotFoundError(
            "the server has no chain or checkpoint there",
            where=server.where(key),
            hint="Name the folder of a chain, or a file: a web server does not list what is in a folder.",
        )
    return HttpStore(server, objects, root, False, anonymous)


def _single(server: HttpPlace, key: str) -> StoredObject | None:
    """The object of a key; None if there is none, if the server does not say, or for a page that people read."""
    try:
        answer = server.request(key, method="HEAD")
    except StoreError as error:
        if not error.is_denied:
            raise
        return None
    headers = answer.headers
    nbytes = headers.get("content-length", "")
    if answer.status != 200 or not (nbytes.isascii() and nbytes.isdigit() and int(nbytes) < _MAX_NBYTES):
        return None
    if headers.get("content-type", "").startswith("text/html"):
        return None
    tag, modified = headers.get("etag", ""), seconds_of(headers.get("last-modified")) or 0.0
    return StoredObject(int(nbytes), tag if len(tag) <= _MAX_TAG else "", modified)
