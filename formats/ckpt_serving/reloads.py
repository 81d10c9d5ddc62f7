"""The requests by which inference servers load a served folder, as `ckpt follow --exec` names it."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ckpt_formats.core.arguments import checked
from ckpt_formats.core.errors import CkptError, InvalidArgumentError
from ckpt_serving.posting import POST_SECONDS, EngineRequest, send_requests

_VARIABLES = ("CKPT_STEP", "CKPT_EPOCH", "CKPT_HASH", "CKPT_PATH")


@dataclass(frozen=True)
class ServedStep:
    """A step whose verified weights lie in a folder."""

    step: int
    epoch: int
    hash: str
    """The hash of the state, as in the step's record."""
    path: str
    """The folder, absolute; each server must see it under this path."""

    @classmethod
    def from_variables(cls, variables: Mapping[str, str]) -> "ServedStep":
        """Return the step that `ckpt follow --exec` describes to its command by variables of the environment.

        Raises `InvalidArgumentError` if a variable is not set, or is no number where one is needed.
        """
        hint = "Run this command by `ckpt follow CHAIN TARGET --exec COMMAND`."
        if missing := [name for name in _VARIABLES if not variables.get(name)]:
            raise InvalidArgumentError(f"the environment has no {', '.join(missing)}", hint=hint)
        step, epoch, state_hash, path = (variables[name] for name in _VARIABLES)
        if not (step.isdecimal() and epoch.isdecimal()):
            raise InvalidArgumentError("CKPT_STEP or CKPT_EPOCH is not a number", hint=hint)
        return cls(int(step), int(epoch), state_hash, path)


def vllm_reload(served: ServedStep) -> tuple[EngineRequest, ...]:
    """Return the requests by which vLLM loads a folder in place. The server needs `VLLM_SERVER_DEV_MODE=1`.

    Requests that run stay queued meanwhile, and go on with the new weights; `/pause` clears the prefix cache.
    `/weight_info` shows the step. Read in vLLM 0.32 and 0.33: `entrypoints/rl/online/api_router.py`,
    `entrypoints/serve/dev/rpc/api_router.py`, `model_executor/model_loader/reload/inplace.py`.
    """
    return (
        EngineRequest("/pause?mode=keep", {}),
        EngineRequest(
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": served.path}},
            changes_weights=True,
        ),
        EngineRequest("/update_weight_version", {"new_version": str(served.step)}),
        EngineRequest("/resume", {}),
    )


def sglang_reload(served: ServedStep) -> tuple[EngineRequest, ...]:
    """Return the request by which SGLang loads a folder. It waits for requests that run, then flushes its caches.

    `ckpt follow --notify http://…/update_weights_from_disk` does the same: the server ignores the fields that it does
    not know. Read in SGLang 0.5.23: `UpdateWeightFromDiskReqInput` of `srt/managers/io_struct.py`.
    """
    body = {"model_path": served.path, "weight_version": str(served.step)}
    return (EngineRequest("/update_weights_from_disk", body, changes_weights=True),)


def slime_reload(served: ServedStep) -> tuple[EngineRequest, ...]:
    """Return the requests by which slime lets one of its SGLang servers load a folder.

    Requests that run are put back into the queue, and go on with the new weights. Read in slime, commit 06236d0:
    `_reload_engines` of `backends/megatron_utils/update_weight/update_weight_from_disk_delta.py`.
    """
    return (
        EngineRequest("/pause_generation", {"mode": "retract"}),
        EngineRequest("/flush_cache", {}),
        *sglang_reload(served),
        EngineRequest("/continue_generation", {}),
    )


def prime_rl_reload(served: ServedStep) -> tuple[EngineRequest, ...]:
    """Return the requests by which an inference server of prime-rl loads a folder.

    Its `weight_broadcast.type` is `filesystem`; `/update_weights` also resets the prefix cache. Read in prime-rl,
    commit 0051cbb: `src/prime_rl/inference/vllm/server.py`.
    """
    return (
        EngineRequest("/pause?mode=keep", {}),
        EngineRequest("/update_weights", {"weight_dir": served.path}, changes_weights=True),
        EngineRequest("/resume", {}),
    )


RELOADS: dict[str, Callable[[ServedStep], tuple[EngineRequest, ...]]] = {
    "vllm": vllm_reload,
    "sglang": sglang_reload,
    "slime": slime_reload,
    "prime-rl": prime_rl_reload,
}
"""By the name of the engine."""


@checked
def reload_engines(
    engine: str, urls: Sequence[str], served: ServedStep, *, api_key: str | None = None, seconds: float = POST_SECONDS
) -> list[CkptError]:
    """Let servers load a served folder, all at once.

    `engine`: one of `RELOADS`. `urls`: of the servers, such as `http://localhost:8000`. `api_key`: if they need
    one. `seconds`: for each request. Returns the errors of the servers that did not load it. Raises
    `InvalidArgumentError` for an unknown engine.
    """
    if engine not in RELOADS:
        raise InvalidArgumentError(f"unknown engine {engine!r}", hint=f"Engines are {', '.join(RELOADS)}.")
    requests = RELOADS[engine](served)

    def error_of(url: str) -> CkptError | None:
        try:
            send_requests(url, requests, api_key, seconds)
        except CkptError as error:
            return error
        return None

    with ThreadPoolExecutor(max(len(urls), 1)) as pool:
        return [error for error in pool.map(error_of, urls) if error is not None]
