"""Broken and hostile checkpoints: the right exit code, one clear paragraph, and no result at all."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from damage import ATTACKS, DAMAGES, SAMPLES, SOURCES, ckpt, make_sources, pickled


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
def test_undamaged_the_sources_are_well(source: str, sources: Path, tmp_path: Path) -> None:
    assert ckpt("verify", sources / source).code == 0
    assert ckpt("convert", sources / source, tmp_path / "out").code == 0


@pytest.mark.parametrize("form", ["universal", "torch"])
@pytest.mark.parametrize("name", DAMAGES)
def test_convert_refuses_and_leaves_nothing(name: str, form: str, broken: Path, tmp_path: Path) -> None:
    damage, target = DAMAGES[name], tmp_path / "out" / "target"
    target.parent.mkdir()
    done = ckpt("convert", broken, target, "--to", form)
    if damage.seen == "spare":
        assert done.code == 0
        return
    assert done.code == damage.code, done.err
    assert_one_paragraph(done.err, damage.says)
    assert done.out == ""
    assert list(target.parent.iterdir()) == []


@pytest.mark.parametrize("name", DAMAGES)
def test_inspect_says_so_if_the_index_shows_it(name: str, broken: Path) -> None:
    damage = DAMAGES[name]
    done = ckpt("inspect", broken)
    if damage.seen == "index":
        assert done.code == damage.code, done.err
        assert_one_paragraph(done.err, damage.says)
        assert done.out == ""
    else:
        assert done.code == 0


@pytest.mark.parametrize("name", DAMAGES)
def test_verify_finds_it(name: str, broken: Path) -> None:
    damage = DAMAGES[name]
    done = ckpt("verify", broken, "--json")
    assert done.code == damage.code, done.err
    if damage.seen == "index":
        assert_one_paragraph(done.err, damage.says)
        assert done.out == ""
        return
    said = json.loads(done.out)
    assert said["ok"] is False
    for words in damage.says:
        assert words in json.dumps(said["findings"])


DAMAGED = {
    "dcp-flipped-bit": (20, "tok_embeddings.weight"),
    "flipped-bit": (20, "rank_1_mp_rank_00_optim_states"),
    "megatron-shifted-optimizer": (20, "not those of the weights"),
    "missing-rank": (20, "files of 1 are here"),
    "mixed-steps": (20, "`step` is 5.0"),
    "truncated-shard": (20, "rank_1_mp_rank_00_optim_states.pt"),
    "wrong-latest": (10, "global_step9"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_the_damaged_samples_are_refused_by_the_real_command(name: str, tmp_path: Path) -> None:
    code, says = DAMAGED[name]
    for command in (
        ["convert", str(SAMPLES / "damaged" / name), str(tmp_path / "out")],
        ["verify", str(SAMPLES / "damaged" / name)],
    ):
        done = subprocess.run([sys.executable, "-m", "ckpt_cli", *command], capture_output=True, text=True, timeout=60)
        assert done.returncode == code
        assert says in done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        assert list(tmp_path.iterdir()) == []


def test_every_damaged_sample_is_tested() -> None:
    assert {path.name for path in (SAMPLES / "damaged").iterdir()} == set(DAMAGED)


def test_no_attack_ran(sources: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, body in enumerate(ATTACKS.values()):
        evil = tmp_path / f"{number}.pt"
        evil.write_bytes(pickled(body))
        for command in (["inspect", evil], ["verify", evil], ["convert", evil, tmp_path / "out"]):
            assert ckpt(*command).code == 21
    assert {path.suffix for path in tmp_path.iterdir()} == {".pt"}


def test_there_are_more_than_a_hundred_kinds_of_damage() -> None:
    assert len(DAMAGES) > 100
