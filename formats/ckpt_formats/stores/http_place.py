"""What a web server has below a URL, read by name: of `ckpt serve`, of any server of static files, or of a CDN."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import Any, ClassVar
from urllib.parse import quote, unquote, urlsplit

import xxhash

from ckpt_formats.core.claims import MAX_LIST
from ckpt_formats.core.errors import InvalidArgumentError, NotFoundError, UnsupportedError
from ckpt_formats.core.place import ReadPlace, Version, absent, ends_early
from ckpt_formats.core.store_path import StoreError
from ckpt_formats.core.text import printable
from ckpt_formats.stores.http_client import Credentials, HttpAnswer, HttpClient, SinkOf
from ckpt_formats.stores.repetition import Repetition, RetryPolicy

_ABSENT = (404, 410)
_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/", re.ASCII)
_SAME_TAG_SECONDS = 2.0
"""Seconds in which a server may give one e_tag to two versions of an object: many make it of a time in seconds."""
MAX_SKIPPED = 64 << 20
"""Bytes that are read and dropped of an object whose server answers the whole of it in place of a range."""


@dataclass(frozen=True)
class HttpPlace(ReadPlace):
    """The objects whose URLs begin with a URL. To send it to another process sends no token of the environment."""

    look_seconds: ClassVar[float] = 1.0

    url: str
    """Quoted, without a slash at its end."""
    credentials: Credentials | None = None
    """None: those of the environment of the process that reads."""
    policy: RetryPolicy | None = None
    """How patient requests are; None: as the user says."""
    is_past_caches: bool = False
    """Whether requests ask caches on the way to fetch the object again (RFC 9111)."""

    @classmethod
    def of(cls, url: str, credentials: Credentials | None = None, policy: RetryPolicy | None = None) -> "HttpPlace":
        """The place below a URL as a user writes it. Raises as `split_url`."""
        origin, key = split_url(url)
        return cls(f"{origin}/{quote(key)}".rstrip("/"), credentials, policy)

    def within(self, name: str) -> "HttpPlace":
        place = replace(self, url=f"{self.url}/{quote(name)}")
        place.__dict__["client"] = self.client  # whose connections are open
        return place

    def past_caches(self) -> "HttpPlace":
        place = replace(self, is_past_caches=True)
        place.__dict__["client"] = self.client
        return place

    def where(self, key: str = "") -> str:
        return f"{self.url}/{quote(key)}" if key else self.url

    def read(self, key: str, max_nbytes: int = MAX_LIST) -> tuple[bytes, Version] | None:
        answer = self.request(key, max_nbytes=max_nbytes)
        if answer.status in _ABSENT:
            return None
        _check_whole(answer, self.where(key))
        return bytes(answer.body), version_of(answer)

    def read_range(self, key: str, offset: int, nbytes: int) -> memoryview:
        if not nbytes:
            return memoryview(b"")
        answer = self.request(key, {"Range": f"bytes={offset}-{offset + nbytes - 1}"}, nbytes + MAX_SKIPPED)
        if answer.status in _ABSENT:
            raise absent(self.where(key))
        return range_of(answer, offset, nbytes, self.where(key))

    def read_if_changed(
        self, key: str, version: Version, max_nbytes: int = MAX_LIST, seconds: float = 0.0
    ) -> tuple[bytes, Version] | None:
        headers = {"If-None-Match": version.e_tag} if version.e_tag else {}
        if seconds > 0 and version.e_tag:
            headers["Prefer"] = f"wait={seconds:.3f}"
        answer = self.request(key, headers, max_nbytes, seconds=seconds)
        if answer.status in _ABSENT:
            raise absent(self.where(key))
        if answer.status == 304 and version.e_tag:
            return None
        _check_whole(answer, self.where(key))
        now = version_of(answer)
        return None if now.version == version.version else (bytes(answer.body), now)

    def request(
        self,
        key: str,
        headers: Mapping[str, str] = {},
        max_nbytes: int = MAX_LIST,
        *,
        method: str = "GET",
        query: str = "",
        seconds: float = 0.0,
        sink_of: SinkOf | None = None,
    ) -> HttpAnswer:
        """The answer to a request, as `HttpClient.get`; `query` follows a question mark."""
        path = f"{urlsplit(self.url).path}/{quote(key)}{'?' if query else ''}{query}"
        headers = {**headers, "Cache-Control": "no-cache"} if self.is_past_caches else headers
        return self.client.get(path, headers, max_nbytes, method=method, seconds=seconds, sink_of=sink_of)

    @cached_property
    def client(self) -> HttpClient:
        """The connections to the server."""
        parts = urlsplit(self.url)
        credentials = self.credentials or Credentials.of_user()
        return HttpClient(f"{parts.scheme}://{parts.netloc}", credentials, Repetition(policy=self.policy))

    def __getstate__(self) -> dict[str, Any]:
        fields = ("url", "credentials", "policy", "is_past_caches")
        return {name: getattr(self, name) for name in fields}


def split_url(text: str) -> tuple[str, str]:
    """The origin and the path of a URL, such as `https://host:8443` and `runs/policy.chain`, not quoted.

    Raises `InvalidArgumentError`, `UnsupportedError` or `NotFoundError` for a URL that ckpt does not read.
    """
    shown = printable(text)
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise InvalidArgumentError("is not a URL", where=shown) from None
    if not host or any(one.isspace() or not one.isprintable() for one in parts.netloc):
        raise InvalidArgumentError("the URL names no host", where=shown, hint="Write https://HOST[:PORT]/PATH.")
    if "@" in parts.netloc:
        hint = "Set CKPT_TOKEN, or CKPT_TOKEN_FILE to the path of a file."
        raise UnsupportedError("a URL with a password", where=f"{parts.scheme}://{host}", hint=hint)
    if parts.query or parts.fragment:
        raise UnsupportedError("a URL with `?` or `#`", where=shown, hint="Name the folder of a chain or checkpoint.")
    path = [one for one in unquote(parts.path).split("/") if one]
    if ".." in path or "." in path or "\0" in parts.path:
        raise NotFoundError("no object has a part `..` or `.` in its path", where=shown)
    name = f"[{host}]" if ":" in host else host
    return f"{parts.scheme.lower()}://{name}{'' if port is None else f':{port}'}", "/".join(path)


def _check_whole(answer: HttpAnswer, where: str) -> None:
    """Raise `StoreError` unless an answer has all of an object: its body may be a part of it, or say what is wrong."""
    if answer.status != 200:
        raise StoreError(f"the server answers with status {answer.status}, as if to another request", where)


def version_of(answer: HttpAnswer) -> Version:
    """The version of an object that was read whole: by the server's e_tag, and by its bytes.

    The e_tag is left out if the object was replaced so recently that the server may give it to a later version too.
    """
    e_tag, changed, now = (answer.headers.get(name) for name in ("etag", "last-modified", "date"))
    is_recent = bool(changed) and (seconds_of(now) or 0.0) - (seconds_of(changed) or 0.0) < _SAME_TAG_SECONDS
    return Version(None if is_recent else e_tag or None, xxhash.xxh3_128_hexdigest(answer.body))


def seconds_of(date: str | None) -> float | None:
    """Seconds since 1970; None for a date that is none."""
    try:
        parsed: datetime | None = parsedate_to_datetime(date) if date else None
        return None if parsed is None else parsed.timestamp()
    except (ValueError, TypeError, OverflowError):
        return None


def range_of(answer: HttpAnswer, offset: int, nbytes: int, where: str) -> memoryview:
    """The requested range of an object, also from an answer with the whole of it: (nbytes,) uint8.

    Raises `CorruptError` if the object has fewer bytes, `UnsupportedError` if another range is answered.
    """
    body, total = answer.body, total_of(answer)
    if answer.status == 416 and total is not None:
        raise ends_early(total, offset + nbytes, where)
    if answer.status == 200:
        if len(body) < offset + nbytes:
            raise ends_early(len(body), offset + nbytes, where)
        return body[offset : offset + nbytes]
    check_range(answer, offset, nbytes, where)
    if len(body) != nbytes:
        raise ends_early(offset + len(body), offset + nbytes, where)
    return body


def check_range(answer: HttpAnswer, offset: int, nbytes: int, where: str) -> None:
    """Raise `UnsupportedError` unless an answer says that it has this range, or the first bytes of it."""
    stated = _RANGE.match(answer.headers.get("content-range", ""))
    if answer.status != 206 or stated is None or not (int(stated[1]) == offset <= int(stated[2]) < offset + nbytes):
        raise UnsupportedError("the server answers with another range than was requested", where=where)


def total_of(answer: HttpAnswer) -> int | None:
    """The bytes of the object, by the header `Content-Range`; None if that does not say."""
    total = answer.headers.get("content-range", "").rpartition("/")[2]
    return int(total) if total.isascii() and total.isdigit() and len(total) < 20 else None
