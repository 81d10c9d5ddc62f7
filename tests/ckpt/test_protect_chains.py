"""States of a chain share parity in groups: others are not read when one joins, and damage is never protected."""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ckpt
from ckpt.chains.append import append
from ckpt.chains.write import DeltaPolicy
from ckpt.pipeline import Execution, Resources
from ckpt.protection import members, protect, repair
from ckpt.protection.members import protect_members
from ckpt_formats.core.checkpoint import Checkpoint, Origin
from ckpt_formats.core.files import Reader
from ckpt_formats.parity.blocks import find_parity, has_parity, parity_folder
from ckpt_formats.parity.copies import manifest_copies
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.published.records import HEAD
from damage import BROKEN
from damage import ckpt as command
from gradient_logs import small_log
from held import checkpoint, contents, flip, parameter
from protect_campaign import contents_of
from published_ranks import publish

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

    next(one for one in manifest_copies([parity_folder(chain)]) if one.is_file()).unlink()
    protect_members(chain, 2, without=names, resources=ONE)
    assert not parity_folder(chain).exists()


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
def test_repair_of_a_folder_sets_no_chain_in_it_back(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "notes").write_text("mine")
    for step in (1, 2):
        append(run / "run.chain", state(step), None, DeltaPolicy(base_every=1), ONE)
        if step == 1:
            assert command("protect", run).code == 0
    whole = contents_of(run)
    refused = command("repair", run)
    assert (refused.code, "the chain was changed since" in refused.err) == (BROKEN, True), refused
    assert contents_of(run) == whole
    assert command("protect", run, "--overwrite").code == 0
    flip(run / "run.chain" / chain_file.NAME, 60)
    (run / "notes").unlink()
    assert command("repair", run).code == 0
    assert {name: data for name, data in contents_of(run).items() if "parity" not in name} == {
        name: data for name, data in whole.items() if "parity" not in name
    }


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


def frozen_chain(run: Path, steps: int) -> list[Checkpoint]:
    """A chain of bases of which all but the first leave a large matrix, which does not change, in the packs of that."""
    still, states = np.random.default_rng(0).standard_normal((200, 300)).astype(np.float32), list[Checkpoint]()
    for step in range(1, steps + 1):
        values = np.random.default_rng(step).standard_normal(3000).astype(np.float32)
        both = [parameter("still", {"model": still}, "frozen"), parameter("w", {"master": values})]
        states.append(checkpoint(both, origin=Origin("held", None, step)))
        append(run, states[-1], None, DeltaPolicy(base_every=1), ONE)
    return states


def assert_states(run: Path, states: list[Checkpoint]) -> None:
    for one in states:
        assert contents(ckpt.open(f"{run}@{one.step}")) == contents(one)


def list_with_end(run: Path, step: int) -> None:
    """Let the list of a chain state the end of its last segment, as the next segment does."""
    chain = chain_file.read(run)
    segments = (*chain.segments[:-1], replace(chain.segments[-1], step=step))
    (run / chain_file.NAME).write_bytes(chain_file.dump(replace(chain, segments=segments)))


@pytest.mark.slow
@pytest.mark.parametrize("share", [4, 1])
def test_a_lost_segment_of_the_log_is_repaired_and_read_through_parity(
    tmp_path: Path, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "_OWN_SHARE", share)  # with 1, the two ranks of the segment are domains of their own
    run = tmp_path / "run.chain"
    segment = small_log(steps=4, scale=300).write(run)
    list_with_end(run, 3)
    assert f"ckpt protect '{run}' --by state" in command("doctor", run).out
    assert command("protect", run, "--by", "state", "--lose", 1).code == 0
    assert has_parity(segment) == (share == 1)
    assert "without parity" not in command("doctor", run).out
    whole, last = contents_of(run), contents(ckpt.open(f"{run}@3"))
    lost = segment / "rank-00001.ckg"
    for damage in (lost.unlink, lambda: flip(lost, 5000)):
        damage()
        assert command("verify", run).code == BROKEN
        assert contents(ckpt.open(f"parity://{run}@3")) == last
        assert command("repair", segment if share == 1 else run).code == 0
        assert contents_of(run) == whole

    append(run, state(9), None, DeltaPolicy(), ONE)
    assert command("compact", run, "--upto", 3).code == 0  # drops records after the end of the segment
    shorter = lost.stat().st_size
    assert not ckpt.repair(segment if share == 1 else run, dry_run=True, resources=Resources(workers=1)).damaged
    assert command("compact", run, "--upto", 2).code == 0  # shortens its files
    lost.unlink()
    assert command("repair", segment if share == 1 else run).code == 0
    assert command("verify", run).code == 0
    assert lost.stat().st_size < shorter < len(whole[f"{segment.name}/{lost.name}"])


@pytest.mark.slow
def test_a_damaged_segment_is_not_protected_and_one_that_was_is_named_when_it_is_repaired(tmp_path: Path) -> None:
    run = tmp_path / "run.chain"
    segment = small_log(steps=3).write(run)
    whole = contents_of(run)
    flip(segment / "rank-00000.ckg", 1500)
    list_with_end(run, 3)
    refused = command("protect", run, "--by", "state")
    assert (refused.code, "is damaged" in refused.err, has_parity(run)) == (BROKEN, True, False)
    append(run, state(5), None, DeltaPolicy(), ONE)
    assert command("protect", run, "--by", "state").code == BROKEN
    assert {name[:15] for name in find_parity(run).manifest.lengths} == {"step-0000000005"}
    shutil.rmtree(run / ".ckpt-parity")
    assert command("protect", run).code == 0  # files as they are, whatever they have
    (segment / "rank-00001.ckg").unlink()
    assert (command("repair", run).code, contents_of(segment)["rank-00001.ckg"]) == (
        BROKEN,
        whole[f"{segment.name}/rank-00001.ckg"],
    )

    growing = tmp_path / "growing.chain"
    log = small_log(steps=3)
    log.ranks[0].pop()  # its end
    log.write(growing)
    append(growing, state(9), None, DeltaPolicy(), ONE)
    assert "may still grow" in command("protect", growing, "--by", "state").err
    assert {name[:9] for name in find_parity(growing).manifest.lengths} == {"step-0000"}


@pytest.mark.slow
@pytest.mark.slow
def test_a_repair_cuts_off_nothing_that_a_run_recorded_after_its_chain_was_protected(tmp_path: Path) -> None:
    run = tmp_path / "run.chain"
    logs = sorted(small_log(steps=3).write(run).iterdir())
    whole = contents_of(run)
    grown = next(one for one in logs if one.name == "rank-00000.ckg")
    grown.write_bytes(grown.read_bytes()[:-200])
    ckpt.protect(run, 1)
    grown.write_bytes(whole[grown.relative_to(run).as_posix()])
    (run / chain_file.NAME).unlink()
    done = command("repair", run)
    assert (done.code, "that have grown" in done.err) == (0, True), done
    assert contents_of(run).items() >= whole.items()
    verified = command("verify", run, "--json")
    assert (verified.code, json.loads(verified.out)["parity"]["grown"]) == (0, [str(grown)])

    flip(grown, 300)
    flipped = grown.read_bytes()
    refused = command("repair", run)
    assert (refused.code, "a log that goes on, 1 block" in refused.out) == (BROKEN, True), refused
    assert grown.read_bytes() == flipped
    grown.write_bytes(flipped[:-200])
    with (grown.parent / "rank-00001.ckg").open() as writers:
        fcntl.flock(writers, fcntl.LOCK_EX)  # as a run does while it records
        assert command("repair", run).code == BROKEN
    assert grown.read_bytes() == flipped[:-200]
    assert "repaired 1 of 1 file" in command("repair", run).out
    assert grown.read_bytes() == whole[grown.relative_to(run).as_posix()][:-200]
    # Files that have each other's names get them back, also where one is longer.
    other = grown.with_name("rank-00001.ckg")
    grown.write_bytes(whole[grown.relative_to(run).as_posix()])
    ckpt.protect(run, 2, overwrite=True)
    other.rename(run / "aside")
    grown.rename(other)
    (run / "aside").rename(grown)
    assert command("repair", run).code == 0
    assert contents_of(run).items() >= whole.items()


@pytest.mark.slow
def test_repair_leaves_the_head_of_a_published_chain_in_which_steps_were_published_since(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "policy.chain"
    run.parent.mkdir()
    publish(run, [1])
    earlier = (run / HEAD).read_bytes()
    publish(run, [1, 2])
    for folder in (run, run.parent):
        ckpt.protect(folder, 2)
    whole = contents_of(run)
    head, protected = run / HEAD, whole[HEAD]
    share = max((run / "published" / "objects").iterdir(), key=lambda path: path.stat().st_size)
    for step, folder in ((3, run), (4, run.parent)):
        publish(run, [step - 1, step])
        now = head.read_bytes()
        flip(share, 5000)
        done = command("repair", folder, "--json")
        assert (done.code, json.loads(done.out)["grown"]) == (0, [str(head)]), done
        assert head.read_bytes() == now
        assert share.read_bytes() == whole[share.relative_to(run).as_posix()]
        assert ckpt.Chain(run).last == step
    for damaged in (b"", earlier):
        head.write_bytes(damaged)
        assert "repaired 1 of 1 file" in command("repair", run).out
        assert head.read_bytes() == protected
    publish(run, [4, 5])  # it finds the records after the head
    assert ckpt.Chain(run).last == 5
    assert command("verify", run).code == 0


def test_packs_of_removed_states_that_others_need_are_repaired(tmp_path: Path) -> None:
    run = tmp_path / "run.chain"
    states = frozen_chain(run, 3)
    assert command("protect", run, "--by", "state", "--lose", 1).code == 0
    for keep in ("2,3", "3"):
        assert command("compact", run, "--keep", keep).code == 0
        protected = find_parity(run).manifest
        assert set(protected.lengths) == {
            path.relative_to(run).as_posix() for path in run.glob("step-*/**/*") if path.is_file()
        }
        assert "without parity" not in command("doctor", run).out
        whole = contents_of(run)
        shutil.rmtree(run / "step-0000000001")  # only packs that others need are left of it
        assert command("repair", run).code == 0
        assert contents_of(run) == whole
    assert_states(run, states[-1:])
    ckpt.Chain(run).append(states[-1], step=4)
    assert command("protect", run, "--by", "state", "--lose", 1).code == 0
    assert not ckpt.repair(run, dry_run=True, resources=Resources(workers=1)).damaged


@pytest.mark.slow
def test_packs_join_after_a_removal_that_left_the_parity_of_their_state(tmp_path: Path) -> None:
    run = tmp_path / "run.chain"
    states = frozen_chain(run, 3)
    protect_members(run, 1, resources=ONE)
    ckpt.Chain(run).compact(ckpt.Retention(keep=("2,3",)))
    protect_members(run, 1, resources=ONE)
    removed = run / "step-0000000001"
    assert {name for name in find_parity(run).manifest.lengths if name.startswith(removed.name)} == {
        path.relative_to(run).as_posix() for path in removed.rglob("*") if path.is_file()
    }
    whole = contents_of(run)
    shutil.rmtree(removed)
    assert command("repair", run).code == 0
    assert contents_of(run) == whole
    assert_states(run, states[1:])


@pytest.mark.slow
def test_a_repair_takes_the_parity_that_is_there_when_it_holds_the_lock(
    chain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def locked(base: Path, file: Path | None) -> Iterator[None]:
        """Before, let another process end that holds the lock."""
        append(chain, state(5), None, DeltaPolicy(), ONE)
        protect_members(chain, 2, ["step-0000000005"], resources=ONE)
        with protect.locked(base, file):
            yield

    monkeypatch.setattr(repair, "locked", locked)
    assert ckpt.repair(chain).damaged == ()
    (group,) = find_parity(chain).manifest.groups
    assert "step-0000000005" in {domain.name for domain in group.domains}
