"""Live updates of vLLM servers, against servers that record the requests.

tests/campaigns/vllm_live.py runs the same against vLLM itself, which is too large for the environment of the tests.
"""

import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from ckpt_serving import EngineError, update_live
from ckpt_serving.__main__ import main
from published import PublishedRun
from recording_server import recording_server


def weights(value: int) -> dict[str, np.ndarray]:
    return {"w": np.full(8, value, np.float32)}


def update_of(step: int) -> list[tuple[str, object]]:
    return [
        ("/pause?mode=keep", {}),
        ("/start_weight_update", {}),
        ("/update_weights", {"update_info": {"step": step}}),
        ("/finish_weight_update", {"weight_version": str(step)}),
        ("/resume", {}),
    ]


def test_servers_get_the_chain_once_and_then_each_step(tmp_path: Path) -> None:
    run = PublishedRun(tmp_path, weights(0))
    run.publish(7, weights(0), base=True)
    steps, updated, stop = list[int](), threading.Semaphore(0), threading.Event()
    with recording_server() as one, recording_server() as other:
        updates = threading.Thread(
            target=update_live,
            args=(tmp_path, [one.url, other.url]),
            kwargs={"stop": stop, "report": lambda step: (steps.append(step.step), updated.release())},
        )
        updates.start()
        try:
            assert updated.acquire(timeout=120)
            run.publish(8, weights(1))
            assert updated.acquire(timeout=120)
        finally:
            stop.set()
            updates.join()
    attach = ("/init_weight_transfer_engine", {"init_info": {"chain": str(tmp_path), "key_file": None}})
    assert one.exchange == other.exchange == [attach, *update_of(7), *update_of(8)]
    assert steps == [7, 8]


def test_server_that_fails_stays_paused_and_stops_no_other_one(tmp_path: Path) -> None:
    PublishedRun(tmp_path, weights(0)).publish(7, weights(0), base=True)
    with (
        recording_server({"/update_weights": (500, {})}) as broken,
        recording_server() as sound,
        pytest.raises(EngineError, match="answered 500") as caught,
    ):
        update_live(tmp_path, [broken.url, sound.url])
    assert broken.exchange[1:] == update_of(7)[:3]
    assert sound.exchange[1:] == update_of(7)
    assert "two steps" in str(caught.value.hint)


def test_command_ends_with_1_when_a_server_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with recording_server({"/init_weight_transfer_engine": (404, {})}) as server:
        assert main(["vllm-live", str(tmp_path), server.url]) == 1
    assert "answered 404" in capsys.readouterr().err


def test_plugin_leaves_processes_without_weight_transfer_as_they_are() -> None:
    """vLLM calls it in each of its processes, of any version: without vLLM, as with an old one, nothing happens."""
    code = "import sys; from ckpt_serving.vllm_plugin import register; register(); print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "False\n"
