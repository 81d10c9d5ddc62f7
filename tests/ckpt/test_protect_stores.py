"""Parity in buckets: of a checkpoint there, or of one in a folder."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import obstore
import pytest

import ckpt
from ckpt.pipeline import Resources
from ckpt.protection import members
from ckpt_formats.core.checkpoint import Checkpoint, Origin
from ckpt_formats.parity.blocks import find_parity
from ckpt_formats.stores.location import source_path, target_path
from ckpt_formats.universal.published.records import HEAD
from damage import BROKEN, SAMPLES
from damage import ckpt as command
from forking import forking
from held import checkpoint, parameter
from object_stores import BUCKET, StoreServer, killing, start
from protect_campaign import contents_of, fill
from published_ranks import publish

TWO = Resources(workers=2)
PLACE = f"s3://{BUCKET}/run"
MIB = 1 << 20


def objects_below(server: StoreServer, key: str) -> dict[str, bytes]:
    metas = [meta for page in obstore.list(server.client, f"{key}/") for meta in page]
    return {m["path"][len(key) + 1 :]: bytes(obstore.get(server.client, m["path"]).bytes()) for m in metas}


def protect_or_repair(name: str) -> None:
    """The work of a process that is killed."""
    resources = Resources(workers=1)
    if name == "protect":
        ckpt.protect(PLACE, 1, overwrite=True, resources=resources)
    else:
        ckpt.repair(PLACE, resources=resources)


def damage(server: StoreServer, *lost: str, flipped: str) -> None:
    for name in lost:
        obstore.delete(server.client, f"run/{name}")
    data = bytearray(bytes(obstore.get(server.client, f"run/{flipped}").bytes()))
    data[-3] ^= 1
    obstore.put(server.client, f"run/{flipped}", bytes(data))


@pytest.mark.slow
def test_objects_of_a_bucket_are_repaired_and_parity_is_that_of_a_folder(
    user: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ckpt_formats.stores import bucket

    monkeypatch.setattr(bucket, "_SINGLE_REQUEST", MIB)  # larger files are sent in parts
    local = tmp_path / "run"
    fill(local, {f"part/rank-{rank}": os.urandom(2 * MIB + rank) for rank in range(3)})
    user.put("run", local)
    assert command("protect", PLACE, "--lose", 2).code == 0
    ckpt.protect(local, 2, resources=TWO)
    whole = objects_below(user, "run")
    assert whole == contents_of(local)

    damage(user, "part/rank-1", ".ckpt-parity/manifest", flipped="part/rank-2")
    damaged = objects_below(user, "run")
    assert command("repair", PLACE, "--dry-run").code == 0
    assert objects_below(user, "run") == damaged
    assert command("repair", PLACE).code == 0
    assert objects_below(user, "run") == whole

    damage(user, "part/rank-0", "part/rank-1", flipped="part/rank-2")
    assert command("repair", PLACE).code == BROKEN
    assert command("repair", PLACE, "--from", local).code == 0
    assert objects_below(user, "run") == whole
    shutil.rmtree(local / "part")
    assert command("repair", local, "--from", PLACE).code == 0
    assert (local / "part" / "rank-1").read_bytes() == whole["part/rank-1"]


@pytest.mark.slow
def test_parity_in_a_bucket_repairs_a_folder_once_the_user_names_it(user: StoreServer, tmp_path: Path) -> None:
    root, places = tmp_path / "run", [f"s3://{BUCKET}/a", str(tmp_path / "b")]
    fill(root, {name: os.urandom(99) for name in "xyz"})
    arguments = ["protect", root, "--into", places[0], "--into", places[1]]
    assert command(*arguments).code == 0
    assert objects_below(user, "a").keys() == {"0/group-000", "0/manifest", "manifest"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "run"]
    whole = contents_of(root)
    (root / "x").unlink()
    (root / "y").unlink()
    obstore.delete(user.client, "a/manifest")
    lost = command("repair", root)
    assert (lost.code, places[0] in lost.err) == (BROKEN, True)
    assert command("repair", root, "--parity", places[0], "--parity", places[1]).code == 0
    assert (contents_of(root), "manifest" in objects_below(user, "a")) == (whole, True)

    (root / "x").write_bytes(b"other")
    assert command(*arguments, "--overwrite").code == 0
    assert not ckpt.repair(root, parity=places, dry_run=True, resources=TWO).damaged
    shutil.copytree(root, tmp_path / "other", ignore=shutil.ignore_patterns(".ckpt-parity"))
    refused = command("protect", tmp_path / "other", "--into", places[0])
    assert (refused.code, "exists already" in refused.err) == (30, True)
    user.client.put("a/manifest", b"of a later program")
    assert command("repair", root, "--parity", places[0], "--parity", places[1]).code == 0


@pytest.mark.slow
def test_a_damaged_checkpoint_in_a_bucket_is_read_through_its_parity(user: StoreServer, tmp_path: Path) -> None:
    name = "deepspeed-0.19-zero1-bf16-dp2"
    shutil.copytree(SAMPLES / name, tmp_path / "run")
    user.put("run", tmp_path / "run")
    ckpt.protect(PLACE, 1, resources=TWO)
    lost = next(path.relative_to(tmp_path / "run") for path in (tmp_path / "run").rglob("*rank_1_*optim*"))
    obstore.delete(user.client, f"run/{lost.as_posix()}")
    assert command("convert", PLACE, tmp_path / "x").code == BROKEN
    assert command("convert", f"parity://{PLACE}", tmp_path / "u").code == 0
    assert command("diff", tmp_path / "u", tmp_path / "run").code == 0
    assert command("copy", PLACE, tmp_path / "copy", "--all").code != 0
    assert command("repair", PLACE).code == 0
    assert command("copy", PLACE, tmp_path / "copy", "--all").code == 0
    assert not ckpt.repair(tmp_path / "copy", dry_run=True, resources=TWO).damaged


@pytest.mark.slow
def test_kills_in_a_bucket_leave_parity_absent_or_whole_and_each_object_damaged_or_whole(
    user: StoreServer, tmp_path: Path
) -> None:
    fill(tmp_path / "run", {name: os.urandom(2 * MIB) for name in "xyz"})
    user.put("run", tmp_path / "run")
    ckpt.protect(PLACE, 1, resources=TWO)
    whole = objects_below(user, "run")
    processes = forking("object_stores")
    with killing(user) as killer:

        def run(name: str, at: int = -1) -> list[int]:
            """Do this, killed at a request; the numbers of all requests that put an object of the checkpoint."""
            killer.expect(at=at)
            process = start(processes, user, protect_or_repair, name, killer=killer)
            process.join(60)
            assert process.exitcode == (0 if at < 0 else -9), killer.seen
            puts = (number for number, one in enumerate(killer.seen) if one.startswith("PUT") and ".lock" not in one)
            return list(puts)

        first, *_, last = run("protect")
        for at in (first + 1, last):
            run("protect", at)
            assert ".ckpt-parity/manifest" not in objects_below(user, "run")
            ckpt.protect(PLACE, 1, resources=TWO)
            assert objects_below(user, "run") == whole
        damage(user, flipped="x")
        damaged = objects_below(user, "run")
        (only,) = run("repair")
        assert objects_below(user, "run") == whole
        damage(user, flipped="x")
        run("repair", only)
        left = objects_below(user, "run")
        assert {one: left[one] for one in damaged} == damaged
        assert not ckpt.repair(PLACE, resources=TWO).unrepairable
        assert objects_below(user, "run") == whole


@pytest.mark.slow
def test_a_lost_object_of_a_chain_in_a_bucket_is_repaired(user: StoreServer) -> None:
    user.put("run", SAMPLES / "universal-1-delta")
    assert command("protect", PLACE, "--lose", 1).code == 0
    whole = objects_below(user, "run")
    obstore.delete(user.client, f"run/{next(name for name in whole if name.endswith('/packs/00000.safetensors'))}")
    assert command("verify", PLACE).code == BROKEN
    repaired = command("repair", PLACE)
    assert repaired.code == 0, repaired.err
    assert objects_below(user, "run") == whole


CHAIN = f"s3://{BUCKET}/run.chain"


def state(step: int) -> Checkpoint:
    values = np.random.default_rng(step).standard_normal(3000).astype(np.float32)
    return checkpoint([parameter("w", {"master": values}, step=step)], origin=Origin("held", None, step))


@pytest.mark.slow
def test_states_of_a_chain_in_a_bucket_share_parity_in_groups(
    user: StoreServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "GROUP", 2)

    def damaged() -> list[str]:
        return sorted({Path(str(one.path)).name for one in ckpt.repair(CHAIN, dry_run=True, resources=TWO).damaged})

    for step in range(1, 5):
        ckpt.save(state(step), tmp_path / str(step))
        before = objects_below(user, "run.chain/.ckpt-parity")
        options = ("--protect", 1) if step == 1 else ()
        assert command("append", CHAIN, tmp_path / str(step), "--base-every", 1, *options).code == 0
        assert damaged() == []
    whole = objects_below(user, "run.chain")
    assert {name.partition("/")[2] for name in before} >= {"group-000", "group-001"}
    lost = [name for name in whole if name.startswith(("step-0000000002/", "step-0000000003/"))]
    for name in lost:
        obstore.delete(user.client, f"run.chain/{name}")
    verified = command("verify", CHAIN, "--json")
    assert (verified.code, len(json.loads(verified.out)["parity"]["damaged"])) == (BROKEN, len(lost))
    assert command("repair", CHAIN).code == 0
    assert objects_below(user, "run.chain") == whole

    for name, data in before.items():  # as an append leaves it that is killed before it puts the manifest
        if name.endswith("manifest"):
            obstore.put(user.client, f"run.chain/.ckpt-parity/{name}", data)
    assert command("protect", CHAIN, "--by", "state", "--lose", 1).code == 0
    assert objects_below(user, "run.chain") == whole

    assert command("compact", CHAIN, "--keep", "3,4").code == 0  # the first group ends, and others get its number
    assert damaged() == []
    names = {name.partition("/")[0] for name in find_parity(source_path(CHAIN)).manifest.lengths}
    assert names == {"step-0000000003", "step-0000000004"}
    assert command("verify", CHAIN).code == 0


@pytest.mark.slow
def test_repair_names_the_head_in_a_bucket_in_which_a_step_was_published_since(user: StoreServer) -> None:
    publish(target_path(PLACE), [1])
    ckpt.protect(PLACE, 1, resources=TWO)
    publish(target_path(PLACE), [1, 2])
    later = objects_below(user, "run")
    done = command("repair", PLACE)
    assert (done.code, f"as they are: {HEAD};" in done.err) == (0, True), done.err
    assert objects_below(user, "run") == later


@pytest.mark.slow
def test_commands_protect_what_they_write_into_a_bucket(user: StoreServer, tmp_path: Path) -> None:
    for arguments in (
        ("convert", SAMPLES / "deepspeed-0.19-zero1-bf16-dp2", f"s3://{BUCKET}/a"),
        ("copy", f"s3://{BUCKET}/a", f"s3://{BUCKET}/b"),
        ("append", f"s3://{BUCKET}/d.family", f"s3://{BUCKET}/a", "--family"),
    ):
        done = command(*arguments, "--protect", 1)
        assert done.code == 0, done.err
        target = arguments[1] if arguments[0] == "append" else arguments[2]
        verified = json.loads(command("verify", target, "--json").out)
        assert (verified["ok"], verified["parity"]["ok"]) == (True, True)
        assert verified["parity"]["nbytes"] > 0
    for arguments in (
        ("convert", f"s3://{BUCKET}/a", f"s3://{BUCKET}/c.safetensors"),
        ("copy", tmp_path / "one.ucp", f"s3://{BUCKET}/c"),
    ):
        (tmp_path / "one.ucp").touch()
        refused = command(*arguments, "--protect", 1)
        assert (refused.code, "single object" in refused.err) == (2, True)
    user.put("c", tmp_path / "one.ucp")
    assert "single object" in command("protect", f"s3://{BUCKET}/c").err
