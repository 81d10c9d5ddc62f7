"""A shadow follows a log that grows: its state is that of `restore` at each step, and its bases are checked."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt.pipeline import Execution
from ckpt.shadow import turns
from ckpt.shadow.follow import ShadowEvent, follow
from ckpt.shadow.shadow import Shadow
from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.errors import CorruptError, IncompleteError, NotFoundError
from ckpt_formats.core.tensor import ArrayBlob, Tensor
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex
from ckpt_formats.universal.gradients.record import HEAD, Kind, scan
from ckpt_formats.universal.gradients.segment import open_layout, open_segment, rank_file
from damage import SAMPLES, ckpt
from gradient_logs import restored, same, small_log, values_of
from growing_log import State, bits, grow, log_with_fingerprints
from killing import killed, points, spread

GOLDEN = SAMPLES / "recorded-1" / "run.chain"
ONE = Execution(workers=1)


def settle(shadow: Shadow) -> list[tuple[int, State]]:
    """Poll until nothing is left to do; the states on the way, by their steps."""
    states = []
    while True:
        before = shadow.step
        shadow.poll(None if before is None else before + 1)
        if shadow.step is not None and shadow.step != before:
            with shadow.frozen() as checkpoint:
                assert checkpoint.step == shadow.step
                states.append((shadow.step, bits(checkpoint)))
        if not shadow.has_more:
            return states


@pytest.fixture(scope="module")
def golden() -> dict[int, State]:
    """All states of the golden log, which has two ranks, two optimizers, two segments and a base."""
    return {step: bits(restored(GOLDEN, step)) for step in range(7)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of 12 steps with a fingerprint of every third."""
    log_with_fingerprints(12, 3).write(tmp_path / "run.chain")
    return tmp_path / "run.chain"


@pytest.mark.parametrize("seed", range(3))
def test_every_step_of_a_growing_log_is_that_of_restore(seed: int, golden: dict[int, State], tmp_path: Path) -> None:
    shadow = Shadow(tmp_path / "run.chain", resources=Execution(workers=1 + seed % 2))
    seen: list[int] = []
    for _ in grow(GOLDEN, tmp_path / "run.chain", seed):
        for step, state in settle(shadow):
            assert state == bits(restored(tmp_path / "run.chain", step)), step
            assert state.items() >= golden[step].items(), "at the start, states may be zero that no step has changed"
            seen.append(step)
        assert shadow.step in (None, index_last(tmp_path / "run.chain")), "it waits for nothing but the slowest rank"
    assert sorted(set(seen)) == list(range(7))
    assert seen == sorted(seen)
    assert shadow.verified == 6


def index_last(run: Path) -> int | None:
    """The last step that can be restored; None if the start is not there yet."""
    from ckpt_formats.universal.chain import states

    chain = chain_file.load(run / chain_file.NAME)
    return max(states.last_step(run, chain), chain.segments[-1].first) if chain.members or chain.segments else None


def test_all_that_a_step_has_is_that_of_restore(run: Path) -> None:
    shadow = Shadow(run, resources=ONE)
    while shadow.step != 7:
        shadow.poll(upto=7)
    wanted = restored(run, 7)
    with shadow.frozen() as checkpoint:
        assert same(values_of(checkpoint), values_of(wanted))
        assert encode(checkpoint.extras) == encode(wanted.extras)
        assert (checkpoint.groups, checkpoint.aliases, checkpoint.origin) == (
            wanted.groups,
            wanted.aliases,
            wanted.origin,
        )
        assert [p.values for p in checkpoint.parameters.values()] == [p.values for p in wanted.parameters.values()]
        assert checkpoint.notices == wanted.notices


def test_memory_is_the_states_and_the_records_of_a_few_steps(tmp_path: Path) -> None:
    small_log(200).write(tmp_path / "run.chain")
    shadow = Shadow(tmp_path / "run.chain", resources=ONE)
    most = 0
    while shadow.poll() or shadow.has_more:
        assert shadow._state is not None
        tail = shadow._state.tail
        most = max(most, sum(len(one) for of in (tail._pending, tail._applied, tail._states) for one in of))
    assert shadow.step == 200
    assert shadow.status.nbytes == 4 * 3 * (12 + 5 + 12)
    assert most < 300, "of 600 records"


def test_a_state_that_differs_from_the_run_is_never_shown(tmp_path: Path) -> None:
    log = log_with_fingerprints(9, 3)
    digests = next(one for one in log.ranks[1] if one.kind == 6 and one.step == 6).meta["digests"]
    digests["exp_avg"][0] ^= 1
    log.write(tmp_path / "run.chain")
    shadow = Shadow(tmp_path / "run.chain", resources=ONE)
    with pytest.raises(CorruptError, match="step 6: 'exp_avg' of `w`"):
        settle(shadow)
    for read in (shadow.poll, lambda: shadow.frozen().__enter__()):
        with pytest.raises(CorruptError, match="step 6"):
            read()
    assert ckpt("shadow", tmp_path / "run.chain", "--once").code == 20


@pytest.mark.parametrize(("rank", "kind"), [(1, Kind.GRADIENTS), (0, Kind.NOTES)])
def test_damage_in_the_log_ends_the_steps_before_it_and_is_named_until_a_repair(
    rank: int, kind: Kind, run: Path
) -> None:
    path = run / "gradients-0000000000" / rank_file(rank)
    whole = path.read_bytes()
    content = bytearray(whole)
    content[next(one.begin for one in open_segment(path.parent).records(rank, kind) if one.step == 7)] ^= 1
    path.write_bytes(content)
    assert (last := restored_last(run)) == 6
    damage = f"steps 7 to 12 cannot be restored: {path.name}: the directory of a record is damaged"
    shadow, events, stop = Shadow(run, resources=ONE), list[ShadowEvent](), threading.Event()
    assert settle(shadow)[-1] == (last, bits(restored(run, last)))
    done = ckpt("shadow", run, "--once")
    assert (done.code, damage in done.err, "`ckpt repair`" in done.err) == (20, True, True), done

    def report(event: ShadowEvent) -> None:
        events.append(event)
        if event.kind == "damaged":
            path.write_bytes(whole)
        if event.status.step == 12:
            stop.set()

    follow(shadow, report, stop)
    assert [event.status.damage for event in events if event.kind == "damaged"] == [damage]
    assert (shadow.step, shadow.status.damage) == (12, None)


def test_shadow_once_names_damage_when_the_list_changes_meanwhile(run: Path) -> None:
    path = run / "gradients-0000000000" / rank_file(0)
    content = bytearray(path.read_bytes())
    content[next(one.begin for one in open_segment(path.parent).records(0, Kind.GRADIENTS) if one.step == 7)] ^= 1
    path.write_bytes(content)

    def report(event: ShadowEvent) -> None:  # another process puts the list again after each step
        os.utime(run / chain_file.NAME, ns=(event.status.step or 0,) * 2)

    with pytest.raises(CorruptError, match="steps 7 to 12 cannot be restored"):
        follow(Shadow(run, resources=ONE), report, threading.Event(), once=True)


def test_log_that_is_shorter_than_the_chain_states_is_damaged_for_a_shadow(run: Path) -> None:
    logged = chain_file.load(run / chain_file.NAME).segments[0]
    (run / chain_file.NAME).write_bytes(chain_file.dump(ChainIndex((), (replace(logged, step=12),))))
    path = run / logged.folder / rank_file(0)
    record = next(one for one in open_segment(path.parent).records(0, Kind.GRADIENTS) if one.step == 9)
    path.write_bytes(path.read_bytes()[: record.begin - HEAD.size])
    shadow = Shadow(run, resources=ONE)
    assert settle(shadow)[-1][0] == 8
    assert shadow.poll() == 0
    assert str(shadow.status.damage).startswith("steps 9 to 12 cannot be restored")


def restored_last(run: Path) -> int:
    from ckpt_formats.universal.chain import states

    return states.open_steps(run, chain_file.load(run / chain_file.NAME).segments[0], check_from=0).last


def test_steps_that_the_chain_dropped_are_forgotten(run: Path) -> None:
    shadow = Shadow(run, resources=ONE)
    settle(shadow)
    assert shadow.step == 12
    assert ckpt("compact", run, "--upto", 4).code == 0
    assert settle(shadow)[-1] == (4, bits(restored(run, 4)))


def test_shadow_once_goes_on_in_the_next_segment_if_its_own_is_removed(tmp_path: Path) -> None:
    run = Path(shutil.copytree(GOLDEN, tmp_path / "run.chain"))
    chain = chain_file.load(run / chain_file.NAME)
    (run / chain_file.NAME).write_bytes(chain_file.dump(ChainIndex((), chain.segments[:1])))
    shadow = Shadow(run, resources=ONE)
    shadow.poll()
    shadow.poll(1)
    assert shadow.step == 1
    (run / chain_file.NAME).write_bytes(chain_file.dump(replace(chain, segments=chain.segments[1:])))
    shutil.rmtree(run / chain.segments[0].folder)
    follow(shadow, lambda event: None, threading.Event(), once=True)
    assert shadow.step == 6


def test_a_log_that_is_not_there_is_an_error_and_one_without_a_start_is_awaited(run: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        Shadow(tmp_path / "other.chain").poll()
    path = run / "gradients-0000000000" / rank_file(0)
    content = path.read_bytes()
    path.write_bytes(content[:200])
    shadow = Shadow(run, resources=ONE)
    assert settle(shadow) == []
    with pytest.raises(IncompleteError), shadow.frozen():
        pass
    assert ckpt("shadow", run, "--once").code == 20
    path.write_bytes(content)
    assert settle(shadow)[-1][0] == 12


def test_shadow_once_writes_the_last_step(run: Path, tmp_path: Path) -> None:
    done = ckpt("shadow", run, "--once", "-o", tmp_path / "out", "--json")
    assert done.code == 0, done
    fields = json.loads(done.out)
    assert (fields["step"], fields["verified"], fields["lag_steps"]) == (12, 12, 0)
    assert ckpt("restore", run, tmp_path / "restored").code == 0
    assert ckpt("diff", tmp_path / "out", tmp_path / "restored").code == 0
    assert ckpt("shadow", run, "-o", tmp_path / "other").code == 2


def test_bases_are_added_where_the_run_has_fingerprints(run: Path) -> None:
    before = {step: bits(restored(run, step)) for step in range(13)}
    done = ckpt("shadow", run, "--once", "--base-every", 4)
    assert done.code == 0, done
    assert [(one.step, one.kind) for one in chain_file.load(run / chain_file.NAME).members] == [
        (6, "base"),
        (12, "base"),
    ]
    assert {step: bits(restored(run, step)) for step in range(13)} == before
    assert ckpt("verify", run, "--replay").code == 0
    again = ckpt("shadow", run, "--once", "--base-every", 4, "--json")
    assert json.loads(again.out)["bases"] == []
    assert json.loads(again.out)["steps"] == 0, "it starts from the last base"


def test_a_base_with_other_values_is_not_added(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt.shadow import bases

    write = bases.write_base

    def write_other(source, path, *arguments):  # type: ignore[no-untyped-def]
        parameter = source.parameters["b"]
        values = parameter.weight[...] + 1
        states = {**parameter.states, "model": Tensor.of(ArrayBlob(values))}
        return write(
            replace(source, parameters={**source.parameters, "b": replace(parameter, states=states)}), path, *arguments
        )

    monkeypatch.setattr(bases, "write_base", write_other)
    done = ckpt("shadow", run, "--once", "--base-every", 4)
    assert done.code == 20, done
    assert "differs from the state in memory" in done.err
    assert chain_file.load(run / chain_file.NAME).members == ()
    assert sorted(path.name for path in run.iterdir()) == ["chain.json", "chain.lock", "gradients-0000000000"]


def test_a_shadow_killed_while_it_adds_a_base_leaves_the_chain_whole(run: Path, tmp_path: Path) -> None:
    """At some points in front of changes to the file system; then it is started again."""
    wanted = {step: bits(restored(run, step)) for step in (5, 6, 12)}

    def work_in(chain: Path) -> None:
        follow(Shadow(chain, resources=ONE, base_every=6), lambda event: None, threading.Event(), once=True)

    counted = shutil.copytree(run, tmp_path / "counted.chain")
    count = points(lambda: work_in(counted), counted)
    assert count > 20
    for point in spread(count, 8):
        chain = shutil.copytree(run, tmp_path / f"{point}.chain")
        killed(lambda chain=chain: work_in(chain), chain, point)  # type: ignore[misc]
        assert {step: bits(restored(chain, step)) for step in wanted} == wanted, point
        work_in(chain)
        assert [one.step for one in chain_file.load(chain / chain_file.NAME).members] == [6, 12]
        names = sorted(path.name for path in chain.iterdir())
        assert names == sorted(path.name for path in counted.iterdir()), point
        assert {step: bits(restored(chain, step)) for step in wanted} == wanted, point


def test_a_full_disk_costs_a_base_and_nothing_else(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt.shadow import shadow as module
    from ckpt_formats.core.errors import NoSpaceError

    def full(*arguments: object) -> None:
        raise NoSpaceError("no space left on the disk", where=run)

    monkeypatch.setattr(module, "add_base", full)
    events: list[ShadowEvent] = []
    shadow = Shadow(run, resources=ONE, base_every=6)
    follow(shadow, events.append, threading.Event(), once=True)
    assert shadow.step == 12
    assert [event.error.what for event in events if event.error] == ["no space left on the disk"] * 2


def test_shadow_is_not_read_while_it_applies_a_step(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers see states of single steps only, though another thread applies steps all the time.

    They read all the time, too, and cannot keep that thread from its work.
    """
    monkeypatch.setattr(turns, "JOIN_SECONDS", 0.0)
    wanted = {step: bits(restored(run, step)) for step in range(13)}
    shadow = Shadow(run, resources=Execution(workers=2))
    problems: list[object] = []
    stop = threading.Event()
    shadow.poll()

    def reads() -> None:
        while not stop.is_set():
            with shadow.frozen() as checkpoint:
                if checkpoint.step is None or bits(checkpoint) != wanted[checkpoint.step]:
                    problems.append(checkpoint.step)

    readers = [threading.Thread(target=reads) for _ in range(3)]
    for reader in readers:
        reader.start()
    while shadow.step != 12:
        assert shadow.step is not None
        shadow.poll(shadow.step + 1)
        time.sleep(0.002)
    stop.set()
    for reader in readers:
        reader.join()
    assert problems == []


@pytest.fixture
def process(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """The command in a process of its own, which follows a log that grows meanwhile."""
    writer = grow(GOLDEN, tmp_path / "run.chain", 5)
    for _ in range(20):
        next(writer)
    command = [sys.executable, "-m", "ckpt_cli", "shadow", str(tmp_path / "run.chain"), "--json", "--workers", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for _ in writer:
            time.sleep(0.002)
        yield child
        child.kill()


def test_the_command_reports_what_it_does_until_a_signal(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    events = []
    for line in process.stdout:
        events.append(json.loads(line))
        if events[-1]["step"] == 6 and events[-1]["event"] == "waiting":
            os.kill(process.pid, signal.SIGTERM)
    assert process.wait() == 0
    assert events[-1]["event"] == "stopped"
    assert events[-1]["verified"] == 6
    steps = [event["step"] for event in events if event["step"] is not None]
    assert steps == sorted(steps)


def test_shadow_changes_no_file_of_the_log(run: Path) -> None:
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}
    shadow = Shadow(run, resources=ONE)
    settle(shadow)
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()} == before
    assert open_checkpoint(run).step == shadow.step


def test_a_step_is_verified_when_the_fingerprints_of_all_ranks_came_one_after_another(run: Path) -> None:
    segment = run / "gradients-0000000000"
    contents = {path: path.read_bytes() for path in sorted(segment.glob("*.ckg"))}
    _, heads = open_layout(segment)
    ends = {}
    for rank, head in enumerate(heads):
        records = scan(segment / rank_file(rank), head).records
        at = next(i for i, one in enumerate(records) if one.kind is Kind.FINGERPRINT and one.step == 9)
        # Up to the fingerprint of step 9, and with it.
        ends[segment / rank_file(rank)] = [one.begin - HEAD.size for one in records[at : at + 2]]
    for path, (before, _) in ends.items():
        path.write_bytes(contents[path][:before])
    shadow = Shadow(run, resources=ONE, base_every=9)
    settle(shadow)
    assert (shadow.step, shadow.verified) == (9, 6)
    for path, (_, after) in ends.items():
        assert not shadow.base_due
        path.write_bytes(contents[path][:after])
        settle(shadow)
    assert (shadow.step, shadow.verified) == (9, 9)
    assert shadow.base_due
