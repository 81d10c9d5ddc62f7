"""Tell the readers of a served folder that it has another step: a POST request, or a command."""

import subprocess
import threading
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from ckpt.following.posting import post_json, server_name
from ckpt.following.source import FollowedStep
from ckpt_formats.core.errors import InvalidArgumentError, OutputError
from ckpt_formats.core.text import printable

_ANSWER_SECONDS = 600.0
"""A server answers once it has read the weights."""
_ATTEMPTS, _FIRST_PAUSE = 3, 0.5
_POLL = 0.02
"""Seconds between two looks at whether a command has ended."""
_STANDARD_ERROR = 2
_WITH_STEP = 'CKPT_STEP=$1 CKPT_EPOCH=$2 CKPT_HASH=$3 CKPT_PATH=$4 exec /bin/sh -c "$0"'
"""Runs a command of the shell with more variables than this process has."""
_END_SECONDS = 5.0
"""How long a command may take to end after SIGTERM."""


def post_step(url: str, step: FollowedStep, path: Path, stop: threading.Event) -> OutputError | None:
    """Post a step that is served in a folder to a URL, and wait for the answer. Failures are repeated.

    The body is JSON: `step`, `epoch`, `hash`, `path`, and the last two as SGLang names them. Returns the error if all
    attempts failed, or if `stop` was set before an answer. Raises `InvalidArgumentError` for another kind of URL.
    """
    parts = notify_url(url)
    fields = {"step": step.step, "epoch": step.epoch, "hash": step.hash, "path": str(path)}
    fields |= {"model_path": str(path), "weight_version": str(step.step)}
    target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    errors = list[OutputError | None]()

    def post() -> None:
        pause = _FIRST_PAUSE
        for attempt in range(_ATTEMPTS):
            try:
                post_json(parts, target, fields, _ANSWER_SECONDS)
                errors.append(None)
                return
            except OutputError as error:
                if attempt == _ATTEMPTS - 1 or stop.wait(pause):
                    errors.append(error)
                    return
            pause *= 2

    thread = threading.Thread(target=post, name="ckpt-notify", daemon=True)
    thread.start()
    while thread.is_alive() and not stop.is_set():
        thread.join(0.05)
    if errors:
        return errors[0]
    return OutputError("has not answered before the follower ended", where=server_name(parts, target))


def notify_url(url: str) -> SplitResult:
    """The parts of a URL to which steps are posted. Raises `InvalidArgumentError`."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid:
        raise InvalidArgumentError(
            "is not the URL of a server", where=printable(url), hint="Give one as http://localhost:30000/path."
        )
    return parts


def run_command(command: str, step: FollowedStep, path: Path, stop: threading.Event) -> int:
    """Run a command of the shell for a step that is served in a folder, and return its exit code.

    Its environment has CKPT_STEP, CKPT_EPOCH, CKPT_HASH and CKPT_PATH; what it prints goes to standard error. Once
    `stop` is set, it gets SIGTERM, and five seconds later SIGKILL.
    """
    words = (command, str(step.step), str(step.epoch), step.hash, str(path))
    process = subprocess.Popen(["/bin/sh", "-c", _WITH_STEP, *words], stdin=subprocess.DEVNULL, stdout=_STANDARD_ERROR)
    while process.poll() is None and not stop.wait(_POLL):
        pass
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    code = process.wait()
    return code if code >= 0 else 128 - code
