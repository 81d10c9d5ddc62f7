"""Broken and hostile checkpoints: the right exit code, one clear paragraph, and no result at all."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from damage import ATTACKS, DAMAGES, SAMPLES, SOURCES, Damage, Ran, ckpt, make_sources, pickled


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources")
    make_sources(folder)
    return folder


@pytest.fixture
def broken(request: pytest.FixtureRequest, sources: Path, tmp_path: Path) -> Path:
    """A copy of the damage's source, damaged."""
    damage = DAMAGES[request.node.callspec.params["name"]]
    copy = tmp_path / damage.source
    original = sources / damage.source
    if original.is_dir():
        shutil.copytree(original, copy)
    else:
        shutil.copyfile(original, copy)
    damage.harm(copy)
    return copy


def assert_one_paragraph(err: str, says: tuple[str, ...]) -> None:
    lines = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert [line.split(": ")[0] for line in lines] in (
        ["error"],
        ["error", "where"],
        ["error", "hint"],
        ["error", "where", "hint"],
    )
    assert len(err) < 3000
    assert "Traceback" not in err
    assert "fault of ckpt" not in err
    assert all(line.isprintable() for line in lines)
    for words in says:
        assert words in err


@pytest.mark.parametrize("source", SOURCES)
def test_verify_and_convert_take_the_undamaged_sources(source: str, sources: Path, tmp_path: Path) -> None:
    assert ckpt("verify", sources / source).code == 0
    assert ckpt("convert", sources / source, tmp_path / "out").code == 0


@pytest.mark.quick(10)
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_by_every_command_that_reads_it(name: str, broken: Path, tmp_path: Path) -> None:
    damage, target = DAMAGES[name], tmp_path / "out" / "target"
    target.parent.mkdir()
    inspected, verified = ckpt("inspect", broken), ckpt("verify", broken, "--json")
    if damage.seen == "index":
        assert_refused(inspected, damage)
        assert_refused(replace(verified, out=""), damage)
        report = json.loads(verified.out)
        assert report["findings"] if "error" not in report else report["error"]["code"] == damage.code
    else:
        assert inspected.code == 0
        assert verified.code == damage.code, verified.err
        report = json.loads(verified.out)
        assert report["ok"] is False
        for words in damage.says:
            assert words in json.dumps(report["findings"])
    for form in ("universal", "torch"):
        done = ckpt("convert", broken, target, "--to", form)
        if damage.seen == "spare":
            assert done.code == 0
            target.rename(target.with_name(form))
        else:
            assert_refused(done, damage)
            assert list(target.parent.iterdir()) == []


def assert_refused(done: Ran, damage: Damage) -> None:
    assert done.code == damage.code, done.err
    assert_one_paragraph(done.err, damage.says)
    assert done.out == ""


DAMAGED = {
    "dcp-flipped-bit": (20, "tok_embeddings.weight"),
    "flipped-bit": (20, "rank_1_mp_rank_00_optim_states"),
    "megatron-shifted-optimizer": (20, "do not round to the weights"),
    "missing-rank": (20, "files of 1 are here"),
    "mixed-steps": (20, "`step` is 5.0"),
    "truncated-shard": (20, "rank_1_mp_rank_00_optim_states.pt"),
    "wrong-latest": (10, "global_step9"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_the_damaged_samples_are_refused(name: str, tmp_path: Path) -> None:
    code, says = DAMAGED[name]
    sample = SAMPLES / "damaged" / name
    for command in (["convert", sample, tmp_path / "out"], ["verify", sample]):
        done = ckpt(*command)
        assert done.code == code
        assert says in done.out + done.err
        assert "Traceback" not in done.err
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_damaged_sample_is_refused_by_the_real_command(tmp_path: Path) -> None:
    code, says = DAMAGED["truncated-shard"]
    command = [sys.executable, "-m", "ckpt_cli", "convert", SAMPLES / "damaged" / "truncated-shard", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_every_damaged_sample_is_tested() -> None:
    assert {path.name for path in (SAMPLES / "damaged").iterdir()} == set(DAMAGED)


def test_commands_run_no_attack(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, body in enumerate(ATTACKS.values()):
        evil = tmp_path / f"{number}.pt"
        evil.write_bytes(pickled(body))
        for command in (["inspect", evil], ["verify", evil], ["convert", evil, tmp_path / "out"]):
            assert ckpt(*command).code == 21
    assert {path.suffix for path in tmp_path.iterdir()} == {".pt"}


def test_damages_are_of_more_than_a_hundred_kinds() -> None:
    assert len(DAMAGES) > 100
