"""States that did not change since the last base of a chain are not stored again: their rows name its packs."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from ckpt.chains.append import append
from ckpt.chains.compact import Retention, compact
from ckpt.chains.trials import Evaluation
from ckpt.chains.verify import ChainReport, verify_chain
from ckpt.chains.write import DeltaPolicy
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.folder_place import FolderPlace
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal, manifest, unchanged
from ckpt_formats.universal.chain import chain_file, folder
from damage import ckpt
from forged import Change, Forged, forge, number, put, signed
from held import checkpoint, contents, flip, parameter
from page_codecs import decode, decode_delta
from universal_decoder import ChainReader, UniversalDecoder

TWO = Execution(workers=2)
BASES = DeltaPolicy(base_every=1)
FROZEN = 9
"""Of ten matrices, so many do not change."""


def run_of(steps: int, thaw: int | None = None) -> Iterator[Checkpoint]:
    """A fine-tuning: one matrix is trained, nine are frozen. From step `thaw` on, one of these changes."""
    random = np.random.default_rng(0)
    still = [random.standard_normal((200, 300)).astype(DTYPES["bfloat16"]) for _ in range(FROZEN)]
    w, m = (random.standard_normal((200, 300)).astype(np.float32) for _ in range(2))
    tiny = random.standard_normal(8).astype(np.float32)
    for step in range(1, steps + 1):
        m = m * np.float32(0.9) + random.standard_normal(m.shape).astype(np.float32)
        w = w - np.float32(1e-4) * m
        if thaw is not None and step >= thaw:
            still[0] = still[0] + DTYPES["bfloat16"].type(1)
        parameters = [parameter(f"still{i}", {"model": values}, "frozen") for i, values in enumerate(still)]
        trained = parameter("w", {"master": w, "model": w.astype(DTYPES["bfloat16"]), "exp_avg": m})
        bias = parameter("bias", {"master": tiny, "model": tiny.astype(DTYPES["bfloat16"])})
        yield checkpoint([*parameters, trained, bias], (Group({}, ("w",)),), origin=Origin("held", None, step))


def chain_of(run: Path, steps: int, policy: DeltaPolicy = BASES, thaw: int | None = None) -> list[Checkpoint]:
    states = list(run_of(steps, thaw))
    for state in states:
        append(run, state, None, policy, TWO)
    return states


def member(run: Path, step: int) -> Path:
    return run / next(one.folder for one in chain_file.read(run).members if one.step == step)


def size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def assert_states(run: Path, states: list[Checkpoint]) -> None:
    for state in states:
        assert contents(open_checkpoint(Path(f"{run}@{state.step}"))) == contents(state)
    report = verify_chain(run, TWO)
    assert (report.findings, report.bad_steps) == ((), ())


def what(report: ChainReport) -> str:
    return "; ".join(f"{one.what} @ {one.where}" for one in report.findings)


def test_a_base_of_which_most_did_not_change_has_only_what_did(tmp_path: Path) -> None:
    states = chain_of(tmp_path / "run", 4)
    first, *others = (member(tmp_path / "run", step) for step in (1, 2, 3, 4))
    trained = 2 * 4 * 60_000
    for base in others:
        stated = manifest.load(base / "manifest.json")
        assert size(base) < trained + 16_384  # the first has nine more matrices
        assert {pack.owner.folder for pack in stated.packs if pack.owner is not None} == {first.name}
    shared = [one.shared_nbytes for one in chain_file.read(tmp_path / "run").members]
    assert shared[0] == 0
    assert min(shared[1:]) > FROZEN * 60_000
    assert_states(tmp_path / "run", states)


def test_a_row_names_the_pack_where_the_bytes_are_not_the_member_before(tmp_path: Path) -> None:
    states = chain_of(tmp_path / "run", 5, thaw=4)
    members = chain_file.read(tmp_path / "run").members
    assert [[one.folder for one in reader.shared] for reader in members] == [[], *[[members[0].folder]] * 4]
    assert [one.kind for one in members] == ["base"] * 5
    assert members[3].shared_nbytes < members[2].shared_nbytes  # one matrix changed
    assert_states(tmp_path / "run", states)


def test_parameters_that_did_not_change_are_in_no_delta(tmp_path: Path) -> None:
    states = chain_of(tmp_path / "run", 4, DeltaPolicy(), thaw=3)
    members = chain_file.read(tmp_path / "run").members
    assert [one.kind for one in members] == ["base", "delta", "delta", "delta"]
    for one in members[1:]:
        entries = manifest.load(tmp_path / "run" / one.folder / "manifest.json").entries
        assert {entry.name for entry in entries if entry.delta} - {"still0"} == {"w"}
    assert_states(tmp_path / "run", states)


def test_append_opens_no_base_after_a_delta_that_shares_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = list(run_of(4))
    trained = [
        checkpoint([state.parameters["w"]], state.groups, origin=state.origin) for state in states
    ]  # all of it changes with each step
    loaded: list[Path] = []
    load = manifest.load
    monkeypatch.setattr(manifest, "load", lambda path: (loaded.append(path), load(path))[1])
    for state in trained:
        loaded.clear()
        append(tmp_path / "run", state, None, DeltaPolicy(), TWO)
    assert sum(path.parent.name == "step-0000000001" for path in loaded) <= 1  # as the replay's base


def test_a_trial_of_a_bound_and_a_copy_elsewhere_have_all_values(tmp_path: Path) -> None:
    first, second = run_of(2)
    append(tmp_path / "run", first, None, BASES, TWO)
    evaluation = Evaluation((sys.executable, "-c", "print(1.0)", "{}"), 0.5)
    policy = DeltaPolicy(codec="subspace", evaluation=evaluation)
    written = append(tmp_path / "run", second, None, policy, TWO)
    assert written.accepted is not None
    assert written.member.shared
    save(open_checkpoint(tmp_path / "run" / written.member.folder), tmp_path / "copy", Universal(), resources=TWO)
    shutil.rmtree(tmp_path / "run")
    copied = contents(open_checkpoint(tmp_path / "copy"))
    assert {key: copied[key] for key in copied if key[0].startswith("still")} == {
        key: values for key, values in contents(second).items() if key[0].startswith("still")
    }


@pytest.mark.parametrize("check", [True, False])
def test_equal_hashes_alone_are_not_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, check: bool) -> None:
    """Whoever computes values on purpose finds two with one XXH3: then bits decide, unless checks are off."""
    first, second = (run for run in run_of(2, thaw=2))
    append(tmp_path / "run", first, None, BASES, TWO)
    monkeypatch.setattr(unchanged, "is_digest", lambda values, digests, index: True)
    policy = DeltaPolicy(base_every=1, check=check)
    append(tmp_path / "run", second, None, policy, TWO)
    monkeypatch.undo()
    opened = open_checkpoint(member(tmp_path / "run", 2))
    assert (contents(opened) == contents(second)) == check


def test_small_states_alone_are_stored_again(tmp_path: Path) -> None:
    """A pack of another member is opened only for what is worth it."""
    for state in run_of(2):
        small = [state.parameters["bias"], state.parameters["w"]]
        append(tmp_path / "run", checkpoint(small, state.groups, origin=state.origin), None, BASES, TWO)
    assert not chain_file.read(tmp_path / "run").members[1].shared


def test_a_chain_without_equal_states_names_no_packs(tmp_path: Path) -> None:
    for state in run_of(2):
        only = checkpoint([state.parameters["w"]], state.groups, origin=state.origin)
        append(tmp_path / "run", only, None, BASES, TWO)
    assert "shared" not in (tmp_path / "run/chain.json").read_text()
    fields = json.loads((member(tmp_path / "run", 2) / "manifest.json").read_bytes())
    assert [len(pack) for pack in fields["packs"]] == [3]


@pytest.mark.parametrize("check", [True, False])
def test_damaged_packs_are_not_named_unless_checks_are_off(tmp_path: Path, check: bool) -> None:
    """With the checks, what is named was read and compared: a new base does not trust old bytes."""
    first, second = run_of(2)
    append(tmp_path / "run", first, None, BASES, TWO)
    base = member(tmp_path / "run", 1)
    entry = manifest.load(base / "manifest.json").entries[0]
    extent = entry.states["model"].extent
    assert (entry.name, extent is not None) == ("still0", True)
    flip(base / manifest.pack_file(0), extent.offset + 10)
    append(tmp_path / "run", second, None, DeltaPolicy(base_every=1, check=check), TWO)
    report = verify_chain(tmp_path / "run", TWO)
    assert report.bad_steps == (1, 2)  # of the pack, other states are shared
    opened = open_checkpoint(member(tmp_path / "run", 2))
    if check:
        assert contents(opened) == contents(second)
    else:
        with pytest.raises(CorruptError, match="still0/model"):
            contents(opened)


def test_a_base_that_cannot_be_opened_is_told_and_shares_nothing(tmp_path: Path) -> None:
    first, second = run_of(2)
    append(tmp_path / "run", first, None, BASES, TWO)
    (member(tmp_path / "run", 1) / "index.safetensors").unlink()
    written = append(tmp_path / "run", second, None, BASES, TWO)
    assert "no states are shared with step 1" in str(written.notes[0])
    assert not written.member.shared
    assert contents(open_checkpoint(member(tmp_path / "run", 2))) == contents(second)


def test_damage_is_found_from_the_member_that_names_the_pack(tmp_path: Path) -> None:
    chain_of(tmp_path / "run", 2)
    base, user = (member(tmp_path / "run", step) for step in (1, 2))
    extent = manifest.load(base / "manifest.json").entries[3].states["model"].extent
    assert extent is not None
    pack = base / manifest.pack_file(extent.pack)
    flip(pack, extent.offset + 5)
    ran = ckpt("verify", user, "--json")
    assert ran.code == 20
    assert "still3/model" in ran.out
    assert str(pack) in ran.out
    report = verify_chain(tmp_path / "run", TWO)
    assert (what(report).count("still3/model"), report.bad_steps) == (1, (1, 2))


def test_verify_reads_each_shared_pack_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain_of(tmp_path / "run", 4)
    pack, nbytes = member(tmp_path / "run", 1) / manifest.pack_file(0), 0
    read = Reader.read_into

    def counted(reader: Reader, path: Path, offset: int, out: memoryview) -> object:
        nonlocal nbytes
        nbytes += len(out) if path == pack else 0
        return read(reader, path, offset, out)

    monkeypatch.setattr(Reader, "read_into", counted)
    assert not verify_chain(tmp_path / "run", TWO).findings
    assert nbytes <= 2.1 * pack.stat().st_size  # checksums of what is stored, and the values, decoded


def test_a_missing_pack_names_member_parameter_state_and_what_to_do(tmp_path: Path) -> None:
    chain_of(tmp_path / "run", 2)
    shutil.copytree(member(tmp_path / "run", 2), tmp_path / "alone")
    with pytest.raises(
        IncompleteError, match=r"`still0` model of alone is in a pack of step-0000000001.*missing"
    ) as error:
        open_checkpoint(tmp_path / "alone")
    assert error.value.hint is not None
    assert "Copy the whole chain" in error.value.hint
    (member(tmp_path / "run", 1) / manifest.pack_file(0)).unlink()
    assert verify_chain(tmp_path / "run", TWO).bad_steps == (1, 2)


def test_a_chain_moved_or_reached_by_links_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = chain_of(tmp_path / "old", 2)
    shutil.move(tmp_path / "old", tmp_path / "new")
    (tmp_path / "link").symlink_to(member(tmp_path / "new", 2))
    assert contents(open_checkpoint(tmp_path / "link")) == contents(states[1])
    monkeypatch.chdir(member(tmp_path / "new", 2))
    assert contents(open_checkpoint(Path("."))) == contents(states[1])


@pytest.mark.parametrize("keep", ["last:1", "2,4", "3,4"])
def test_compact_keeps_the_packs_that_are_named(tmp_path: Path, keep: str) -> None:
    run = tmp_path / "run"
    states = chain_of(run, 4)
    before = size(run)
    result = compact(run, Retention((keep,)), DeltaPolicy(), TWO)
    left = {one.step for one in chain_file.read(run).members}
    assert_states(run, [state for state in states if state.step in left])
    assert os.listdir(run / "step-0000000001") == ["packs"]
    assert before - size(run) == pytest.approx(result.freed, abs=4096)  # chain.json
    assert result.packs_nbytes == (0, size(run / "step-0000000001"))
    assert folder.leftovers(run, chain_file.read(run)) == []
    # Later appends and another compact leave the packs alone, until nobody needs them.
    later = next(iter(list(run_of(5))[4:]))
    assert not append(run, later, None, BASES, TWO).notes
    assert_states(run, [later])


def test_packs_that_nobody_names_any_more_are_removed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    chain_of(run, 2)
    compact(run, Retention(("last:1",)), DeltaPolicy(), TWO)
    changed = [parameter("w", {"master": np.arange(9, dtype=np.float32)})]
    append(run, checkpoint(changed, origin=Origin("held", None, 3)), None, BASES, TWO)
    compact(run, Retention(("last:1",)), DeltaPolicy(), TWO)
    assert [path.name for path in sorted(run.glob("step-*"))] == ["step-0000000003"]


def test_a_delta_that_becomes_a_base_names_the_packs_that_it_named(tmp_path: Path) -> None:
    run = tmp_path / "run"
    states = chain_of(run, 4, DeltaPolicy())
    compact(run, Retention(("3,4",)), DeltaPolicy(), TWO)
    members = chain_file.read(run).members
    assert [(one.kind, one.folder, len(one.shared)) for one in members] == [
        ("base", "step-0000000003.1", 1),
        ("delta", "step-0000000004", 1),
    ]
    assert_states(run, states[2:])


@pytest.mark.parametrize("policy", [BASES, DeltaPolicy()], ids=["bases", "deltas"])
def test_the_reader_of_the_page_reads_the_same(tmp_path: Path, policy: DeltaPolicy) -> None:
    run = tmp_path / "run"
    states = chain_of(run, 3, policy)
    if policy is BASES:
        compact(run, Retention(("2,3",)), DeltaPolicy(), TWO)
    chain = ChainReader(run, decode, decode_delta)
    assert any(member.get("shared") for member in chain.members)
    for state in states[1:]:
        decoded = chain.checkpoints[state.step]
        expected = {key: values for key, (_, _, values) in contents(state).items()}
        assert {(name, key): decoded.values(name, to_stored(key)) for name, key in expected} == expected


class Stop(BaseException):
    """A kill."""


KILLED: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "before the list": lambda patch: patch.setattr(FolderPlace, "replace", _stop),
    "after the list": lambda patch: patch.setattr(
        FolderPlace, "remove", lambda place, names, first: _stop() if names else None
    ),
}


def _stop(*ignored: object) -> None:
    raise Stop


@pytest.mark.parametrize("when", KILLED)
def test_killed_between_steps_a_chain_is_whole(tmp_path: Path, when: str) -> None:
    run = tmp_path / "run"
    states = chain_of(run, 3)
    with pytest.MonkeyPatch.context() as patch:
        KILLED[when](patch)
        with pytest.raises(Stop):
            compact(run, Retention(("last:1",)), DeltaPolicy(), TWO)
    left = {one.step for one in chain_file.read(run).members}
    assert left == ({1, 2, 3} if when == "before the list" else {3})
    assert_states(run, [state for state in states if state.step in left])
    compact(run, Retention(("last:1",)), DeltaPolicy(), TWO)
    assert os.listdir(run / "step-0000000001") == ["packs"]
    assert_states(run, states[2:])


def test_killed_while_packs_are_removed_the_rest_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    states = chain_of(run, 3)
    unlink, done = Path.unlink, 0

    def once(path: Path, missing_ok: bool = False) -> None:
        nonlocal done
        done += 1
        if done > 2:
            raise Stop
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", once)
    with pytest.raises(Stop):
        compact(run, Retention(("last:1",)), DeltaPolicy(), TWO)
    monkeypatch.undo()
    assert_states(run, states[2:])
    later = next(iter(list(run_of(4))[3:]))
    append(run, later, None, BASES, TWO)
    assert os.listdir(run / "step-0000000001") == ["packs"]
    assert_states(run, [states[2], later])


def test_an_interrupted_append_goes_on_and_writes_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("whole", "cut"):
        chain_of(tmp_path / name, 1)
    second = list(run_of(2))[1]
    append(tmp_path / "whole", second, None, BASES, TWO)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt_formats.universal.format.with_packs", _stop)
        with pytest.raises(Stop):
            append(tmp_path / "cut", second, None, BASES, TWO)
    assert append(tmp_path / "cut", second, None, BASES, TWO).result.resumed
    whole, cut = (tmp_path / name / "step-0000000002" for name in ("whole", "cut"))
    for path in sorted(whole.rglob("*")):
        assert path.is_dir() or path.read_bytes() == (cut / path.relative_to(whole)).read_bytes()


def owner(**fields: object) -> Change:
    """Change the row of the manifest's list of packs that names a pack of another member."""
    places = {"nbytes": 0, "header": 1, "folder": 3, "number": 4}
    return put("packs", 1, places[next(iter(fields))], value=next(iter(fields.values())))


HOSTILE: dict[str, tuple[Change, str]] = {
    "a path": (owner(folder="../step-0000000001"), "not a member of a chain"),
    "an absolute path": (owner(folder="/step-0000000001"), "not a member of a chain"),
    "an empty name": (owner(folder=""), "not a member of a chain"),
    "a name with a line feed": (owner(folder="step-0000000001\n"), "not a member of a chain"),
    "digits of another script": (
        owner(folder="step-\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0660\u0661"),
        "not a member of a chain",
    ),
    "no text": (owner(folder=1), "not a member of a chain"),
    "itself": (owner(folder="step-0000000002"), "not an earlier member"),
    "itself, written again": (owner(folder="step-0000000002.1"), "not an earlier member"),
    "a later member": (owner(folder="step-0000000003"), "not an earlier member"),
    "a number that is none": (owner(number=-1), "the number of a pack"),
    "a number that is too large": (owner(number=1 << 40), "the number of a pack"),
    "four fields": (put("packs", 1, value=[4096, 4096, "xxh3-128:" + "0" * 32, "step-0000000001"]), "packs: an item"),
    "a member that is not there": (owner(folder="step-0000000000"), "missing"),
    "a pack that is not there": (owner(number=7), "missing"),
    "another length": (owner(nbytes=1 << 30), "the manifest says"),
    "a state beyond the end": (number("state.offset", ("still1", "param"), 1 << 62), "overlaps another"),
    "an offset that overflows": (number("state.offset", ("still1", "param"), (1 << 64) - 8), "overlaps another"),
    "a state in the header": (number("state.offset", ("still1", "param"), 8), "overlaps another"),
    "a pack that does not exist": (number("state.pack", ("still1", "param"), 2), "the number of a pack"),
}


@pytest.fixture(scope="module")
def forgeable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("forgeable") / "run"
    chain_of(run, 2)
    return run


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused(forgeable: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(forgeable, tmp_path / "run")
    change, message = HOSTILE[name]
    user = member(tmp_path / "run", 2)
    forge(user, change)
    with pytest.raises(CkptError, match=message):
        open_checkpoint(user)
    with pytest.raises((AssertionError, LookupError, ValueError, OSError, TypeError)):
        UniversalDecoder(user, decode, decode_delta)


def test_states_in_a_pack_of_another_member_may_not_overlap(forgeable: Path, tmp_path: Path) -> None:
    """Else a small file could claim to be any number of large ones."""
    shutil.copytree(forgeable, tmp_path / "run")

    def overlapping(forged: Forged) -> None:
        rows = [forged.row(f"still{i}", "param") for i in (1, 2)]
        forged.columns["state.offset"][rows[1]] = forged.columns["state.offset"][rows[0]]

    forge(member(tmp_path / "run", 2), overlapping)
    with pytest.raises(CorruptError, match="overlaps another"):
        open_checkpoint(member(tmp_path / "run", 2))


def test_a_range_that_the_owner_does_not_have_is_compared(forgeable: Path, tmp_path: Path) -> None:
    """A member that states other checksums for shared bytes is found, although its owner is whole."""
    shutil.copytree(forgeable, tmp_path / "run")
    forge(member(tmp_path / "run", 2), put("packs", 1, 2, value="xxh3-128:" + "0" * 32))
    assert "header of pack 0" in what(verify_chain(tmp_path / "run", TWO))


@pytest.mark.parametrize(
    "shared",
    [
        [{"folder": "../x", "packs": [[0, 1]], "nbytes": 1}],
        [{"folder": "step-0000000002", "packs": [[0, 1]], "nbytes": 1}],
        [{"folder": "step-0000000001", "packs": [], "nbytes": 1}],
        [{"folder": "step-0000000001", "packs": [[3, 1], [0, 1]], "nbytes": 1}],
        [{"folder": "step-0000000001", "packs": [[0, 1 << 40]], "nbytes": 1}],
        [{"folder": "step-0000000001", "packs": [[0, 1]], "nbytes": -1}],
        [{"folder": "step-0000000001", "packs": [[0, 1]], "nbytes": 1}] * 2,
    ],
)
def test_a_hostile_list_is_refused(forgeable: Path, tmp_path: Path, shared: object) -> None:
    fields = json.loads((forgeable / "chain.json").read_bytes())
    fields["members"][1]["shared"] = shared
    (tmp_path / "chain.json").write_bytes(signed(fields))
    with pytest.raises(CorruptError):
        chain_file.load(tmp_path / "chain.json")
