"""POST requests with JSON to inference servers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

from ckpt_formats.core.errors import CkptError, InvalidArgumentError
from ckpt_formats.core.text import printable

POST_SECONDS = 1800.0
"""A large model is loaded within one request."""
_MAX_ANSWER = 1 << 20
_SHOWN = 300
"""Characters of an answer in a message."""


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
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    path = f"{parts.path.rstrip('/')}{request.path}"
    where = printable(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{path}")
    connection = (HTTPSConnection if parts.scheme == "https" else HTTPConnection)(
        parts.hostname, parts.port, timeout=seconds
    )
    try:
        connection.request("POST", path, json.dumps(request.body), headers)
        response = connection.getresponse()
        answer = response.read(_MAX_ANSWER)
    except (OSError, HTTPException, ValueError) as error:
        cause = printable(str(error)) or type(error).__name__
        raise EngineError(f"the server does not answer: {cause}", where=where) from None
    finally:
        connection.close()
    if not 200 <= response.status < 300:
        text = printable(answer.decode("utf-8", "replace"))[:_SHOWN]
        raise EngineError(f"the server answered {response.status}: {text}", where=where)
