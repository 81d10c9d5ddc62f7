"""A shadow follows a log that is served as it would its files, and refuses a hostile server."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path

import pytest

from ckpt.pipeline import Execution
from ckpt.serving import server as serving
from ckpt.serving.chain_files import ChainFiles, FileVersion
from ckpt.serving.server import ChainServer
from ckpt.shadow import mirror, segment_files
from ckpt.shadow.mirror import LogMirror
from ckpt.shadow.shadow import Shadow
from ckpt_formats.core.errors import (
    CkptError,
    CorruptError,
    InvalidArgumentError,
    NoSpaceError,
    UnsafeError,
    UnsupportedError,
)
from ckpt_formats.core.state_names import from_stored
from ckpt_formats.stores.address import NetworkAddress, tls_of
from ckpt_formats.stores.http_client import NO_CREDENTIALS, Credentials
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain.chain_file import ChainIndex, LoggedSteps
from ckpt_formats.universal.gradients import held, record
from ckpt_formats.universal.gradients.segment import rank_file
from damage import SAMPLES, ckpt
from gradient_logs import restored, small_log
from growing_log import State, bits, grow, log_with_fingerprints

GOLDEN = SAMPLES / "recorded-1" / "run.chain"
HERE = NetworkAddress("127.0.0.1", 0)
ONE = Execution(workers=1)
SEGMENT = "gradients-0000000000"
TOKEN = b"a token that is long enough"
SECONDS = 300
"""What something may take that takes one second on a quiet machine."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run of 12 steps with a fingerprint of every third."""
    log_with_fingerprints(12, 3).write(tmp_path / "run.chain")
    return tmp_path / "run.chain"


@contextmanager
def served(run: Path, place: Path, **options: int) -> Iterator[tuple[ChainServer, Shadow]]:
    server = ChainServer(run, HERE)
    with LogMirror(server.url, place=place / "mirror", **options) as there:
        yield server, Shadow(there, resources=ONE)
    server.close()


def states_until(shadow: Shadow, last: int) -> dict[int, State]:
    """The states of all steps on the way to a step."""
    states, deadline = {}, time.monotonic() + SECONDS
    while shadow.step != last:
        assert time.monotonic() < deadline, shadow.status
        before = shadow.step
        shadow.poll(None if before is None else before + 1)
        if shadow.step is not None and shadow.step != before:
            with shadow.frozen() as checkpoint:
                states[shadow.step] = bits(checkpoint)
    return states


def poll_until(shadow: Shadow, done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not done():
        assert time.monotonic() < deadline, shadow.status
        shadow.poll()


def log_nbytes(run: Path, segment: str = SEGMENT) -> int:
    return sum(path.stat().st_size for path in (run / segment).glob("*.ckg"))


@pytest.mark.parametrize("seed", range(2))
def test_every_step_of_a_growing_log_is_that_of_restore(seed: int, tmp_path: Path) -> None:
    """Of a log with two ranks, two segments and a base, which is fetched."""
    run = tmp_path / "run.chain"
    pieces = grow(GOLDEN, run, seed)
    next(pieces)
    with served(run, tmp_path) as (_, shadow):
        seen: dict[int, State] = {}
        thread = threading.Thread(target=lambda: [time.sleep(0.003) for _ in pieces])
        thread.start()
        seen = states_until(shadow, 6)
        thread.join()
        last = chain_file.load(run / chain_file.NAME).segments[-1]
        poll_until(shadow, lambda: shadow.verified == 6)
        poll_until(shadow, lambda: [path.name for path in shadow.path.glob("gradients-*")] == [last.folder])
    assert list((tmp_path / "mirror").iterdir()) == []
    for step, state in seen.items():
        # At the start, states may be zero that no step has changed.
        assert state.items() >= bits(restored(run, step)).items(), step
    assert set(seen) >= {0, 6}


def test_each_byte_comes_once_also_when_connections_break(run: Path, tmp_path: Path) -> None:
    """Through a relay that ends each connection after some more bytes."""
    server = ChainServer(run, HERE)
    with ExitStack() as stack:
        url, count = stack.enter_context(broken_relay(server, step=1500))
        there = stack.enter_context(LogMirror(url, place=tmp_path / "m"))
        shadow = Shadow(there, resources=ONE)
        states = states_until(shadow, 12)
        poll_until(shadow, lambda: there.received >= log_nbytes(run))
        assert there.received == log_nbytes(run)
    assert count[0] > 5, "connections"
    assert states[12] == bits(restored(run, 12))
    server.close()


@contextmanager
def broken_relay(server: ChainServer, step: int) -> Iterator[tuple[str, list[int]]]:
    """The URL of a relay whose nth connection ends after n times `step` bytes; and how many there were."""
    target, count, threads = server.address, [0], list[threading.Thread]()
    with ExitStack() as opened, socket.create_server(("127.0.0.1", 0)) as listening:

        def pump(source: socket.socket, sink: socket.socket, limit: int) -> None:
            with suppress(OSError):
                while limit > 0 and (part := source.recv(min(limit, 1 << 16))):
                    sink.sendall(part)
                    limit -= len(part)
            for one in (source, sink):
                with suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

        def accept() -> None:
            with suppress(OSError):
                while True:
                    peer = opened.enter_context(listening.accept()[0])
                    count[0] += 1
                    there = opened.enter_context(socket.create_connection((target.host, target.port)))
                    for ends in ((peer, there, 1 << 60), (there, peer, count[0] * step)):
                        threads.append(threading.Thread(target=pump, args=ends))
                        threads[-1].start()

        threads.append(threading.Thread(target=accept))
        threads[-1].start()
        yield server.url.replace(f":{target.port}", f":{listening.getsockname()[1]}"), count
        listening.shutdown(socket.SHUT_RDWR)
        for thread in threads:
            thread.join()


def test_a_server_that_is_started_again_is_found(run: Path, tmp_path: Path) -> None:
    path = run / SEGMENT / rank_file(1)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    server = ChainServer(run, HERE)
    with LogMirror(server.url, place=tmp_path / "m") as there:
        shadow = Shadow(there, resources=ONE)
        states_until(shadow, 5)
        server.close()
        path.write_bytes(content)
        deadline = time.monotonic() + SECONDS
        while there.broken is None:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert "no connection" in str(shadow.status.waiting)
        again = ChainServer(run, server.address)
        assert states_until(shadow, 12)[12] == bits(restored(run, 12))
        again.close()


def test_gradients_before_the_base_are_not_fetched(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ckpt("shadow", run, "--once", "--base-every", 9).code == 0
    assert [one.step for one in chain_file.load(run / chain_file.NAME).members] == [9]
    monkeypatch.setattr(segment_files, "_PEEK", 64)
    with served(run, tmp_path) as (_, shadow):
        states = states_until(shadow, 12)
        assert shadow.mirror is not None
        missing = log_nbytes(run) - shadow.mirror.received
    sizes = {
        one.step: one.nbytes + -one.nbytes % 8
        for rank in range(2)
        for one in record.scan(run / SEGMENT / rank_file(rank), _head(run, rank)).records
        if one.kind is record.Kind.GRADIENTS
    }
    assert missing > sum(sizes[step] for step in range(1, 9)), "the bodies of 8 steps, of both ranks"
    assert states[12] == bits(restored(run, 12))
    assert min(states) == 9


def _head(run: Path, rank: int) -> record.FileHead:
    from ckpt_formats.universal.gradients.segment import open_layout

    return open_layout(run / SEGMENT)[1][rank]


def test_applied_records_are_freed_and_not_needed_again(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed = 0

    def overwrite(file: int, begin: int, end: int) -> None:
        nonlocal freed
        freed += end - begin
        os.pwrite(file, b"\xff" * (end - begin), begin)

    monkeypatch.setattr(segment_files, "make_hole", overwrite)
    monkeypatch.setattr(segment_files, "_READ", 100)
    with served(run, tmp_path, window=1) as (_, shadow):
        states = states_until(shadow, 12)
    assert freed > 0
    assert all(states[step] == bits(restored(run, step)) for step in states)
    assert len(states) == 13


def test_mirror_punches_holes(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"x" * (1 << 20))
        file.flush()
        before = os.fstat(file.fileno()).st_blocks
        segment_files.make_hole(file.fileno(), 5000, (1 << 20) - 5000)
        content = os.pread(file.fileno(), 1 << 20, 0)
    assert content[:5000] == b"x" * 5000
    assert content[-5000:] == b"x" * 5000
    assert os.stat(tmp_path / "file").st_blocks < before / 4
    segment_files.make_hole(-1, 0, 1 << 20)  # a file system that cannot do it keeps the bytes


def test_no_more_than_two_steps_come_if_there_is_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_log(100).write(tmp_path / "run.chain")
    monkeypatch.setattr(segment_files, "_READ", 256)
    with served(tmp_path / "run.chain", tmp_path, window=1) as (_, shadow):
        states_until(shadow, 10)
        time.sleep(0.2)
        assert shadow.mirror is not None
        each = log_nbytes(tmp_path / "run.chain") / 100
        assert shadow.mirror.received < 15 * each + 5000
        assert shadow.status.lag_nbytes > 80 * each, "what is still elsewhere is counted"
        states_until(shadow, 100)


def test_steps_that_the_chain_dropped_are_forgotten(run: Path, tmp_path: Path) -> None:
    with served(run, tmp_path) as (_, shadow):
        states_until(shadow, 12)
        assert ckpt("compact", run, "--upto", 4).code == 0
        assert states_until(shadow, 4)[4] == bits(restored(run, 4))
        assert [path.name for path in shadow.path.parent.iterdir() if path.name.isdigit()] == ["1"]
        there, root = shadow.mirror, shadow.path.parent
        assert there is not None
        there.applied(root / "0" / SEGMENT, 12)  # what was said of the folder before frees nothing of this one
        assert there._applied_here() is None
        there.applied(root / "1" / SEGMENT, 4)
        assert there._applied_here() == (SEGMENT, 4)


def test_serve_and_shadow_follow_a_log(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ckpt_cli", "serve", str(run), "--listen", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        address = json.loads(child.stdout.readline())["address"]
        done = ckpt("shadow", address, "--once", "-o", tmp_path / "out", "--mirror", tmp_path / "m", "--json")
        assert done.code == 0, done
        assert (json.loads(done.out)["step"], json.loads(done.out)["chain"]) == (12, address)
        assert ckpt("shadow", address, "--once", "--base-every", 3).code == 2
        assert json.loads(ckpt("inspect", address, "--json").out)["origin"]["step"] == 12
        os.kill(child.pid, signal.SIGTERM)
        assert child.wait(SECONDS) == 0
        assert json.loads(child.stdout.readline()) == {"event": "stopped"}
    assert ckpt("restore", run, tmp_path / "restored").code == 0
    assert ckpt("diff", tmp_path / "out", tmp_path / "restored").code == 0
    assert list((tmp_path / "m").iterdir()) == []
    assert ckpt("shadow", address, "--once").code == 10
    assert ckpt("shadow", address.replace("http", "tcp"), "--once").code == 22
    assert ckpt("shadow", run, "--once", "--mirror", tmp_path / "m").code == 2
    assert ckpt("serve", tmp_path / "other", "--listen", "0").code == 10
    assert ckpt("serve", run).code == 2


def test_log_is_fetched_with_a_token_and_tls(run: Path, tmp_path: Path, certificate: tuple[Path, Path]) -> None:
    server = ChainServer(run, HERE, TOKEN, tls_of(*certificate))
    for credentials, error in (
        (NO_CREDENTIALS, UnsafeError),
        (Credentials(TOKEN, run / "chain.json"), InvalidArgumentError),
        (Credentials(None, certificate[0]), UnsupportedError),
        (Credentials(TOKEN + b"!", certificate[0]), UnsupportedError),
    ):
        with pytest.raises(error):
            LogMirror(server.url, credentials, tmp_path / "m")
    with LogMirror(server.url, Credentials(TOKEN, certificate[0]), tmp_path / "m") as there:
        assert states_until(Shadow(there, resources=ONE), 12)[12] == bits(restored(run, 12))
    server.close()


Rows = dict[str, FileVersion]
ROWS: dict[str, Rows] = {
    name: {file: FileVersion(nbytes, '"x"')}
    for name, file, nbytes in (
        ("a name that leaves its folder", "../../x", 5),
        ("an absolute name", "/x", 5),
        ("a name with a zero", "a\0", 5),
        ("a huge file", "layout.json", 1 << 60),
        ("a name that is not a text of a file system", "\ud800", 5),
        ("a name of 2,000 parts", "/".join("a" * 2000), 5),
        ("a name of 2,000 characters", "a" * 2000, 5),
        ("a layout that is larger than layouts are", "layout.json", 1 << 40),
        ("no size", "a", -1),
        ("another version", "layout.json", 5),
    )
}
CONTENTS: dict[str, object] = {
    "a list that is none": {"format": "ckpt-list"},
    "rows that are none": {"format": "ckpt-list", "chain": "x", "files": {"a": 1}},
    "a list of lists": [[]],
    "deep text": "[" * 100_000,
    "a chain that is none": {"format": "ckpt-list", "chain": 1, "files": {}},
}


@pytest.mark.parametrize("name", ROWS)
def test_mirror_refuses_hostile_lists(name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror, "_SOON", 5.0)
    monkeypatch.setattr(ChainFiles, "list", lambda self, folder: ROWS[name])
    with served(run, tmp_path) as (_, shadow):
        if name == "another version":
            assert is_broken(shadow, "another file now")
        else:
            with pytest.raises((CorruptError, UnsafeError)):
                states_until(shadow, 12)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mirror", "run.chain"]
    assert list((tmp_path / "mirror").iterdir()) == []


def is_broken(shadow: Shadow, why: str) -> bool:
    """Wait until the connection is broken, and tell whether it is for this reason."""
    assert shadow.mirror is not None
    deadline = time.monotonic() + SECONDS
    while shadow.mirror.broken is None:
        assert time.monotonic() < deadline
        shadow.poll()
    return why in shadow.mirror.broken


@pytest.mark.parametrize("name", CONTENTS)
def test_mirror_refuses_lists_that_are_none(
    name: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = CONTENTS[name]
    body = content.encode() if isinstance(content, str) else json.dumps(content).encode()
    monkeypatch.setattr(
        serving._Peer, "_send_list", lambda self, request: self._answer(HTTPStatus.OK, body, {"ETag": '"x"'})
    )
    with served(run, tmp_path) as (_, shadow), pytest.raises(CorruptError, match="cannot be read"):
        states_until(shadow, 12)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Content-Range": "bytes 0-9/10"}, HTTPStatus.PARTIAL_CONTENT),
        ({}, HTTPStatus.PARTIAL_CONTENT),
        ({}, HTTPStatus.OK),
    ],
)
def test_mirror_refuses_other_ranges(
    headers: dict[str, str], status: HTTPStatus, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = serving._Peer._send_file

    def other(self: serving._Peer, request: serving._FileRequest) -> None:
        if request.name.endswith(".ckg"):
            self._answer(status, bytes(10), headers)
        else:
            send(self, request)

    monkeypatch.setattr(serving._Peer, "_send_file", other)
    with served(run, tmp_path) as (_, shadow), pytest.raises(UnsupportedError, match="another range"):
        states_until(shadow, 12)


def _listing(
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[str, FileVersion], FileVersion],
    *,
    times: list[float] | None = None,
) -> None:
    """A server whose lists are otherwise."""
    listed = ChainFiles.list

    def other(self: ChainFiles, folder: str) -> Rows:
        if times is not None:
            times.append(time.monotonic())
        return {name: change(name, one) for name, one in listed(self, folder).items()}

    monkeypatch.setattr(ChainFiles, "list", other)


@pytest.mark.parametrize(
    ("nbytes", "error", "words"),
    [(1 << 49, UnsafeError, "more than it can need"), (1 << 29, NoSpaceError, "are free")],
)
def test_a_base_that_cannot_be_is_refused_before_it_is_fetched(
    nbytes: int, error: type[CkptError], words: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ckpt("shadow", run, "--once", "--base-every", 9).code == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: (1 << 30, 1 << 29, 1 << 28))
    _listing(monkeypatch, lambda name, one: replace(one, nbytes=nbytes) if "packs" in name else one)
    with served(run, tmp_path) as (_, shadow), pytest.raises(error, match=words):
        states_until(shadow, 12)


def test_bytes_that_are_stated_and_never_come_are_an_error(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mirror, "_MAX_EMPTY", 5)
    _listing(monkeypatch, lambda name, one: replace(one, nbytes=one.nbytes + 1000) if ".ckg" in name else one)
    with served(run, tmp_path) as (_, shadow), pytest.raises(CorruptError, match="fewer bytes than is stated"):
        states_until(shadow, 13)


def test_a_server_that_answers_at_once_is_not_asked_without_a_pause(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = list[float]()
    _listing(monkeypatch, lambda name, one: one, times=times)
    monkeypatch.setattr(serving, "MAX_WAIT", 0.0)
    with served(run, tmp_path) as (_, shadow):
        states_until(shadow, 12)
        before, began = len(times), time.monotonic()
        time.sleep(0.3)
        assert len(times) - before < 130 * (time.monotonic() - began)


def test_end_of_the_thread_of_a_mirror_is_seen(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirror.LogMirror, "_list", lambda self, folder: {}["x"])
    with served(run, tmp_path) as (_, shadow), pytest.raises(CorruptError, match="cannot be used: KeyError"):
        states_until(shadow, 12)


def test_damage_on_the_way_ends_the_steps_before_it(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log has no hash on the way; its records have."""
    damaged = shutil.copytree(run, tmp_path / "damaged.chain")
    path = damaged / SEGMENT / rank_file(1)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    files = Shadow(damaged, resources=ONE)
    while files.poll() or files.has_more:
        pass
    with served(damaged, tmp_path) as (_, shadow):
        assert files.step is not None
        states = states_until(shadow, files.step)
        for _ in range(50):
            shadow.poll()
        assert shadow.step == files.step
        assert shadow.status.damage == files.status.damage is not None
    assert states[files.step] == bits(restored(run, files.step))


@pytest.mark.parametrize("way", ["files", "socket"])
def test_a_thousand_steps_are_caught_up_and_each_record_is_read_once(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, read = tmp_path / "run.chain", 0
    small_log(1000).write(run)
    records = sum(len(record.scan(run / SEGMENT / rank_file(rank), _head(run, rank)).records) for rank in range(2))
    one = record._next

    def counted(*arguments):  # type: ignore[no-untyped-def]
        nonlocal read
        result = one(*arguments)
        read += 1
        return result

    monkeypatch.setattr(record, "_next", counted)
    with served(run, tmp_path) as (_, there):
        shadow = there if way == "socket" else Shadow(run, resources=ONE)
        most = 0
        while shadow.step != 1000:
            most = max(most, shadow.poll())
        assert shadow.status.lag_steps == shadow.status.lag_nbytes == 0
        assert shadow.status.steps == 1000
        with shadow.frozen() as checkpoint:
            actual = bits(checkpoint)
    # Before the start is complete here, its first records are read again.
    assert records <= read <= records + (2 * 2 * held._RECORDS if way == "socket" else 0)
    assert most == 8, "steps at once"
    truth = small_log(1000).truth[1000]
    for name, states in truth.items():
        for state, values in states.items():
            assert actual[name, from_stored(state)] == values.tobytes()


def test_leftovers_of_a_killed_shadow_are_removed_and_others_stay(run: Path, tmp_path: Path) -> None:
    server, place = ChainServer(run, HERE), tmp_path / "mirror"
    place.mkdir()
    (place / "ckpt-mirror-killed").mkdir()
    (place / "other").mkdir()
    with LogMirror(server.url, place=place) as living:
        os.utime(living.path.parent, (0, 0))
        os.utime(place / "ckpt-mirror-killed", (0, 0))
        with LogMirror(server.url, place=place):
            assert living.path.exists()
            assert len(list(place.iterdir())) == 3
    assert [path.name for path in place.iterdir()] == ["other"]
    server.close()


def write_segments(run: Path) -> tuple[LoggedSteps, LoggedSteps]:
    """A run of two segments, from step 0 to 3 and from 3 to 6, without any base. The list has the first one only."""
    small_log(3).write(run)
    later = small_log(3, seed=2)
    later.layout = replace(later.layout, first=3)
    for entries in later.ranks:
        for one in entries:
            one.step += 3
    other = run.with_name("later.chain")
    later.write(other)
    (other / "gradients-0000000003").rename(run / "gradients-0000000003")
    (first,), (last,) = (chain_file.load(one / chain_file.NAME).segments for one in (run, other))
    return first, last


def cut(run: Path, segment: str, remaining: float) -> dict[Path, bytes]:
    """Leave a part of the files of a segment. Returns what they had."""
    contents = {path: path.read_bytes() for path in sorted((run / segment).glob("*.ckg"))}
    for path, content in contents.items():
        path.write_bytes(content[: int(len(content) * remaining)])
    return contents


@pytest.mark.parametrize("way", ["files", "socket"])
def test_the_end_of_a_segment_is_there_while_the_start_of_the_next_is_not(way: str, tmp_path: Path) -> None:
    """A run that was killed at once after it had been resumed leaves such a chain."""
    run = tmp_path / "run.chain"
    first, last = write_segments(run)
    (run / chain_file.NAME).write_bytes(chain_file.dump(ChainIndex((), (replace(first, step=3), last))))
    contents = cut(run, last.folder, 0.05)
    with served(run, tmp_path) as (server, there):
        shadow = there if way == "socket" else Shadow(run, resources=ONE)
        assert states_until(shadow, 3)[3] == bits(restored(run, 3))
        assert shadow.status.segment == first.folder
        chain = server.url if way == "socket" else run
        done = ckpt("shadow", chain, "--once", "--json")
        assert json.loads(done.out)["step"] == 3, "it does not wait for what may never come"
        for path, content in contents.items():
            path.write_bytes(content)
        assert states_until(shadow, 6)[6] == bits(restored(run, 6))


@pytest.mark.parametrize("way", ["files", "socket"])
def test_the_next_segment_may_be_in_the_list_before_the_last_step_is_seen(way: str, tmp_path: Path) -> None:
    run = tmp_path / "run.chain"
    first, last = write_segments(run)
    contents = cut(run, first.folder, 0.8)
    with served(run, tmp_path) as (_, there):
        shadow = there if way == "socket" else Shadow(run, resources=ONE)
        states_until(shadow, 2)
        (run / "draft").write_bytes(chain_file.dump(ChainIndex((), (replace(first, step=3), last))))
        (run / "draft").rename(run / chain_file.NAME)
        poll_until(shadow, lambda: shadow._limit == 3)
        assert shadow.step == 2
        for path, content in contents.items():
            path.write_bytes(content)
        assert states_until(shadow, 6)[6] == bits(restored(run, 6))


def test_a_shadow_that_was_ahead_when_steps_were_dropped_begins_again(run: Path, tmp_path: Path) -> None:
    """It may apply a step after the list was read, and before it has seen the list."""
    with served(run, tmp_path) as (_, shadow):
        states_until(shadow, 3)
        there = shadow.mirror
        assert there is not None
        assert ckpt("compact", run, "--upto", 4).code == 0
        deadline = time.monotonic() + SECONDS
        while chain_file.load(there.path / chain_file.NAME).segments[0].step != 4:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        there.applied(there.path / SEGMENT, 9)
        there.applied(there.path / SEGMENT, 0)  # as one says that was ahead, and loads its state anew
        while there.path.name != "1":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert states_until(shadow, 4)[4] == bits(restored(run, 4))
