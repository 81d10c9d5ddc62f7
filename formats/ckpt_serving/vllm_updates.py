"""Live updates of vLLM servers whose workers follow the chain by themselves: `vllm_engine`."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Event

from ckpt import Follower
from ckpt.following.source import FollowedStep
from ckpt_formats.core.arguments import checked
from ckpt_formats.core.files import read_whole
from ckpt_serving.posting import POST_SECONDS, EngineRequest, send_requests

_MAX_KEY = 1 << 12


@dataclass
class ChainInfo:
    """The chain that the workers of a server follow: what `/init_weight_transfer_engine` takes."""

    chain: str
    """A path or URL that each worker can read."""
    key_file: str | None = None
    """The file of the key with which the run signs its records."""

    def follow(self) -> Follower:
        """Return a follower of the chain. Raises `NotFoundError` if the file of the key does not exist."""
        key = None if self.key_file is None else read_whole(Path(self.key_file), _MAX_KEY)
        return Follower(self.chain, key=key)


def vllm_attach(info: ChainInfo) -> tuple[EngineRequest, ...]:
    """Return the request that names the chain to a server's workers, once."""
    return (EngineRequest("/init_weight_transfer_engine", {"init_info": asdict(info)}),)


def vllm_update(step: int) -> tuple[EngineRequest, ...]:
    """Return the requests by which a server's workers bring their models to a step.

    Requests that run stay queued meanwhile, and go on with the new weights; `/weight_info` shows the step. The workers
    fetch, verify and decode while the server is paused.
    """
    return (
        EngineRequest("/pause?mode=keep", {}),
        EngineRequest("/start_weight_update", {}),
        EngineRequest("/update_weights", {"update_info": {"step": step}}, changes_weights=True),
        EngineRequest("/finish_weight_update", {"weight_version": str(step)}, changes_weights=True),
        EngineRequest("/resume", {}),
    )


@checked
def update_live(
    chain: str | os.PathLike[str],
    urls: Sequence[str],
    *,
    key_file: str | None = None,
    api_key: str | None = None,
    stop: Event | None = None,
    seconds: float = POST_SECONDS,
    report: Callable[[FollowedStep], None] = lambda step: None,
) -> None:
    """Keep vLLM servers at the last published step until `stop` is set; a step that is overtaken meanwhile is skipped.

    The servers run with `VLLM_SERVER_DEV_MODE=1` and `--weight-transfer-config '{"backend": "ckpt"}'`. Only the head of
    the chain is read here. `api_key`: of the servers, if they need one. `report` is called after each
    step that all servers have.

    Raises `EngineError` if one server does not take a step, after all others have answered; `CorruptError`, `OSError`.
    """
    info = ChainInfo(os.fspath(chain), key_file)
    with info.follow() as follower, ThreadPoolExecutor(max(len(urls), 1)) as pool:

        def send(requests: tuple[EngineRequest, ...]) -> None:
            pending = [pool.submit(send_requests, url, requests, api_key, seconds) for url in urls]
            for one in pending:
                one.exception()  # waits: a server that fails stops no other one
            for one in pending:
                one.result()

        send(vllm_attach(info))
        step = None
        while (step := follower.wait(after=step, stop=stop)) is not None:
            send(vllm_update(step.step))
            report(step)
