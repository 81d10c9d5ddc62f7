"""The path that a text of the user names: in the file system, or in a store."""

import re
from pathlib import Path

from ckpt_formats.core.errors import NotFound, Unsupported
from ckpt_formats.core.text import printable

_SCHEME = re.compile(r"([a-zA-Z][a-zA-Z0-9+.-]*)://")
_CONTAINER_PARTS = {"s3": 1, "gs": 1, "az": 2}
"""How many parts of a URL name the bucket: `s3://bucket`, `gs://bucket`, `az://account/container`."""
_WRITABLE = ("s3", "gs", "az")
_FORMS = "s3://BUCKET/KEY, gs://BUCKET/KEY, az://ACCOUNT/CONTAINER/KEY"


def is_url(text: str) -> bool:
    """Whether a text names a place that is not in the file system."""
    return _SCHEME.match(text) is not None


def source_path(place: Path | str) -> Path:
    """The path of a checkpoint that is read: a path as it is, or what a text names. One in a store is listed, once.

    Raises:
        Unsupported: The URL is of a store that ckpt does not know, or `obstore` is not installed.
        NotFound: The store cannot be reached, or refuses.
    """
    if isinstance(place, Path):
        return place
    scheme = _SCHEME.match(place)
    if scheme is None:
        return Path(place)
    kind, parts = scheme[1].lower(), place[scheme.end() :].split("/")
    count = _CONTAINER_PARTS.get(kind)
    if count is None or len(parts) < count or not all(parts[:count]):
        raise Unsupported("is not the URL of a store that ckpt reads", where=printable(place), hint=f"It is {_FORMS}.")
    if ".." in parts or "." in parts:
        raise NotFound("no object has a part `..` or `.` in its key", where=printable(place))
    key = "/".join(part for part in parts[count:] if part)
    try:
        from ckpt_formats.stores.object_store import open_store
    except ModuleNotFoundError as error:
        raise Unsupported(
            f"object stores need the package {error.name}",
            where=printable(place),
            hint="Install it: pip install 'ckpt-suite[cloud]'.",
        ) from None
    return open_store(f"{kind}://{'/'.join(parts[:count])}", key)


def target_path(place: Path | str) -> Path:
    """The path of what is written: in the file system, or in a store. Raises as `source_path`."""
    scheme = None if isinstance(place, Path) else _SCHEME.match(place)
    if scheme is not None and scheme[1].lower() not in _WRITABLE:
        raise Unsupported(
            "ckpt does not write there", where=printable(str(place)), hint=f"Name a local path, or {_FORMS}."
        )
    return source_path(place)


def local_path(text: str) -> Path:
    """The path of what is written or followed. Raises `Unsupported` for a URL: that must be in the file system."""
    if is_url(text):
        raise Unsupported(
            "must be in the file system: ckpt only reads from stores",
            where=printable(text),
            hint="Name a local folder; the tools of your store copy it.",
        )
    return Path(text)
