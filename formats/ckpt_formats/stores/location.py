"""The path that a text of the user names: in the file system, or in a store."""

import os
import re
from pathlib import Path
from typing import cast

from ckpt_formats.core.arguments import URL_SCHEME, StrPath
from ckpt_formats.core.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from ckpt_formats.core.folder_place import FolderPlace
from ckpt_formats.core.place import ObjectEntry, Place, ReadPlace
from ckpt_formats.core.store_path import is_remote
from ckpt_formats.core.text import printable

_CONTAINER_PARTS = {"s3": 1, "gs": 1, "az": 2}
"""How many parts of a URL name the bucket: `s3://bucket`, `gs://bucket`, `az://account/container`."""
_WRITABLE = ("s3", "gs", "az")
_WEB = ("http", "https")
_PARITY, _PEERS = "parity", "peers"
_OTHER_MACHINE = re.compile(r"([\w.-]{1,64})@([\w.-]{1,253}):(?!//)(.{1,4096})", re.DOTALL)
"""`user@host:path`."""
_ONE_SLASH = re.compile(r"(s3|gs|az|hf|https?):/(?!/)", re.IGNORECASE)
"""What `s3:/bucket/key` begins with, which the shell's completion and `os.path.normpath` make of a URL."""
_SYNONYMS = {"s3a": "s3", "s3n": "s3", "gcs": "gs"}
"""Schemes of other tools for the same stores."""
_OF_AZURE = ("abfs", "abfss", "wasb", "wasbs")
"""`abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/KEY`, as Hadoop writes it."""
_REPOSITORY_KINDS = {"datasets": "dataset", "spaces": "space"}
_FORMS = "s3://BUCKET/KEY, gs://BUCKET/KEY, az://ACCOUNT/CONTAINER/KEY"
_READ = (
    f"{_FORMS}, hf://ORGANISATION/MODEL[@REVISION][/PATH], https://HOST/PATH, parity:///PATH, peers://HOST:PORT,…/RUN"
)


def is_url(text: str) -> bool:
    """Whether a text names a place that is not in the file system."""
    return URL_SCHEME.match(text) is not None


def source_path(place: StrPath, anonymous: bool = False) -> Path:
    """The path of a checkpoint that is read: a path as it is, or what a text names. One in a store is listed, once.

    `anonymous`: without credentials, for what is public.

    Raises:
        UnsupportedError: The URL is of a store that ckpt does not know, or the package for it is not installed.
        NotFoundError: The store cannot be reached, or refuses.
    """
    return _read_path(place, anonymous, one_level=False)


def level_path(place: StrPath, anonymous: bool = False) -> Path:
    """As `source_path`; but of a bucket, only what is directly in the folder is listed, and not what is below.

    A path in it is opened by `listed_again`.
    """
    return _read_path(place, anonymous, one_level=True)


def _read_path(place: StrPath, anonymous: bool, one_level: bool) -> Path:
    if isinstance(place, Path):
        return place
    place = os.fspath(place)
    scheme = _scheme(place)
    if scheme is None:
        _refuse_other_machine(place)
        _refuse_one_slash(place)
        return Path(place)
    if scheme in _WEB:
        from ckpt_formats.stores.http_store import open_web

        return open_web(place, anonymous)
    if scheme == _PARITY:
        from ckpt_formats.stores.parity_store import open_parity

        return open_parity(place, _read_path(place.partition("://")[2], anonymous, one_level))
    if scheme == _PEERS:
        from ckpt_formats.stores.peers_store import open_peers

        return open_peers(place)
    kind, parts = _parts(scheme, place)
    if kind == "hf":
        return _hub_path(place, parts, anonymous)
    url, key = _bucket(kind, parts, place)
    try:
        from ckpt_formats.stores import object_store
    except ModuleNotFoundError as error:
        raise _missing(error, "cloud", place) from None
    return (object_store.open_level if one_level else object_store.open_store)(url, key, anonymous)


def _refuse_other_machine(place: str) -> None:
    """Refuse `user@host:path`, as scp and rsync write it, unless a file has that name."""
    match = _OTHER_MACHINE.fullmatch(place)
    if match is None or os.path.lexists(place):
        return
    user, host, path = match.groups()
    raise UnsupportedError(
        "is a path on another machine, which ckpt does not reach by ssh",
        where=printable(place),
        hint=f"Serve a chain with `ssh {printable(user)}@{printable(host)} ckpt serve {printable(path)}` and read "
        f"http://{printable(host)}:PORT, or copy the files: rsync -a {printable(place)} .",
    )


def _refuse_one_slash(place: str) -> None:
    """Refuse `s3:/bucket/key`, a URL whose second slash is missing, unless a folder has that name."""
    match = _ONE_SLASH.match(place)
    if match is not None and not os.path.lexists(match[0]):
        hint = f"Write {match[1]}://{printable(place[match.end() :])}."
        raise UnsupportedError("is not a URL that ckpt reads: a slash is missing", where=printable(place), hint=hint)


def _scheme(place: str) -> str | None:
    """The scheme of a URL, in lower case; None for a path."""
    if not place:
        raise InvalidArgumentError("the path is empty", hint="Name a file, a folder or a URL.")
    scheme = URL_SCHEME.match(place)
    return None if scheme is None else scheme[1].lower()


def _parts(scheme: str, place: str) -> tuple[str, list[str]]:
    """The store that a URL is of, in the words of ckpt, and the parts of its path."""
    kind, parts = _plain(scheme, place.partition("://")[2].split("/"))
    if ".." in parts or "." in parts:
        raise NotFoundError("no object has a part `..` or `.` in its key", where=printable(place))
    return kind, parts


def _bucket(kind: str, parts: list[str], place: str) -> tuple[str, str]:
    """The URL of a bucket, and a key in it. Raises `UnsupportedError` if a URL names none."""
    count = _CONTAINER_PARTS.get(kind)
    if count is None or len(parts) < count or not all(parts[:count]):
        raise _unknown(place)
    return f"{kind}://{'/'.join(parts[:count])}", "/".join(part for part in parts[count:] if part)


def _plain(kind: str, parts: list[str]) -> tuple[str, list[str]]:
    """A scheme and the parts of a URL in the words of ckpt."""
    container, mark, host = parts[0].partition("@")
    if kind in _OF_AZURE and mark:
        return "az", [host.partition(".")[0], container, *parts[1:]]
    if kind in _OF_AZURE:
        account = os.environ.get("AZURE_STORAGE_ACCOUNT_NAME") or os.environ.get("AZURE_STORAGE_ACCOUNT", "")
        return "az", [account, *parts]
    return _SYNONYMS.get(kind, kind), parts


def listed_again(path: Path) -> Path:
    """The path with what is there now: the one of a store shows what was there when it was listed."""
    if not is_remote(path):
        return path
    return source_path(str(path), bool(getattr(path.store, "anonymous", False)))


def read_place(place: StrPath, anonymous: bool = False) -> ReadPlace:
    """The place that a path, or a text of the user, names: objects are read there by name. Makes no request.

    `anonymous`: without credentials, for what is public. Raises as `source_path`.
    """
    scheme = _scheme(str(place))
    if scheme is None:
        return FolderPlace(Path(place))
    if is_remote(place) and scheme not in _WEB:
        return place_at(place)
    if scheme in _WEB:
        from ckpt_formats.stores.http_client import NO_CREDENTIALS
        from ckpt_formats.stores.http_place import HttpPlace

        return HttpPlace.of(str(place), NO_CREDENTIALS if anonymous else None)
    url, key = _bucket(*_parts(scheme, str(place)), str(place))
    try:
        from ckpt_formats.stores.bucket import Bucket
        from ckpt_formats.stores.bucket_place import BucketPlace
    except ModuleNotFoundError as error:
        raise _missing(error, "cloud", str(place)) from None
    return BucketPlace(Bucket(url, anonymous=anonymous), key)


def place_at(path: Path, read_back: bool = False) -> Place:
    """The place at a path of `target_path`. `read_back`: read back all that is written into a store."""
    if not is_remote(path):
        return FolderPlace(path)
    from ckpt_formats.stores.bucket import Bucket  # only if there is a store
    from ckpt_formats.stores.bucket_place import BucketPlace

    return BucketPlace(Bucket(path.store.url, read_back), path.key)


def entry_at(path: Path) -> ObjectEntry | None:
    """What is known of a file, or what the listing says of an object; None if there is none."""
    if not is_remote(path):
        return FolderPlace(path.parent).head(path.name)
    from ckpt_formats.stores.listed_store import ListedStore  # only if there is a store

    return cast(ListedStore, path.store).entry(path.key)


def _hub_path(place: str, parts: list[str], anonymous: bool) -> Path:
    """The path of what is in a repository of the Hugging Face Hub: `hf://[datasets/]ORG/MODEL[@REV][/SUB]`."""
    from urllib.parse import unquote

    repository = _REPOSITORY_KINDS.get(parts[0], "model")
    owner, *rest = parts[1:] if repository != "model" else parts
    name, _, revision = (rest or [""])[0].partition("@")
    if not owner or not name:
        raise _unknown(place)
    key = "/".join(part for part in rest[1:] if part)
    try:
        from ckpt_formats.stores.hub import open_hub
    except ModuleNotFoundError as error:
        raise _missing(error, "hf", place) from None
    # A slash in the name of a branch is written as %2F.
    return open_hub(repository, f"{owner}/{name}", unquote(revision), key, anonymous)


def _unknown(place: str) -> UnsupportedError:
    name = place.partition("://")[2]
    if place.lower().startswith("hf://") and name and "/" not in name.strip("/"):
        hint = f"Write hf://ORG/MODEL, such as hf://ORG/{printable(name.strip('/'))}."
        return UnsupportedError(
            "is not a URL that ckpt reads: the organisation is missing", where=printable(place), hint=hint
        )
    return UnsupportedError("is not a URL that ckpt reads", where=printable(place), hint=f"It is {_READ}.")


def _missing(error: ModuleNotFoundError, extra: str, place: str) -> UnsupportedError:
    what = "repositories of the Hugging Face Hub" if extra == "hf" else "object stores"
    return UnsupportedError(
        f"{what} need the package {error.name}",
        where=printable(place),
        hint=f"Install it: pip install 'ckpt-suite[{extra}]'.",
    )


def target_path(place: StrPath) -> Path:
    """The path of what is written: in the file system, or in a store. Raises as `source_path`."""
    if not isinstance(place, Path):
        place = os.fspath(place)
    scheme = None if isinstance(place, Path) else URL_SCHEME.match(place)
    if scheme is not None and scheme[1].lower() == "hf":
        raise UnsupportedError(
            "ckpt does not write to the Hugging Face Hub",
            where=printable(str(place)),
            hint=f"Write a folder with --to hf, then upload it: hf upload {printable(str(place)[5:])} FOLDER",
        )
    if scheme is not None and _plain(scheme[1].lower(), [""])[0] not in _WRITABLE:
        raise UnsupportedError(
            "ckpt does not write there", where=printable(str(place)), hint=f"Name a local path, or {_FORMS}."
        )
    path = source_path(place)
    return path if is_remote(path) or path.name not in ("", "..") else _named(path)


def _named(path: Path) -> Path:
    """The same local path with a name at its end, which `.` and `..` lack: files lie beside a target."""
    named = Path(os.path.abspath(path))
    if not named.name:
        raise InvalidArgumentError("is the root of the file system, and no target", where=named, hint="Name a folder.")
    return named


def refuse_url(place: str, instead: str, hint: str) -> None:
    """Raise `UnsupportedError` if a text is a URL. `instead`: what an argument is, such as `--key reads a file`."""
    if is_url(place):
        raise UnsupportedError(f"{instead}, and this is a URL", where=printable(place), hint=hint)


def local_path(place: StrPath) -> Path:
    """The path of a chain whose log is followed. Raises `UnsupportedError` for a URL: it must be in the file system."""
    text = str(place) if isinstance(place, Path) else os.fspath(place)
    if is_url(text):
        raise UnsupportedError(
            "must be in the file system: the log of a run is followed only there",
            where=printable(text),
            hint="Name the folder of the chain. From a store, copy it first: ckpt copy URL FOLDER.",
        )
    return Path(place)
