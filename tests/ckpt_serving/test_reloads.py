"""Requests to inference servers, against a server that records them.

The exchanges are those that the code of vLLM 0.33, SGLang 0.5.23, slime and prime-rl documents.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ckpt.errors import InvalidArgumentError
from ckpt_serving import EngineError, ServedStep, reload_engines
from ckpt_serving.__main__ import main
from damage import ckpt
from published import PublishedRun
from recording_server import recording_server

SERVED = ServedStep(1234, 3, "0" * 32, "/weights/a")
ENVIRONMENT = {"CKPT_STEP": "1234", "CKPT_EPOCH": "3", "CKPT_HASH": "0" * 32, "CKPT_PATH": "/weights/a"}

EXCHANGES = {
    "vllm": [
        ("/pause?mode=keep", {}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/weights/a"}}),
        ("/update_weight_version", {"new_version": "1234"}),
        ("/resume", {}),
    ],
    "sglang": [("/update_weights_from_disk", {"model_path": "/weights/a", "weight_version": "1234"})],
    "slime": [
        ("/pause_generation", {"mode": "retract"}),
        ("/flush_cache", {}),
        ("/update_weights_from_disk", {"model_path": "/weights/a", "weight_version": "1234"}),
        ("/continue_generation", {}),
    ],
    "prime-rl": [("/pause?mode=keep", {}), ("/update_weights", {"weight_dir": "/weights/a"}), ("/resume", {})],
}


@pytest.mark.parametrize("engine", EXCHANGES)
def test_command_reloads_all_servers_with_the_step_of_its_environment(
    engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CKPT_ENGINE_KEY", "secret")
    with recording_server() as one, recording_server() as other:
        assert main([engine, one.url, f"{other.url}/proxy/"]) == 0
    assert one.exchange == EXCHANGES[engine]
    assert other.exchange == [(f"/proxy{path}", body) for path, body in EXCHANGES[engine]]
    assert {key for _, _, key in one.posts} == {"Bearer secret"}


def test_vllm_server_stays_paused_when_its_weights_may_be_of_two_steps() -> None:
    refusal = {"/collective_rpc": (500, {"error": "no \x1b[2J safetensors"})}
    with recording_server(refusal) as broken, recording_server() as sound:
        (error,) = reload_engines("vllm", [broken.url, sound.url], SERVED)
    assert isinstance(error, EngineError)
    assert [path for path, _ in broken.exchange] == ["/pause?mode=keep", "/collective_rpc"]
    assert sound.exchange == EXCHANGES["vllm"]
    assert error.where == f"{broken.url}/collective_rpc"
    assert "answered 500" in error.what
    assert "two steps" in str(error.hint)


def test_server_is_not_called_changed_when_it_cannot_be_paused() -> None:
    with recording_server({"/pause": (404, {})}) as server:
        (error,) = reload_engines("vllm", [server.url], SERVED)
    assert len(server.posts) == 1
    assert error.hint is None


def test_redirects_are_refused_so_that_nobody_else_gets_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_ENGINE_KEY", "secret")
    with recording_server() as other:
        to_other = {"/update_weights_from_disk": (307, other.url)}
        with recording_server(to_other) as server:
            (error,) = reload_engines("sglang", [server.url], SERVED)
    assert "answered 307" in str(error)
    assert other.posts == []


def test_dead_server_is_an_error_of_the_engine() -> None:
    with recording_server() as server:
        pass
    (error,) = reload_engines("sglang", [server.url], SERVED)
    assert isinstance(error, EngineError)
    assert "does not answer" in str(error)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host/", "http://", "http://host?x=1", ""])
def test_text_that_is_no_url_of_a_server_is_refused(url: str) -> None:
    (error,) = reload_engines("sglang", [url], SERVED)
    assert isinstance(error, InvalidArgumentError)


def test_unknown_engine_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="unknown engine 'triton'"):
        reload_engines("triton", ["http://localhost:8000"], SERVED)


@pytest.mark.parametrize("changes", [{"CKPT_PATH": ""}, {"CKPT_STEP": "3x"}])
def test_command_refuses_to_run_without_a_step(
    changes: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**ENVIRONMENT, **changes}.items():
        monkeypatch.setenv(name, value)
    assert main(["vllm", "http://localhost:1"]) == 2
    assert "ckpt follow" in capsys.readouterr().err


def test_command_without_arguments_explains_itself() -> None:
    run = subprocess.run([sys.executable, "-m", "ckpt_serving"], capture_output=True, text=True)
    assert run.returncode == 2
    assert "ckpt_serving vllm http://localhost:8000" in run.stderr


def test_follow_lets_servers_load_each_folder_that_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a command, and for SGLang without one: its server ignores the fields that it does not know."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    chain, target = tmp_path / "policy.chain", tmp_path / "served"
    chain.mkdir()
    run = PublishedRun(chain, {"w": np.zeros(8, np.float32)})
    with recording_server() as vllm, recording_server() as sglang:
        for step in (7, 8):
            run.publish(step, {"w": np.full(8, step, np.float32)}, base=step == 7)
            notify = ["--notify", f"{sglang.url}/update_weights_from_disk"]
            command = ["--exec", f"python -m ckpt_serving vllm {vllm.url}"]
            assert ckpt("follow", chain, target, "--once", *notify, *command).code == 0
    loads = [body["kwargs"]["weights_path"] for path, body in vllm.exchange if path == "/collective_rpc"]
    assert loads == [body["model_path"] for _, body in sglang.exchange]
    assert [body["weight_version"] for _, body in sglang.exchange] == ["7", "8"]
    assert [body["new_version"] for path, body in vllm.exchange if path == "/update_weight_version"] == ["7", "8"]
    assert len(set(loads)) == 2
    assert {Path(path).parent for path in loads} == {target}
