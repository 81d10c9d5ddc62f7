"""States of a chain share parity in groups: others are not read when one joins, and damage is never protected."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

import ckpt
from ckpt.chains.append import append
from ckpt.chains.write import DeltaPolicy
from ckpt.pipeline import Execution, Resources
from ckpt.protection.members import protect_members
from ckpt_formats.core.checkpoint import Checkpoint, Origin
from ckpt_formats.core.files import Reader
from ckpt_formats.parity.blocks import find_parity
from damage import BROKEN
from damage import ckpt as command
from held import checkpoint, parameter
from protect_campaign import contents_of

ONE = Execution(workers=1)
FULL = 16


def state(step: int, elements: int = 3000) -> Checkpoint:
    values = np.random.default_rng(step).standard_normal(elements).astype(np.float32)
    return checkpoint([parameter("w", {"master": values}, step=step)], origin=Origin("held", None, step))


def nbytes_below(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """A chain of 4 small states that share parity."""
    run = tmp_path / "run.chain"
    for step in range(1, 5):
        append(run, state(step), None, DeltaPolicy(), ONE)
        protect_members(run, 2, [f"step-{step:010}"], resources=ONE)
    return run


@pytest.mark.slow
def test_states_that_join_one_by_one_have_the_parity_of_all_and_no_state_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, anew, read = tmp_path / "run.chain", tmp_path / "anew.chain", list[str]()
    opened = Reader.opened
    monkeypatch.setattr(Reader, "opened", lambda self, path: (read.append(path.parent.name), opened(self, path))[1])
    for step in range(1, FULL + 4):
        append(run, state(step, 3000 + 1000 * (step % 3)), None, DeltaPolicy(base_every=1), ONE)
        read.clear()
        protect_members(run, 2, [f"step-{step:010}"], resources=ONE)
        assert {name for name in read if name.startswith("step-")} == {f"step-{step:010}"}
    shutil.copytree(run, anew, ignore=shutil.ignore_patterns(".ckpt-parity"))
    protect_members(anew, 2, resources=ONE)
    assert contents_of(anew) == contents_of(run)

    parity = find_parity(run).manifest
    assert [sum(bool(one.files) for one in group.domains) for group in parity.groups] == [FULL, 3]
    largest = max(nbytes_below(run / name) for name in os.listdir(run) if name.startswith("step-"))
    assert parity.parity_nbytes <= 2 * 2 * largest < parity.nbytes / 4


@pytest.mark.slow
def test_any_two_states_that_are_lost_are_repaired_and_three_are_named(chain: Path) -> None:
    whole = contents_of(chain)
    for steps, code in (((1, 3), 0), ((2, 3, 4), BROKEN)):
        for step in steps:
            shutil.rmtree(chain / f"step-{step:010}")
        assert command("verify", chain).code == BROKEN
        assert command("repair", chain).code == code
        assert (contents_of(chain) == whole) == (code == 0)


@pytest.mark.slow
def test_a_state_of_a_damaged_chain_is_read_through_its_parity(chain: Path) -> None:
    ckpt.save(ckpt.open(f"{chain}@4"), chain.with_name("whole"))
    append(chain, state(5), None, DeltaPolicy(), ONE)  # without parity
    for step in (1, 3):
        shutil.rmtree(chain / f"step-{step:010}")
    for name in (f"{chain.name}@4", f"{chain.name}/step-0000000004"):
        ckpt.save(ckpt.open(f"parity://{chain.parent}/{name}"), chain.with_name("out"), overwrite=True)
        assert command("diff", chain.with_name("out"), chain.with_name("whole")).code == 0
    assert command("convert", f"parity://{chain}@5", chain.with_name("last")).code == 0
    for target in (chain, chain / "step-0000000004"):
        refused = command("convert", f"parity://{chain}@4", target, "--overwrite")
        assert (refused.code, "fault" in refused.err) == (30, False)


@pytest.mark.slow
def test_compact_leaves_parity_of_the_states_that_stay(chain: Path) -> None:
    assert command("compact", chain, "--keep", "last:2").code == 0
    names = {name.partition("/")[0] for name in find_parity(chain).manifest.lengths}
    assert names == {path.name for path in chain.iterdir() if path.name.startswith("step-")}
    assert not ckpt.repair(chain, dry_run=True, resources=Resources(workers=1)).damaged
    whole = contents_of(chain)
    shutil.rmtree(chain / "step-0000000004")
    assert command("repair", chain).code == 0
    assert contents_of(chain) == whole


@pytest.mark.slow
@pytest.mark.parametrize("is_computed_anew", [False, True])
def test_a_state_that_is_damaged_is_not_protected_as_it_is(chain: Path, is_computed_anew: bool) -> None:
    damaged = max((chain / "step-0000000002").rglob("*"), key=lambda path: path.stat().st_size)
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-3] + b"abc")
    if is_computed_anew:  # from the data of the group
        (chain / ".ckpt-parity" / "0" / "group-000").unlink()
    append(chain, state(5), None, DeltaPolicy(base_every=1), ONE)
    if is_computed_anew:
        with pytest.raises(ckpt.CorruptError, match="not what was protected"):
            protect_members(chain, 2, resources=ONE)
    else:
        protect_members(chain, 2, resources=ONE)
        assert len(find_parity(chain).manifest.lengths) > 5
    assert command("repair", chain).code == 0
    assert damaged.read_bytes() == whole


@pytest.mark.slow
def test_append_goes_on_with_groups_and_refuses_parity_of_another_kind(tmp_path: Path) -> None:
    run = tmp_path / "run.chain"
    for step in (1, 2):
        ckpt.save(state(step), tmp_path / str(step))
    assert command("append", run, tmp_path / "1", "--protect", 1).code == 0
    assert command("append", run, tmp_path / "2").code == 0
    assert len(list(find_parity(run).manifest.groups[0].domains)) == FULL
    assert {name[:15] for name in find_parity(run).manifest.lengths} == {"step-0000000001", "step-0000000002"}
    report = command("doctor", run).out
    assert "without parity" not in report
    shutil.rmtree(run / ".ckpt-parity")
    assert f"ckpt protect '{run}' --by state" in command("doctor", run).out
    ckpt.protect(run, 1)
    with pytest.raises(ckpt.CkptError, match="another kind"):
        protect_members(run, 1)


@pytest.mark.slow
def test_repair_sets_no_chain_back_that_was_changed_since_it_was_protected(chain: Path) -> None:
    before = contents_of(chain)
    opened = ckpt.Chain(chain)
    opened.compact(ckpt.Retention(upto=3))
    opened.append(state(4, 3500), step=4, policy=DeltaPolicy(base_every=1))  # another state, in a folder of that name
    whole = contents_of(chain)
    assert whole["step-0000000004/manifest.json"] != before["step-0000000004/manifest.json"]
    for arguments in (("repair",), ("repair", "--dry-run"), ("verify",)):
        refused = command(*arguments, chain)
        assert refused.code == BROKEN
        assert "--by state" in refused.err
    assert contents_of(chain) == whole
    report = json.loads(command("doctor", chain, "--json").out)["parity"][0]
    assert {name[:15] for name in report["unprotected"]} == {"step-0000000004"}
    assert command("protect", chain, "--by", "state").code == 0
    shutil.rmtree(chain / "step-0000000004")
    assert command("repair", chain).code == 0
    assert not ckpt.repair(chain, dry_run=True, resources=Resources(workers=1)).damaged
    assert {name: data for name, data in contents_of(chain).items() if name in whole and "parity" not in name} == {
        name: data for name, data in whole.items() if "parity" not in name
    }

    assert command("protect", chain, "--overwrite").code == 0  # the chain as a whole, with its list
    (chain / ".ckpt-parity" / "0" / "group-000").unlink()
    append(chain, state(5), None, DeltaPolicy(base_every=1), ONE)
    assert command("repair", chain).code == BROKEN
    assert [member.step for member in ckpt.Chain(chain).index.members][-1] == 5
    assert command("protect", chain, "--by", "state", "--overwrite").code == 0
    assert "step-0000000005" in {domain.name for domain in find_parity(chain).manifest.groups[0].domains}


@pytest.mark.slow
def test_compact_removes_nothing_that_the_repair_of_others_needs(tmp_path: Path) -> None:
    run = tmp_path / "run.chain"
    for step in range(1, 5):
        append(run, state(step, 3000 if step > 1 else 300_000), None, DeltaPolicy(base_every=1), ONE)
    protect_members(run, 2, resources=ONE)
    damaged = max((run / "step-0000000004").rglob("*"), key=lambda path: path.stat().st_size)
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-3] + b"abc")
    assert command("compact", run, "--keep", "last:1").code == 0
    assert command("repair", run).code == 0
    assert damaged.read_bytes() == whole
    protected = find_parity(run).manifest
    assert {name.partition("/")[0] for name in protected.lengths} == {"step-0000000004"}
    assert protected.parity_nbytes < 2 * 2 * nbytes_below(run / "step-0000000004")


@pytest.mark.slow
def test_states_that_a_killed_append_left_join_with_the_next_one(chain: Path) -> None:
    append(chain, state(5), None, DeltaPolicy(), ONE)
    append(chain, state(6), None, DeltaPolicy(), ONE)
    protect_members(chain, 2, ["step-0000000006"], resources=ONE)
    assert {"step-0000000005", "step-0000000006"} <= {name[:15] for name in find_parity(chain).manifest.lengths}
    assert not ckpt.repair(chain, dry_run=True, resources=Resources(workers=1)).damaged
