"""A bucket, through `obstore`: one listing of what lies below the checkpoint, then ranges of objects.

Each range is requested with the e_tag of the listing, so an object that changes while it is read is refused.
"""

import errno
import os
import re
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any
from zlib import crc32

import obstore
from obstore.exceptions import (
    BaseError,
    NotFoundError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from ckpt_formats.core.errors import Corrupt, Incomplete, NotFound, Unsafe, Unsupported
from ckpt_formats.core.store_path import FolderEntry, StorePath
from ckpt_formats.stores.joined import joined
from ckpt_formats.stores.read_ahead import ReadAhead

_MAX_OBJECTS = 500_000
"""Objects below a path. More would exhaust memory, and no checkpoint has as many."""
_RETRIES: Any = {"max_retries": 8, "retry_timeout": timedelta(seconds=45)}
"""Of the library, with exponential backoff, where a request is answered with an error of the server."""
_ATTEMPTS = 4
"""How often a range is requested whose body was cut."""
_FIRST_PAUSE = 0.1
"""Seconds before the second attempt; each further pause is twice as long."""
_LIST = "chain.json"
"""An object that is replaced, while those beside it stay."""
_MAX_LIST = 1 << 28
_MAX_TEXT = 300
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "GOOGLE_BASE_URL")
_CREDENTIALS = "Check the credentials in the environment, and that they may list and read this bucket."


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What a listing says of an object."""

    nbytes: int
    e_tag: str
    modified: float
    """Seconds since 1970."""

    def condition(self) -> dict[str, Any]:
        """What a request demands, so that it is refused if the object is another one now."""
        if self.e_tag:
            return {"if_match": self.e_tag}
        return {"if_unmodified_since": datetime.fromtimestamp(self.modified, timezone.utc)}

    def status(self) -> os.stat_result:
        """As of a file. Its identity is that of the content, by the e_tag."""
        number = crc32(self.e_tag.encode())
        return os.stat_result(
            (stat.S_IFREG | 0o444, number, 0, 1, 0, 0, self.nbytes, self.modified, self.modified, self.modified)
        )


@dataclass(frozen=True, slots=True)
class StoredName:
    """A name in a folder of a store."""

    name: str
    folder: bool

    def is_dir(self) -> bool:
        return self.folder

    def is_file(self) -> bool:
        return not self.folder

    def is_symlink(self) -> bool:
        return False


class ObjectStore:
    """A bucket, of which the objects below one prefix are known. Threads may share it."""

    def __init__(self, url: str, objects: Mapping[str, StoredObject], root: str) -> None:
        """`objects`: all of those below the key `root`, or that object itself."""
        self._url, self._root = url, root
        self._objects = dict(objects)
        self._folders: dict[str, dict[str, bool]] = {}
        self._siblings: dict[str, dict[str, bool]] = {}
        self._lock = Lock()
        self._client = client_of(url)
        self._ahead = ReadAhead(self._get)
        for key in objects:
            _note(self._folders, key)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._url, self._objects, self._root)

    @property
    def url(self) -> str:
        return self._url

    def stat(self, key: str) -> os.stat_result:
        is_folder = not key or self._is_folder(key)
        if (known := self._objects.get(key)) is not None:
            return known.status()
        if is_folder:
            return os.stat_result((stat.S_IFDIR | 0o555, 0, 0, 1, 0, 0, 0, 0, 0, 0))
        raise FileNotFoundError(errno.ENOENT, "there is no such object", f"{self._url}/{key}")

    def entries(self, key: str) -> list[FolderEntry]:
        if key in self._objects:
            raise NotADirectoryError(errno.ENOTDIR, "is an object, not a folder", f"{self._url}/{key}")
        names = self._names(key)
        if not names and key:
            raise FileNotFoundError(errno.ENOENT, "there is no such folder", f"{self._url}/{key}")
        return [StoredName(name, folder) for name, folder in sorted(names.items())]

    def read_into(self, key: str, offset: int, view: memoryview) -> int:
        return self._ahead.read_into(key, self._objects[key].nbytes, offset, view)

    def _is_folder(self, key: str) -> bool:
        if self._has_listed(key):
            return key in self._folders
        if self._root.startswith(f"{key}/"):
            return True
        above, _, name = key.rpartition("/")
        return self._names(above).get(name, False)

    def _has_listed(self, key: str) -> bool:
        return not self._root or key == self._root or key.startswith(f"{self._root}/")

    def _names(self, key: str) -> dict[str, bool]:
        """The names in a folder, and whether each is a folder. One beside the checkpoint is listed when it is asked."""
        if self._has_listed(key):
            return self._folders.get(key, {})
        with self._lock:
            if key not in self._siblings:
                self._siblings[key] = self._list_level(key)
            return self._siblings[key]

    def _list_level(self, key: str) -> dict[str, bool]:
        with store_errors(self._url):
            found = obstore.list_with_delimiter(self._client, f"{key}/" if key else None)
        objects = {meta["path"]: described(meta) for meta in found["objects"]}
        self._objects |= {path: one for path, one in objects.items() if path not in self._objects}
        names = {path.rpartition("/")[2]: False for path in objects}
        return names | {path.rstrip("/").rpartition("/")[2]: True for path in found["common_prefixes"]}

    def _get(self, key: str, offset: int, nbytes: int) -> memoryview:
        """A range of an object. Raises `Corrupt`, `Incomplete` or `OSError`."""
        where, pause = f"{self._url}/{key}", _FIRST_PAUSE
        options: Any = {"range": (offset, offset + nbytes), **self._objects[key].condition()}
        for attempt in range(_ATTEMPTS):
            try:
                data = memoryview(obstore.get(self._client, key, options=options).bytes())
            except PreconditionError:
                raise Corrupt(
                    "was changed or replaced while it was read",
                    where=where,
                    hint="Read it when no process writes it any more.",
                ) from None
            except (NotFoundError, FileNotFoundError):
                raise Incomplete("was removed while it was read", where=where) from None
            except (PermissionDeniedError, UnauthenticatedError) as error:
                raise PermissionError(errno.EACCES, error_text(error), where) from None
            except (BaseError, OSError) as error:
                if attempt + 1 == _ATTEMPTS:
                    raise OSError(errno.EIO, error_text(error), where) from None
            else:
                if data.nbytes == nbytes:
                    return data
            time.sleep(pause)
            pause *= 2
        raise OSError(errno.EIO, f"the store answers with fewer than {nbytes} bytes", where)


def open_store(url: str, key: str) -> StorePath:
    """The path of an object or of a folder of objects. Raises `NotFound` if the store cannot be read."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(Corrupt, Incomplete):  # it was replaced since it was listed
            return _open_once(url, key)
    return _open_once(url, key)


def _open_once(url: str, key: str) -> StorePath:
    with store_errors(f"{url}/{key}"):
        client, root = client_of(url), key
        objects = _listed(client, url, key)
        if not objects and "@" in key.rpartition("/")[2]:  # a state of a chain, such as `run.chain@1234`
            root = key.rpartition("@")[0]
            objects = _listed(client, url, root)
        sizes = {path: one.nbytes for path, one in objects.items()}
        store = joined(ObjectStore(url, objects, root), sizes)
        # The list of a chain is read at once, so that it is of the same moment as the listing.
        list_key = f"{root}/{_LIST}"
        if 0 < sizes.get(list_key, 0) <= _MAX_LIST:
            StorePath(store, list_key).read_bytes()
    return StorePath(store, key)


def _listed(client: Any, url: str, key: str) -> dict[str, StoredObject]:
    """The objects below a key, or that of the key itself. Raises `Unsafe` if there are too many."""
    pause = _FIRST_PAUSE
    for _ in range(_ATTEMPTS - 1):
        try:
            return _listed_once(client, url, key)
        except BaseError as error:
            if "response body" not in str(error):
                raise  # the library repeats requests, but not if the body of an answer was cut
        time.sleep(pause)
        pause *= 2
    return _listed_once(client, url, key)


def _listed_once(client: Any, url: str, key: str) -> dict[str, StoredObject]:
    objects: dict[str, StoredObject] = {}
    for page in obstore.list(client, f"{key}/" if key else None, chunk_size=1000):
        objects |= {meta["path"]: described(meta) for meta in page}
        if len(objects) > _MAX_OBJECTS:
            raise Unsafe(
                f"there are more than {_MAX_OBJECTS:,} objects below this path",
                where=f"{url}/{key}",
                hint="Name the folder of one checkpoint.",
            )
    if not objects and key:
        with suppress(NotFoundError, FileNotFoundError):  # then there is nothing at this path, as its status says
            objects[key] = described(obstore.head(client, key))
    return objects


def described(meta: Any) -> StoredObject:
    return StoredObject(int(meta["size"]), meta["e_tag"] or "", meta["last_modified"].timestamp())


def _note(folders: dict[str, dict[str, bool]], key: str) -> None:
    """Add an object, and the folders that its key implies."""
    above, _, name = key.rpartition("/")
    folders.setdefault(above, {})[name] = False
    while above:
        above, _, name = above.rpartition("/")
        names = folders.setdefault(above, {})
        if names.get(name):
            return
        names[name] = True


def client_of(url: str, options: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """The client of a bucket. Its credentials come from the environment, as those of the store's own tools.

    `options`: those of `obstore` for HTTP, such as timeouts.
    """
    client_options: Any = dict(options)
    if any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS):
        client_options["allow_http"] = True
    more: dict[str, Any] = {}
    if url.startswith("s3://") and _needs_boto3():
        more["credential_provider"] = _of_boto3()
    if url.startswith("az://"):
        account, _, container = url.removeprefix("az://").partition("/")
        more["account_name"] = account
        return obstore.store.AzureStore(container, client_options=client_options, retry_config=_RETRIES, **more)
    return obstore.store.from_url(url, client_options=client_options, retry_config=_RETRIES, **more)


def _needs_boto3() -> bool:
    """Whether the credentials are those of a profile, which only the tools of Amazon can read."""
    given = ("AWS_ACCESS_KEY_ID", "AWS_SKIP_SIGNATURE", "AWS_WEB_IDENTITY_TOKEN_FILE")
    if any(name in os.environ for name in given):
        return False
    return "AWS_PROFILE" in os.environ or (Path.home() / ".aws").is_dir()


def _of_boto3() -> Any:
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"the profiles of AWS need the package {error.name}",
            hint="Install it (pip install boto3), or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        ) from None
    return Boto3CredentialProvider()


class store_errors:
    """Within, what the store refuses becomes `NotFound`."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: object) -> None:
        if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
            raise NotFound(f"the store refuses: {error_text(error)}", where=self._where, hint=_CREDENTIALS) from None
        if isinstance(error, (BaseError, OSError)):
            raise NotFound(f"the store cannot be read: {error_text(error)}", where=self._where) from None


def error_text(error: BaseException) -> str:
    """The message of the store's library: its first line, without the body of the answer.

    What follows a `?` in a URL is left out: it may be a signature.
    """
    line = (str(error).splitlines() or [type(error).__name__])[0]
    line = re.sub(r"(status code: \d+ [\w ]+).*", r"\1", line)
    return re.sub(r"\?[^\s\")]*", "?…", line)[:_MAX_TEXT]
