"""A repository of the Hugging Face Hub, through `huggingface_hub`: one commit, one listing, then ranges of files.

The library knows the hub's address, the token of the user, and its errors. A revision is resolved to a commit first, so
all that is read is of one state, whatever is uploaded meanwhile.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha1, sha256
from typing import Any, TypeVar

from huggingface_hub import HfApi, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile, RepoFolder
from huggingface_hub.utils import build_hf_headers, get_session

from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    IncompleteError,
    NotFoundError,
    UnsafeError,
    UnsupportedError,
)
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.stores.listed_store import ListedStore, StoredObject
from ckpt_formats.stores.repetition import Repetition, Transient, retry_after

T = TypeVar("T")

_MAX_FILES = 500_000
"""Files below a path. More would exhaust memory, and no checkpoint has as many."""
_TIMEOUT = 60.0
"""Seconds without a byte."""
_WHOLE = 1 << 20
"""Bytes of a file that a server may answer as a whole."""
_LOG_IN = "Log in with `hf auth login`, or set HF_TOKEN to a token that may read it."
_RANGE = re.compile(r"bytes (\d{1,18})-", re.ASCII)
_HTTP_ERROR: Any = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
"""Of the library that `huggingface_hub` uses, which is another one in some versions: all errors of its requests."""


class HubRepository(ListedStore):
    """A commit of a repository."""

    def __init__(
        self, kind: str, name: str, commit: str, objects: Mapping[str, StoredObject], root: str, anonymous: bool
    ) -> None:
        """`kind`: `model`, `dataset` or `space`. `name`: `ORGANISATION/NAME`. `anonymous`: without the user's token."""
        super().__init__(f"{_url(kind, name)}@{commit}", objects, root)
        self._kind, self._name, self._commit, self.anonymous = kind, name, commit, anonymous
        self._repeated = Repetition()
        self._locations: dict[str, str] = {}
        """Where a file was found last: the hub answers with the signed address of another server, for some time."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._kind, self._name, self._commit, self._objects, self._root, self.anonymous)

    def get(self, key: str, offset: int, nbytes: int) -> memoryview:
        where, request = f"{self._url}/{key}", partial(self._request, key, offset, nbytes)
        data, listed = self._repeated(request, where), self._objects[key]
        if nbytes == listed.nbytes and _hash(data, listed.e_tag) != listed.e_tag:
            data = self._repeated(request, where)  # damaged on its way, perhaps
            if _hash(data, listed.e_tag) != listed.e_tag:
                raise CorruptError("the bytes do not have the hash that the listing of the commit states", where=where)
        return data

    def _request(self, key: str, offset: int, nbytes: int) -> memoryview:
        """A range of a file. Raises `Transient` or `CkptError`."""
        where, known = f"{self._url}/{key}", self._locations.get(key)
        address = known or hf_hub_url(self._name, key, repo_type=self._kind, revision=self._commit)
        headers = build_hf_headers(token=False if self.anonymous or known else None)
        headers |= {"Range": f"bytes={offset}-{offset + nbytes - 1}", "Accept-Encoding": "identity"}
        try:
            with get_session().stream("GET", address, headers=headers, timeout=_TIMEOUT) as answer:
                if known and answer.status_code in (401, 403, 404, 410):
                    self._locations.pop(key, None)  # other threads may see that at the same time
                    raise Transient("the address of the file is no longer valid", pause=0)
                for one in (*answer.history, answer):
                    self._check_source(one.headers, self._objects[key].e_tag, where)
                self._check(answer.status_code, answer.headers, offset, self._objects[key].nbytes, where)
                if answer.history and answer.url.host != answer.history[0].url.host:
                    self._locations[key] = str(answer.url)  # requests to it have no token: its address is signed
                data = answer.read()
                if answer.status_code == 200:
                    data = data[offset : offset + nbytes]
        except _HTTP_ERROR as error:
            raise Transient(f"the hub cannot be reached: {type(error).__name__}") from None
        except OfflineModeIsEnabled:
            raise _offline(where) from None
        if len(data) != nbytes:
            raise Transient(f"the hub answers with {len(data)} bytes in place of {nbytes}")
        return memoryview(data)

    def _check_source(self, headers: Mapping[str, str], e_tag: str, where: str) -> None:
        """Raise `CorruptError` if an answer of the hub is about another commit, or about other bytes."""
        commit, linked = headers.get("X-Repo-Commit", self._commit), headers.get("X-Linked-ETag", e_tag).strip('"')
        if commit != self._commit or (len(linked) == len(e_tag) and linked != e_tag):
            raise CorruptError(
                "the hub answers with another file than the one that the commit has",
                where=where,
                hint="Try again. If it stays so, something between here and the hub changes its answers.",
            )

    def _check(self, status: int, headers: Mapping[str, str], offset: int, size: int, where: str) -> None:
        """Raise what the status and the length say. Nothing of the body was read yet."""
        if status == 206:
            first, total = _RANGE.match(stated := headers.get("Content-Range", "")), stated.rpartition("/")[2]
            if first is None or int(first[1]) != offset:
                raise Transient("the hub answers with another range than was requested", is_wrong=True)
            if total.isascii() and total.isdigit() and int(total) != size:
                raise CorruptError(f"has {int(total):,} bytes, and {size:,} by the listing of its commit", where=where)
            return
        if status == 200 and int(headers.get("Content-Length") or -1) == size <= _WHOLE:
            return  # a small file may be answered as a whole
        if status == 200:
            raise UnsupportedError("the server does not answer ranges of files", where=where)
        if status in (429, 503) or status >= 500:
            raise Transient(
                f"the hub answers with status {status}",
                status in (429, 503),
                retry_after(headers),
            )
        if status in (401, 403):
            raise NotFoundError("the hub refuses to give the file", where=where, hint=_LOG_IN)
        if status == 404:
            raise IncompleteError("is no longer in the repository", where=where)
        raise CorruptError(f"the hub answers with status {status}", where=where)

    def level(self, key: str) -> tuple[Mapping[str, StoredObject], list[str]]:
        api = HfApi(token=False if self.anonymous else None)

        def listed() -> list[RepoFile | RepoFolder]:
            return list(api.list_repo_tree(self._name, key or None, revision=self._commit, repo_type=self._kind))

        try:
            entries = _repeated(self._repeated, listed, self._url)
        except EntryNotFoundError:
            return {}, []
        except HfHubHTTPError as error:
            raise _refused(error, self._url, self._commit) from None
        folders = [one.path.rpartition("/")[2] for one in entries if isinstance(one, RepoFolder)]
        return {one.path: _described(one) for one in entries if isinstance(one, RepoFile)}, folders


def _repeated(repeated: Repetition, question: Callable[[], T], where: str) -> T:
    """The answer of the hub's API, which is asked again if the line or the hub fails.

    Raises `HfHubHTTPError` if it refuses, `StoreError` if it still fails, and `NotFoundError` if it must not be asked.
    """

    def once() -> T:
        try:
            return question()
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status == 429 or status >= 500:
                raise Transient(
                    f"the hub answers with status {status}",
                    pause=retry_after(error.response.headers),
                ) from None
            raise
        except OfflineModeIsEnabled:
            raise _offline(where) from None
        except _HTTP_ERROR as error:
            raise Transient(f"the hub cannot be reached: {type(error).__name__}") from None

    return repeated(once, where)


def open_hub(kind: str, name: str, revision: str, key: str, anonymous: bool = False) -> StorePath:
    """The path of a file or folder in a repository; the revision is a branch, a tag or a commit, "" the default one.

    Raises `NotFoundError` if the hub cannot be reached, or refuses.
    """
    where = f"{_url(kind, name)}{'@' if revision else ''}{revision}"
    api, repeated = HfApi(token=False if anonymous else None), Repetition()

    def retried(question: Callable[[], T]) -> T:
        return _repeated(repeated, question, where)

    try:
        info = retried(lambda: api.repo_info(name, revision=revision or None, repo_type=kind, timeout=_TIMEOUT))
        commit = str(info.sha)
        if not re.fullmatch(r"[0-9a-f]{40}", commit):
            raise NotFoundError("the hub does not say which commit the revision is", where=where)
        root = key
        objects = retried(lambda: _listed(api, kind, name, commit, root))
        if not objects and "@" in key.rpartition("/")[2]:  # a state of a chain, such as `run.chain@1234`
            root = key.rpartition("@")[0]
            objects = retried(lambda: _listed(api, kind, name, commit, root))
    except CkptError:
        raise
    except HfHubHTTPError as error:
        raise _refused(error, where, revision) from None
    except HFValidationError:
        raise NotFoundError("is not the name of a repository", where=where) from None
    except OSError as error:
        raise NotFoundError(f"the hub cannot be read: {error.strerror}", where=where) from None
    return StorePath(HubRepository(kind, name, commit, objects, root, anonymous), key)


def _listed(api: HfApi, kind: str, name: str, commit: str, key: str) -> dict[str, StoredObject]:
    """The files below a path, or that file itself. Raises `UnsafeError` if there are too many."""
    objects: dict[str, StoredObject] = {}
    try:
        for one in api.list_repo_tree(name, key or None, recursive=True, revision=commit, repo_type=kind):
            if isinstance(one, RepoFile):
                objects[one.path] = _described(one)
                if len(objects) > _MAX_FILES:
                    raise UnsafeError(
                        f"there are more than {_MAX_FILES:,} files below this path",
                        where=f"{_url(kind, name)}/{key}",
                        hint="Name the folder of one checkpoint.",
                    )
    except EntryNotFoundError:
        entries = api.get_paths_info(name, key, revision=commit, repo_type=kind)
        objects = {one.path: _described(one) for one in entries if isinstance(one, RepoFile)}
    return objects


def _described(file: RepoFile) -> StoredObject:
    """Its e_tag is the hash of its content."""
    e_tag = file.lfs.sha256 if file.lfs is not None else file.blob_id
    return StoredObject(int(file.size), str(e_tag), 0.0)


def _hash(data: memoryview, e_tag: str) -> str:
    """The hash of a file's bytes, of the kind of an e_tag: SHA-256 for large files, else that of a blob of Git."""
    if len(e_tag) == 64:
        return sha256(data).hexdigest()
    blob = sha1(b"blob %d\0" % data.nbytes, usedforsecurity=False)
    blob.update(data)
    return blob.hexdigest()


def _url(kind: str, name: str) -> str:
    return f"hf://{'' if kind == 'model' else kind + 's/'}{name}"


def _refused(error: HfHubHTTPError, where: str, revision: str) -> CkptError:
    """What the hub's refusal means. Its own message is not shown: it may name addresses with signatures."""
    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        hint = f"Ask for access on its page. {_LOG_IN}"
        return NotFoundError("access to the repository is granted on request only", where=where, hint=hint)
    if isinstance(error, RevisionNotFoundError):
        return NotFoundError(f"the repository has no revision {revision}", where=where)
    if isinstance(error, RepositoryNotFoundError) or status in (401, 403):
        return NotFoundError("there is no such repository, or it is private", where=where, hint=_LOG_IN)
    return NotFoundError(f"the hub refuses: status {status}", where=where)


def _offline(where: str) -> NotFoundError:
    return NotFoundError("the hub was not contacted, because HF_HUB_OFFLINE is set", where=where)
