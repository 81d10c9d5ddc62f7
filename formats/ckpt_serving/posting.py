"""POST requests with JSON to inference servers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ckpt.following.posting import post_json
from ckpt_formats.core.errors import CkptError, InvalidArgumentError, OutputError
from ckpt_formats.core.text import printable

POST_SECONDS = 1800.0
"""A large model is loaded within one request."""


class EngineError(CkptError):
    """An inference engine does not answer, refuses, or cannot load the weights."""


@dataclass(frozen=True)
class EngineRequest:
    """A POST request to an inference server."""

    path: str
    """With its leading slash."""
    body: dict[str, Any]
    changes_weights: bool = False
    """Whether the weights may be of two steps if it fails."""


def send_requests(
    url: str, requests: Sequence[EngineRequest], api_key: str | None = None, seconds: float = POST_SECONDS
) -> None:
    """Send requests to one server, one after another, until one fails.

    `url`: of the server, such as `http://localhost:8000`. `api_key`: if the server needs one. `seconds`: for each
    request. Raises as `send_request`: the error says whether the weights may be of two steps; what would resume such a
    server is not sent.
    """
    is_changed = False
    for request in requests:
        is_changed |= request.changes_weights
        try:
            send_request(url, request, api_key, seconds)
        except EngineError as error:
            hint = "Its weights may be of two steps: load a step again, or restart it, before it generates."
            raise EngineError(error.what, where=error.where, hint=hint if is_changed else error.hint) from None


def send_request(url: str, request: EngineRequest, api_key: str | None = None, seconds: float = POST_SECONDS) -> None:
    """Send one request, and wait for its answer.

    Redirects are refused, so that nobody else gets the API key. Raises `InvalidArgumentError` for another kind of URL,
    and `EngineError` for no answer within `seconds` or for a status other than 2xx.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise InvalidArgumentError("not the URL of a server", where=printable(url), hint="As in http://localhost:8000.")
    target = f"{parts.path.rstrip('/')}{request.path}"
    try:
        post_json(parts, target, request.body, seconds, api_key)
    except OutputError as error:
        raise EngineError(error.what, where=error.where) from None
