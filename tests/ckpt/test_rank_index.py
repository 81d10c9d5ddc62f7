"""Files that ranks saved on their own get the one `.metadata` with which torch loads them, or are refused by name."""

import json
import os
import pickle
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import obstore
import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata

import ckpt
from ckpt_formats.core.tensor import read
from damage import BROKEN, SAMPLES, UNSUPPORTED
from damage import ckpt as command
from dcp_states import by_rank, exact, loaded, save, state
from engines.launch import run_script
from killing import killed, points
from object_stores import StoreServer

SAMPLE = SAMPLES / "dcp-2.13-fsdp2-w2"
RULES = '[[rule]]\nmatch = "model.w"\nhow = "first"\n'


@pytest.fixture
def ranks(tmp_path: Path) -> Path:
    """The sample's files, as if both ranks had saved them without collectives."""
    folder = tmp_path / "run"
    shutil.copytree(SAMPLE, folder, ignore=shutil.ignore_patterns("truth.safetensors"))
    whole = pickle.loads((folder / ".metadata").read_bytes())
    for rank in range(2):
        places = {at: one for at, one in whole.storage_data.items() if one.relative_path.startswith(f"__{rank}_")}
        own = {(at.fqn, at.offset) for at in places}
        entries = {}
        for name, entry in whole.state_dict_metadata.items():
            if hasattr(entry, "chunks"):
                chunks = [one for one in entry.chunks if (name, one.offsets) in own]
                entry = type(entry)(entry.properties, entry.size, chunks)
            if (name, None) in own or getattr(entry, "chunks", None):
                entries[name] = entry
        paths = {name: whole.planner_data[name] for name in entries}
        metadata = Metadata(entries, paths, places, whole.storage_meta, whole.version)
        (folder / f"__{rank}.metadata").write_bytes(pickle.dumps(metadata))
    (folder / ".metadata").unlink()
    return folder


def changed(folder: Path, rank: int, change: Callable[[Any], None]) -> None:
    file = folder / f"__{rank}.metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


def test_index_names_what_a_save_with_collectives_names(ranks: Path, tmp_path: Path) -> None:
    before = ckpt.open(ranks)
    assert command("index", ranks, "--dry-run").code == 0
    assert not (ranks / ".metadata").exists()
    note = f"ckpt index {ranks}"
    assert note in command("inspect", ranks).err
    (one,) = ckpt.index(ranks)
    data = (ranks / ".metadata").read_bytes()
    assert (one.path, one.ranks, one.written, one.differing) == (ranks / ".metadata", 2, True, ())
    assert note not in command("inspect", ranks).err
    assert exact(loaded(ranks)) == exact(loaded(SAMPLE))
    written, original = pickle.loads(data), pickle.loads((SAMPLE / ".metadata").read_bytes())
    assert written.storage_data == original.storage_data
    chunks = [
        {
            name: sorted(one.chunks, key=str)
            for name, one in metadata.state_dict_metadata.items()
            if hasattr(one, "chunks")
        }
        for metadata in (written, original)
    ]
    assert chunks[0] == chunks[1]
    (again,) = ckpt.index(ranks)
    assert (again.written, (ranks / ".metadata").read_bytes()) == (False, data)
    after = ckpt.open(ranks)
    assert not after.notices
    assert [file.path.name for file in after.files if file.role == "metadata"][-1] == ".metadata"
    assert before.parameters.keys() == after.parameters.keys()
    copied = tmp_path / "alone"  # torch, and ckpt, read it without those of the ranks, too
    shutil.copytree(ranks, copied, ignore=shutil.ignore_patterns("__?.metadata"))
    alone = ckpt.open(copied)
    assert all(
        read(one.weight).tobytes() == read(before[name].weight).tobytes() for name, one in alone.parameters.items()
    )


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_index_names_one_of_equal_copies_and_keeps_what_differs(tmp_path: Path) -> None:
    states = [{**state(), "seed": rank, "own": {f"of.{rank}": rank}} for rank in range(2)]
    folder = by_rank(tmp_path / "run", *states)
    (one,) = ckpt.index(folder)
    assert one.differing == ("seed",)
    assert one.compared_nbytes > 0
    expected = {**state(), "seed": 0, "own": {"of.0": 0, "of.1": 1}, "ranks": {"1": {"seed": 1}}}
    assert exact(loaded(folder)) == exact(expected)
    assert ckpt.open(folder).extras["ranks"] == {"1": {"seed": 1}}
    report = json.loads(command("index", folder, "--json").out)
    assert report["indexes"][0]["differing"] == ["seed"]
    assert report["notes"][0]["names"] == ["seed"]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_index_joins_the_folders_of_ranks_and_both_folders_of_accelerate(tmp_path: Path) -> None:
    weights = {"model": {"w": torch.arange(6.0), "b": torch.ones(3)}}
    states = {"optimizer": {"state": {"w": {"exp_avg": torch.ones(6)}}, "param_groups": [{"lr": 0.1, "params": ["w"]}]}}
    for step in (1, 2):
        for rank in range(2):
            save({**weights, "step": step}, tmp_path / f"run/step-{step}/rank_{rank}")
    assert ckpt.runs.latest(tmp_path / "run").path.name == "step-2"
    assert ckpt.open(tmp_path / "run/step-2").step == 2
    (one,) = ckpt.index(tmp_path / "run/step-2")
    assert (one.ranks, exact(loaded(tmp_path / "run/step-2"))) == (2, exact({**weights, "step": 2}))
    for name, saved in (("pytorch_model_fsdp_0", weights), ("optimizer_0", states)):
        by_rank(tmp_path / "pair" / name, saved, saved)
    assert [one.path.parent.name for one in ckpt.index(tmp_path / "pair")] == ["pytorch_model_fsdp_0", "optimizer_0"]
    assert exact(loaded(tmp_path / "pair" / "optimizer_0")) == exact(states)
    (tmp_path / "run/step-1/rank_0/.metadata").unlink()
    ran = command("index", tmp_path / "run/step-1")
    assert (ran.code, "rank_0/.metadata is missing" in ran.err) == (BROKEN, True), ran.err


def test_index_refuses_copies_that_differ_unless_a_rule_chooses_one(tmp_path: Path) -> None:
    same = {"model": {"v": torch.arange(3.0)}}
    folder = by_rank(tmp_path / "run", *({"model": {**same["model"], "w": torch.full((4,), n)}} for n in (1.0, 2.0)))
    ran = command("index", folder)
    assert (ran.code, "model.w" in ran.err or "replicas of one tensor differ" in ran.err) == (BROKEN, True)
    assert not (folder / ".metadata").exists()
    (tmp_path / "rules.toml").write_text(RULES)
    assert command("index", folder, "--rules", tmp_path / "rules.toml").code == 0
    assert loaded(folder)["model"]["w"].tolist() == [1.0] * 4
    (folder / ".metadata").unlink()
    (tmp_path / "rules.toml").write_text(RULES.replace("first", "averaged"))
    ran = command("index", folder, "--rules", tmp_path / "rules.toml")
    assert (ran.code, "no file has these values" in ran.err) == (UNSUPPORTED, True)


def without_a_block(metadata: Any) -> None:
    name = next(name for name, one in metadata.state_dict_metadata.items() if getattr(one, "chunks", None))
    metadata.state_dict_metadata[name].chunks.clear()
    for at in [at for at in metadata.storage_data if at.fqn == name]:
        del metadata.storage_data[at]


def with_a_block_that_is_moved(metadata: Any) -> None:
    name, entry = next(
        (name, one) for name, one in metadata.state_dict_metadata.items() if len(getattr(one, "size", ())) == 2
    )
    (chunk,) = entry.chunks
    moved = torch.Size((chunk.offsets[0] - 1, *chunk.offsets[1:]))
    entry.chunks[:] = [ChunkStorageMetadata(moved, chunk.sizes)]
    at = next(at for at in metadata.storage_data if at.fqn == name)
    metadata.storage_data[type(at)(name, moved)] = metadata.storage_data.pop(at)


REFUSED: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "the first rank's metadata": (lambda at: (at / "__0.metadata").unlink(), BROKEN, r"__0\.metadata is missing"),
    "the last rank's metadata": (lambda at: (at / "__1.metadata").unlink(), BROKEN, r"name __1_0\.distcp"),
    "the last rank": (
        lambda at: [(at / name).unlink() for name in ("__1.metadata", "__1_0.distcp")], BROKEN, "no file holds block"
    ),
    "a file": (lambda at: (at / "__1_0.distcp").unlink(), BROKEN, r"__1_0\.distcp is missing"),
    "bytes": (
        lambda at: os.truncate(at / "__1_0.distcp", 5000), BROKEN, r"cut short: 5,000 bytes, [\d,]+ expected; \d+ items"
    ),
    "a block": (lambda at: changed(at, 1, without_a_block), BROKEN, "no file holds block"),
    "its own place": (lambda at: changed(at, 1, with_a_block_that_is_moved), BROKEN, "overlap"),
    "the end of a save": (lambda at: (at / "__1.metadata.tmp").write_text("x"), BROKEN, r"__1\.metadata\.tmp"),
    "all metadata": (
        lambda at: [(at / f"__{n}.metadata").unlink() for n in (0, 1)], BROKEN, r"no \.metadata, which torch"
    ),
    "an older save's absence": (
        lambda at: shutil.copy(SAMPLE / ".metadata", at), BROKEN, r"\.metadata already.*__0\.metadata, __1\.metadata"
    ),
    "DCP's files": (
        lambda at: (shutil.rmtree(at), shutil.copytree(SAMPLES / "deepspeed-0.19-zero1-bf16-dp2", at)),
        UNSUPPORTED,
        r"format deepspeed.*ckpt convert \S+run TARGET --to dcp",
    ),
    "one checkpoint": (
        lambda at: [*map(Path.unlink, at.glob("__*")), *(shutil.copytree(SAMPLE, at / f"step-{n}") for n in (1, 2))],
        UNSUPPORTED,
        r"several steps.*Name one of them: \S+step-2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("lacking", REFUSED)
def test_index_refuses_ranks_that_lack(lacking: str, ranks: Path) -> None:
    damage, code, words = REFUSED[lacking]
    damage(ranks)
    before = sorted(ranks.rglob("*"))
    ran = command("index", ranks)
    assert (ran.code, re.search(words, ran.err, re.DOTALL)) != (code, None), ran.err
    assert ran.code == code, ran.err
    assert sorted(ranks.rglob("*")) == before


def test_index_that_is_killed_leaves_none_or_the_whole_one(ranks: Path) -> None:
    work = partial(ckpt.index, ranks)
    count = points(work, ranks)
    data = (ranks / ".metadata").read_bytes()
    for point in range(count):
        (ranks / ".metadata").unlink(missing_ok=True)
        killed(work, ranks, point)
        assert not (ranks / ".metadata").exists() or (ranks / ".metadata").read_bytes() == data
        ckpt.open(ranks)
        work()
        assert (ranks / ".metadata").read_bytes() == data
    assert not [one.name for one in ranks.iterdir() if one.name.startswith(".") and one.name != ".metadata"]


def test_index_of_ranks_in_a_bucket_is_one_object_more(ranks: Path, server: StoreServer, user: object) -> None:
    (one,) = ckpt.index(server.put("run", ranks))
    ckpt.index(ranks)
    assert one.written
    assert bytes(obstore.get(server.client, "run/.metadata").bytes()) == (ranks / ".metadata").read_bytes()


@pytest.mark.engines
def test_torch_reshards_what_ranks_saved_in_each_of_its_ways(tmp_path: Path) -> None:
    import rank_saves

    script = Path(rank_saves.__file__)
    run_script(script, ["save", str(tmp_path)], 8)
    for way in rank_saves.WAYS:
        (one,) = ckpt.index(tmp_path / way)
        assert (one.written, one.ranks, one.differing) == (True, rank_saves.WORLD, ("seed",))
        assert command("verify", tmp_path / way).code == 0
    run_script(script, ["load", str(tmp_path)], 8)
    for world in (1, 2):
        lines = (tmp_path / f"load-{world}" / "rank0.log").read_text().splitlines()
        assert [line for line in lines if " on " in line] == [
            f"{way} on {world}: 5 weights, 5 states" for way in rank_saves.WAYS
        ]
