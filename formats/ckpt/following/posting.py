"""POST requests with JSON."""

import json
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import SplitResult

from ckpt_formats.core.errors import OutputError
from ckpt_formats.core.text import printable

_CONNECT_SECONDS = 10.0
_MAX_ANSWER = 1 << 20
_SHOWN = 300
"""Characters of an answer in a message."""


def post_json(
    parts: SplitResult, target: str, fields: Mapping[str, Any], seconds: float, api_key: str | None = None
) -> None:
    """Post an object, and wait at most `seconds` for the answer.

    `target` is the path and query of the request; those of `parts` are not read. Redirects are not followed, so that
    nobody else gets the API key. Raises `OutputError`, whose place is the URL without a password or query, if there is
    no answer, or one with a status other than 2xx.
    """
    shown = server_name(parts, target)
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(str(parts.hostname), parts.port, timeout=min(_CONNECT_SECONDS, seconds))
    try:
        connection.connect()
        connection.sock.settimeout(seconds)
        connection.request("POST", target, json.dumps(fields), headers)
        response = connection.getresponse()
        answer = response.read(_MAX_ANSWER)
    except (OSError, HTTPException, ValueError) as error:
        cause = printable(str(error)) or type(error).__name__
        raise OutputError(f"the server does not answer: {cause}", where=shown) from None
    finally:
        connection.close()
    if not 200 <= response.status < 300:
        text = printable(answer.decode("utf-8", "replace"))[:_SHOWN]
        raise OutputError(f"the server answered {response.status}: {text}", where=shown)


def server_name(parts: SplitResult, target: str) -> str:
    """The URL of a request for messages: without the user's name and password, and without the query."""
    return printable(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{target.partition('?')[0]}")
