"""The newest whole checkpoint of a run, in a folder, in a bucket, and of a chain."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import ckpt
from damage import BROKEN, NOT_FOUND, SAMPLES
from damage import ckpt as command
from object_stores import StoreServer, killing, reached


def model(folder: Path, value: float) -> None:
    folder.mkdir(parents=True)
    save_file({"w": np.full(3, value, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "new"}')


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Of four steps, of which the newest has no tensors, and the one before it a short file. A link names one more."""
    for step in (9, 10, 100, 200):
        model(tmp_path / f"checkpoint-{step}", step)
    (tmp_path / "checkpoint-200" / "model.safetensors").write_bytes(b"")
    short = tmp_path / "checkpoint-100" / "model.safetensors"
    short.write_bytes(short.read_bytes()[:-4])
    (tmp_path / "last").symlink_to("checkpoint-9")
    (tmp_path / "checkpoint-300").mkdir()
    (tmp_path / "logs-400").mkdir()
    return tmp_path


def test_latest_is_the_newest_whole_checkpoint_by_number(run: Path) -> None:
    newest = ckpt.runs.latest(run)
    assert (newest.path, newest.step) == (run / "checkpoint-10", 10)
    assert newest.checkpoint["w"].weight[:].tolist() == [10.0] * 3
    assert [one.path.name for one in newest.passed_over] == ["checkpoint-200", "checkpoint-100"]
    done = command("latest", run)
    assert done.out == f"{run / 'checkpoint-10'}\n"
    assert [line.split(":")[1] for line in done.err.splitlines()] == [
        " passed over checkpoint-200",
        " passed over checkpoint-100",
    ]
    report = json.loads(command("latest", run, "--json").out)
    assert (report["path"], report["step"], len(report["passed_over"])) == (str(newest.path), 10, 2)


def test_latest_takes_a_checkpoint_without_number_if_it_states_a_later_step(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    for name, step in (("epoch=0-step=7", 7), ("last", 9), ("best", 5)):
        (tmp_path / name).mkdir()
        tensors = {"state_dict": {"w": torch.ones(2)}, "global_step": step, "pytorch-lightning_version": "2.6.0"}
        torch.save(tensors, tmp_path / name / "checkpoint.ckpt")
    assert ckpt.runs.latest(tmp_path).path.name == "last"
    shutil.rmtree(tmp_path / "last")
    assert ckpt.runs.latest(tmp_path).path.name == "epoch=0-step=7"


def test_latest_passes_over_a_link_to_nothing_and_a_step_that_was_just_removed(tmp_path: Path) -> None:
    save_file({"a": np.zeros(3, "f4")}, tmp_path / "m.safetensors")
    (tmp_path / "run").mkdir()
    ckpt.save(ckpt.open(tmp_path / "m.safetensors"), tmp_path / "run/step-2", ckpt.Universal())
    (tmp_path / "run/step-9.ucp").symlink_to(tmp_path / "removed.ucp")
    assert command("latest", tmp_path / "run").out == f"{tmp_path / 'run/step-2'}\n"


def test_latest_with_verify_passes_over_a_flipped_bit(tmp_path: Path) -> None:
    source = ckpt.open(SAMPLES / "universal-1-plain").weights_only()
    for step in (1, 2):
        ckpt.save(source, tmp_path / f"copy{step}", ckpt.Universal())
    pack = next((tmp_path / "copy2" / "packs").rglob("*.safetensors"))
    data = bytearray(pack.read_bytes())
    data[-1] ^= 1
    pack.write_bytes(data)
    assert command("latest", tmp_path).out == f"{tmp_path / 'copy2'}\n"
    done = command("latest", tmp_path, "--verify")
    assert done.out == f"{tmp_path / 'copy1'}\n"
    assert "passed over copy2" in done.err
    assert "checksum" in done.err


def test_latest_of_a_chain_is_its_last_state() -> None:
    chain = SAMPLES / "universal-1-delta"
    newest = ckpt.runs.latest(chain)
    assert str(newest.path) == f"{chain}@{newest.step}"
    assert ckpt.open(newest.path).step == ckpt.open(chain).step == newest.step


def test_latest_of_a_chain_names_the_step_of_the_chain_whatever_the_checkpoint_states(tmp_path: Path) -> None:
    model(tmp_path / "model", 1)
    chain = tmp_path / "run.chain"
    assert command("append", chain, tmp_path / "model", "--step", 5).code == 0
    newest = ckpt.runs.latest(chain)
    assert (str(newest.path), newest.step) == (f"{chain}@5", 5)
    assert ckpt.open(newest.path)["w"].weight[:].tolist() == [1.0] * 3
    stated = ckpt.open(SAMPLES / "universal-1-plain").step
    assert stated is not None
    other = tmp_path / "other.chain"
    assert command("append", other, SAMPLES / "universal-1-plain", "--step", stated + 7).code == 0
    assert command("latest", other).out == f"{other}@{stated + 7}\n"


def test_latest_of_two_with_one_step_is_the_one_that_the_file_latest_names(tmp_path: Path) -> None:
    for name in ("global_step5", "global_step5_universal"):
        model(tmp_path / name, 5)
    assert command("latest", tmp_path).out == f"{tmp_path / 'global_step5_universal'}\n"
    (tmp_path / "latest").write_text("global_step5")
    assert command("latest", tmp_path).out == f"{tmp_path / 'global_step5'}\n"
    rows = json.loads(command("inspect", tmp_path, "--json").out)
    assert rows["latest"] == rows["newest_whole"] == rows["checkpoints"][-1]["name"] == "global_step5"
    model(tmp_path / "global_step6", 6)
    assert ckpt.runs.latest(tmp_path).step == 6


def test_latest_says_why_there_is_none(run: Path, tmp_path: Path) -> None:
    for name in ("checkpoint-9", "checkpoint-10"):
        shutil.rmtree(run / name)
    done = command("latest", run)
    assert (done.code, done.out) == (BROKEN, "")
    assert "none of its checkpoints is complete; the newest is checkpoint-200" in done.err
    assert command("latest", run / "checkpoint-300").code == NOT_FOUND
    assert command("latest", run / "gone").code == NOT_FOUND


def test_latest_lists_one_level_of_a_bucket_and_opens_the_newest(
    run: Path, server: StoreServer, user: StoreServer
) -> None:
    url = server.put("run", run)
    with killing(server) as counter, reached(StoreServer(counter.endpoint)):
        newest = ckpt.runs.latest(url)
        assert str(newest.path) == f"{url}/checkpoint-10"
        assert newest.checkpoint["w"].weight[:].tolist() == [10.0] * 3
        listings = [request for request in counter.seen if "list-type" in request]
        # The folder itself, and each of the three that were looked at; those that have no objects are not there.
        assert len(listings) == 4
        assert not [request for request in counter.seen if "checkpoint-9/" in request]
    assert command("latest", url).out == f"{url}/checkpoint-10\n"
    assert command("latest", f"{url}/gone").code == NOT_FOUND
