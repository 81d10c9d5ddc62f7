"""A bucket, through `obstore`: one listing of what lies below the checkpoint, then ranges of objects.

Each range is requested with the e_tag of the listing, so an object that changes while it is read is refused.
"""

import errno
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import obstore
from obstore.exceptions import (
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.exceptions import (
    NotFoundError as NoObjectError,
)

from ckpt_formats.core.errors import CorruptError, IncompleteError, NotFoundError, UnsafeError, UnsupportedError
from ckpt_formats.core.store_path import StorePath
from ckpt_formats.stores.joined import joined
from ckpt_formats.stores.listed_store import ListedStore, StoredObject
from ckpt_formats.stores.repetition import Repetition, Transient

_MAX_OBJECTS = 500_000
"""Objects below a path. More would exhaust memory, and no checkpoint has as many."""
_RETRIES: Any = {"max_retries": 8, "retry_timeout": timedelta(seconds=45)}
"""Of the library, with exponential backoff, where a request is answered with an error of the server."""
_ATTEMPTS = 4
"""How often a listing is requested whose body was cut."""
_FIRST_PAUSE = 0.1
"""Seconds before the second attempt; each further pause is twice as long."""
_LIST = "chain.json"
"""An object that is replaced, while those beside it stay."""
_MAX_LIST = 1 << 28
_ONCE: Any = {"max_retries": 0}
"""Ranges are repeated here, because the library does not say that a store complains."""
_THROTTLED = ("429", "503")
"""Status codes by which a store says that there are too many requests."""
_MAX_TEXT = 300
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "GOOGLE_BASE_URL")
_CREDENTIALS = "Check the credentials in the environment, and that they may list and read this bucket."


class ObjectStore(ListedStore):
    """A bucket."""

    def __init__(self, url: str, objects: Mapping[str, StoredObject], root: str, anonymous: bool = False) -> None:
        """`anonymous`: requests are not signed."""
        super().__init__(url, objects, root)
        self.anonymous = anonymous
        self._client = client_of(url, anonymous=anonymous, retries=_ONCE)
        self._repeated = Repetition()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._url, self._objects, self._root, self.anonymous)

    def get(self, key: str, offset: int, nbytes: int) -> memoryview:
        return self._repeated(partial(self._request, key, offset, nbytes), f"{self._url}/{key}")

    def _request(self, key: str, offset: int, nbytes: int) -> memoryview:
        """A range of an object. Raises `Transient`, `CorruptError`, `IncompleteError` or `OSError`."""
        where = f"{self._url}/{key}"
        options: Any = {"range": (offset, offset + nbytes), **self._objects[key].condition()}
        try:
            data = memoryview(obstore.get(self._client, key, options=options).bytes())
        except PreconditionError:
            raise CorruptError(
                "was changed or replaced while it was read",
                where=where,
                hint="Read it when no process writes it any more.",
            ) from None
        except (NoObjectError, FileNotFoundError):
            raise IncompleteError("was removed while it was read", where=where) from None
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise PermissionError(errno.EACCES, error_text(error), where) from None
        except (BaseError, OSError) as error:
            status = re.search(r"status code: (\d+)", str(error))
            raise Transient(error_text(error), status is not None and status[1] in _THROTTLED) from None
        if data.nbytes != nbytes:
            raise Transient(f"the store answers with fewer than {nbytes} bytes")
        return data

    def _level(self, key: str) -> tuple[Mapping[str, StoredObject], list[str]]:
        with store_errors(self._url):
            client = client_of(self._url, anonymous=self.anonymous)
            found = obstore.list_with_delimiter(client, f"{key}/" if key else None)
        objects = {meta["path"]: described(meta) for meta in found["objects"]}
        return objects, [path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"]]


def open_store(url: str, key: str, anonymous: bool = False) -> StorePath:
    """The path of an object or of a folder of objects. Raises `NotFoundError` if the store cannot be read."""
    for _ in range(_ATTEMPTS - 1):
        with suppress(CorruptError, IncompleteError):  # it was replaced since it was listed
            return _open_once(url, key, anonymous)
    return _open_once(url, key, anonymous)


def _open_once(url: str, key: str, anonymous: bool) -> StorePath:
    with store_errors(f"{url}/{key}"):
        client, root = client_of(url, anonymous=anonymous), key
        objects = _listed(client, url, key)
        if not objects and "@" in key.rpartition("/")[2]:  # a state of a chain, such as `run.chain@1234`
            root = key.rpartition("@")[0]
            objects = _listed(client, url, root)
        sizes = {path: one.nbytes for path, one in objects.items()}
        store = joined(ObjectStore(url, objects, root, anonymous), sizes)
        # The list of a chain is read at once, so that it is of the same moment as the listing.
        list_key = f"{root}/{_LIST}"
        if 0 < sizes.get(list_key, 0) <= _MAX_LIST:
            StorePath(store, list_key).read_bytes()
    return StorePath(store, key)


def _listed(client: Any, url: str, key: str) -> dict[str, StoredObject]:
    """The objects below a key, or that of the key itself. Raises `UnsafeError` if there are too many."""
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
            raise UnsafeError(
                f"there are more than {_MAX_OBJECTS:,} objects below this path",
                where=f"{url}/{key}",
                hint="Name the folder of one checkpoint.",
            )
    if not objects and key:
        with suppress(NoObjectError, FileNotFoundError):  # then there is nothing at this path, as its status says
            objects[key] = described(obstore.head(client, key))
    return objects


def described(meta: Any) -> StoredObject:
    return StoredObject(int(meta["size"]), meta["e_tag"] or "", meta["last_modified"].timestamp())


def client_of(
    url: str, options: Mapping[str, Any] = MappingProxyType({}), *, anonymous: bool = False, retries: Any = _RETRIES
) -> Any:
    """The client of a bucket. Its credentials come from the environment, as those of the store's own tools.

    `options`: those of `obstore` for HTTP, such as timeouts. `anonymous`: without credentials, for a public bucket.
    """
    client_options: Any = dict(options)
    if any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS):
        client_options["allow_http"] = True
    more: dict[str, Any] = {}
    if anonymous:
        more["skip_signature"] = True
    elif url.startswith("s3://") and _needs_boto3():
        more["credential_provider"] = _of_boto3()
    if url.startswith("az://"):
        account, _, container = url.removeprefix("az://").partition("/")
        more["account_name"] = account
        return obstore.store.AzureStore(container, client_options=client_options, retry_config=retries, **more)
    return obstore.store.from_url(url, client_options=client_options, retry_config=retries, **more)


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
        raise UnsupportedError(
            f"the profiles of AWS need the package {error.name}",
            hint="Install it (pip install 'ckpt-suite[aws]'), or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        ) from None
    return Boto3CredentialProvider()


class store_errors:
    """Within, what the store refuses becomes `NotFoundError`."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: object) -> None:
        if isinstance(error, (PermissionDeniedError, UnauthenticatedError)):
            raise NotFoundError(
                f"the store refuses: {error_text(error)}", where=self._where, hint=_CREDENTIALS
            ) from None
        if isinstance(error, (BaseError, OSError)):
            raise NotFoundError(f"the store cannot be read: {error_text(error)}", where=self._where) from None


def error_text(error: BaseException) -> str:
    """The message of the store's library: its first line, without the body of the answer.

    What follows a `?` in a URL is left out: it may be a signature.
    """
    line = (str(error).splitlines() or [type(error).__name__])[0]
    line = re.sub(r"(status code: \d+ [\w ]+).*", r"\1", line)
    return re.sub(r"\?[^\s\")]*", "?…", line)[:_MAX_TEXT]
