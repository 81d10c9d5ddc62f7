"""Several shadows hold the parts of a state: together they give the checkpoint that one would, of one step."""

import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from ckpt.pipeline import Execution
from ckpt.shadow import joined as joined_module
from ckpt.shadow import server as server_module
from ckpt.shadow.client import ShadowConnection
from ckpt.shadow.joined import JoinedShadows
from ckpt.shadow.server import Server
from ckpt.shadow.shadow import Shadow
from ckpt_formats.core.errors import CorruptError, IncompleteError, InvalidArgumentError, UnsupportedError
from ckpt_formats.stores.address import NetworkAddress
from ckpt_formats.universal.gradients import layout as layout_module
from ckpt_formats.universal.gradients.layout import LoggedTensor
from ckpt_formats.universal.gradients.parts import StatePart
from damage import SAMPLES, ckpt
from gradient_logs import restored, small_layout
from growing_log import bits, log_with_fingerprints
from held import plain

HERE = NetworkAddress("127.0.0.1", 0)
ONE = Execution(workers=1)
GOLDEN = SAMPLES / "recorded-1" / "run.chain"


@dataclass
class Parts:
    """The shadows of all parts of a run, and their addresses."""

    run: Path
    shadows: list[Shadow]
    servers: list[Server]

    @property
    def addresses(self) -> list[NetworkAddress]:
        return [server.address for server in self.servers]

    @property
    def text(self) -> str:
        return ",".join(f"tcp://{address}" for address in self.addresses)

    def go_to(self, *steps: int) -> None:
        for shadow, step in zip(self.shadows, steps, strict=True):
            go_to(shadow, step)


def go_to(shadow: Shadow, step: int) -> None:
    while shadow.step != step:
        shadow.poll(upto=step)


@pytest.fixture(params=[layout_module.ALONE, 1], ids=["shared chunks", "own chunks"])
def run(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose small tensors share chunks, and the same with a chunk for each."""
    monkeypatch.setattr(layout_module, "ALONE", request.param)
    log_with_fingerprints(12, 3).write(tmp_path / "run.chain")
    return tmp_path / "run.chain"


@pytest.fixture(params=[2, 3])
def parts(run: Path, request: pytest.FixtureRequest) -> Iterator[Parts]:
    shadows = [Shadow(run, resources=ONE, part=StatePart(number + 1, request.param)) for number in range(request.param)]
    servers = [Server(shadow, HERE) for shadow in shadows]
    yield Parts(run, shadows, servers)
    for server in servers:
        server.close()


@pytest.mark.parametrize("count", range(1, 8))
def test_each_tensor_is_in_one_part_and_the_sizes_are_even(count: int) -> None:
    layout = small_layout()
    tensors = tuple(LoggedTensor(f"t{i}", "float32", (10 + i % 3,)) for i in range(70))
    for one in (layout, type(layout)(**{**vars(layout), "tensors": tensors})):
        held = [StatePart(number + 1, count).tensors(one) for number in range(count)]
        assert sorted(number for part in held for number in part) == list(range(len(one.tensors)))
    sizes = [sum(tensors[i].shape[0] for i in part) for part in held]
    assert max(sizes) - min(sizes) <= 24
    for number, of in ((0, 1), (2, 1), (-1, 3)):
        with pytest.raises(InvalidArgumentError):
            StatePart(number, of)


def test_a_part_holds_no_more_than_its_tensors(parts: Parts) -> None:
    parts.go_to(*[12] * len(parts.shadows))
    held = [shadow.status.nbytes for shadow in parts.shadows]
    if layout_module.ALONE == 1:  # or tensors of several parts are in one chunk, and each of these holds it
        assert sum(held) == 4 * 3 * (12 + 5 + 12)
        assert min(held) > 0
    assert sum(shadow.status.parameters for shadow in parts.shadows) * 12 == sum(held)
    assert [shadow.verified for shadow in parts.shadows] == [12] * len(held), "what it holds is compared with the run's"


def test_all_parts_together_are_the_whole_state(parts: Parts, tmp_path: Path) -> None:
    parts.go_to(*[7] * len(parts.shadows))
    whole = Shadow(parts.run, resources=ONE)
    go_to(whole, 7)
    with JoinedShadows(parts.addresses[::-1]) as joined, whole.frozen() as checkpoint:
        assert bits(joined.checkpoint) == bits(checkpoint) == bits(restored(parts.run, 7))
        mine, other = joined.checkpoint, checkpoint
        assert list(mine.parameters) == list(other.parameters)
        assert [p.values for p in mine.parameters.values()] == [p.values for p in other.parameters.values()]
        assert plain(dict(mine.extras)) == plain(dict(other.extras))  # random states are arrays
        assert (mine.groups, mine.aliases, mine.origin) == (other.groups, other.aliases, other.origin)
    done = ckpt("restore", parts.text, tmp_path / "out")
    assert done.code == 0, done
    assert ckpt("diff", tmp_path / "out", f"{parts.run}@7").code == 0
    assert json.loads(ckpt("inspect", parts.text, "--json").out)["origin"]["step"] == 7


def test_parts_that_are_behind_go_on_to_the_step_of_the_one_ahead(parts: Parts) -> None:
    parts.go_to(*[5] * (len(parts.shadows) - 1), 9)
    stop = threading.Event()

    def follow(shadow: Shadow) -> None:
        while not stop.is_set():
            shadow.poll()

    threads = [threading.Thread(target=follow, args=(shadow,)) for shadow in parts.shadows[:-1]]
    with JoinedShadowsBehind(parts, threads) as checkpoint:
        assert checkpoint.step == 9
        assert bits(checkpoint) == bits(restored(parts.run, 9))
        assert {shadow.step for shadow in parts.shadows} == {9}, "none goes beyond while it is read"
    stop.set()
    for thread in threads:
        thread.join()


class JoinedShadowsBehind:
    """Joins shadows of which some are behind and begin to follow when all are frozen."""

    def __init__(self, parts: Parts, threads: list[threading.Thread]) -> None:
        self._parts, self._threads, self._stack = parts, threads, ExitStack()

    def __enter__(self):  # type: ignore[no-untyped-def]
        agree = joined_module._agree

        def start_and_agree(shadows):  # type: ignore[no-untyped-def]
            for thread in self._threads:
                thread.start()
            return agree(shadows)

        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(joined_module, "_agree", start_and_agree)
        return self._stack.enter_context(JoinedShadows(self._parts.addresses)).checkpoint

    def __exit__(self, *ignored: object) -> None:
        self._stack.close()


def test_a_step_that_a_part_does_not_reach_is_refused(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "WAIT_SECONDS", 0.2)
    parts.go_to(*[5] * (len(parts.shadows) - 1), 9)
    with pytest.raises(IncompleteError, match="did not reach step 9"):
        JoinedShadows(parts.addresses)
    parts.go_to(*[9] * len(parts.shadows))
    with JoinedShadows(parts.addresses) as joined:
        assert joined.checkpoint.step == 9
    parts.go_to(*[12] * len(parts.shadows))


def test_parts_are_named_once_and_all(parts: Parts, run: Path) -> None:
    parts.go_to(*[7] * len(parts.shadows))
    first, *others = parts.addresses
    whole = Shadow(run, resources=ONE)
    go_to(whole, 7)
    server = Server(whole, HERE)
    for addresses, error, message in (
        ([first], IncompleteError, "part 2 of"),
        (others, IncompleteError, "part 1 of"),
        ([first, first], IncompleteError, "part 2 of"),
        ([first, *others, first], InvalidArgumentError, "twice"),
        ([server.address, first], UnsupportedError, "whole state"),
        ([server.address, server.address], UnsupportedError, "whole state"),
    ):
        with pytest.raises(error, match=message):
            JoinedShadows(addresses)
    assert "part 2 of" in ckpt("restore", f"tcp://{first}", run.parent / "out").err
    server.close()


def test_the_parts_of_different_runs_are_refused(parts: Parts, tmp_path: Path) -> None:
    log = log_with_fingerprints(12, 3)
    log.layout = type(log.layout)(**{**vars(log.layout), "run": "other"})
    log.write(tmp_path / "other.chain")
    other = Shadow(tmp_path / "other.chain", resources=ONE, part=StatePart(len(parts.shadows), len(parts.shadows)))
    go_to(other, 7)
    parts.go_to(*[7] * len(parts.shadows))
    server = Server(other, HERE)
    with pytest.raises(UnsupportedError, match="different runs"):
        JoinedShadows([*parts.addresses[:-1], server.address])
    server.close()


def test_a_step_that_was_is_not_to_be_reached(parts: Parts) -> None:
    parts.go_to(*[7] * len(parts.shadows))
    for step in (0, 7):
        with ShadowConnection(parts.addresses[0]) as connection, pytest.raises(CorruptError, match="already"):
            connection.advance(step)
    parts.go_to(*[12] * len(parts.shadows))


def test_shadow_parts_refuse_what_they_cannot_do(run: Path, tmp_path: Path) -> None:
    done = ckpt("shadow", run, "--part", "1/2", "--base-every", 3, "--once")
    assert done.code == 2, done
    assert "cannot write bases" in done.err
    assert ckpt("shadow", run, "--part", "1/2", "--once", "-o", tmp_path / "out").code == 2
    for text in ("0/2", "3/2", "1", "1/", "a/b", "1/2/3", "-1/2"):
        assert ckpt("shadow", run, "--part", text, "--once").code == 2, text
    done = ckpt("shadow", run, "--part", "2/2", "--once", "--json")
    assert (json.loads(done.out)["step"], json.loads(done.out)["verified"]) == (12, 12)


def test_parts_of_a_run_with_two_optimizers_a_base_and_tensors_that_are_not_stepped(tmp_path: Path) -> None:
    """At a base, after it, and at the end: what is no parameter, and what is tied, is there once."""
    shadows = [Shadow(GOLDEN, resources=ONE, part=StatePart(number, 3)) for number in (1, 2, 3)]
    servers = [Server(shadow, HERE) for shadow in shadows]
    whole = Shadow(GOLDEN, resources=ONE)
    for step in (3, 5, 6):
        for shadow in (whole, *shadows):
            go_to(shadow, step)
        with JoinedShadows([server.address for server in servers]) as joined, whole.frozen() as checkpoint:
            assert bits(joined.checkpoint) == bits(checkpoint)
            assert list(joined.checkpoint.parameters) == list(checkpoint.parameters)
            for name, parameter in joined.checkpoint.parameters.items():
                other = checkpoint.parameters[name]
                assert (parameter.role, dict(parameter.values)) == (other.role, dict(other.values))
            assert joined.checkpoint.extras.keys() == checkpoint.extras.keys()
            assert joined.checkpoint.groups == checkpoint.groups
    for server in servers:
        server.close()
