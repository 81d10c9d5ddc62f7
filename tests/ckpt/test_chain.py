"""Chains of deltas: every state comes back bit for bit, each against what the chain gave back of the one before."""

import json
import os
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ckpt.chains.append import append
from ckpt.chains.chain import Chain
from ckpt.chains.change import change
from ckpt.chains.estimate import CHUNKS, sample_evenly
from ckpt.chains.restore import open_step
from ckpt.chains.write import DeltaPolicy, parent_folder
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_codecs import NotApplicable, from_config
from ckpt_codecs.base import Array, Shape
from ckpt_codecs.delta import DeltaCodec, StatePair, States, StateTypes
from ckpt_codecs.registry import DEFAULT_DELTA, DELTA_CODECS, delta_from_config, parse_delta
from ckpt_formats.core.checkpoint import Checkpoint, Group, Origin
from ckpt_formats.core.chunking import DEFAULT_ELEMENTS as CHUNK
from ckpt_formats.core.dtypes import DTYPES
from ckpt_formats.core.errors import LockedError, NotFoundError, UnsupportedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import read
from ckpt_formats.registry import writable
from ckpt_formats.registry.location import detect
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import manifest
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.chain import folder as chain_folder
from ckpt_formats.universal.chain.members import member_at
from damage import SAMPLES, ckpt
from effort import examples
from held import STORABLE, array, bits, checkpoint, contents, everything, folder, parameter, plain
from training import save_run
from universal_decoder import UniversalDecoder

STEPS = 4


def content(path: Path) -> str:
    return manifest.load(path / manifest.NAME).content


def assert_same_state(actual: Checkpoint, expected: Checkpoint) -> None:
    assert contents(actual) == contents(expected)
    assert list(actual.parameters) == list(expected.parameters)
    assert plain(actual.extras) == plain(expected.extras)
    assert plain([(g.options, g.names) for g in actual.groups]) == plain(
        [(g.options, g.names) for g in expected.groups]
    )
    assert actual.aliases == expected.aliases
    assert {n: plain(p.values) for n, p in actual.parameters.items()} == {
        n: plain(p.values) for n, p in expected.parameters.items()
    }


def drifting(steps: int, elements: int = 1000, seed: int = 0) -> Iterator[Checkpoint]:
    """A run held in memory: masters that move a little, and two moments."""
    random = np.random.default_rng(seed)
    w, m, v = (random.standard_normal(elements).astype(np.float32) for _ in range(3))
    for step in range(1, steps + 1):
        g = random.standard_normal(elements).astype(np.float32)
        m, v = m * np.float32(0.9) + g, np.abs(v) * np.float32(0.99) + g * g
        w = w - np.float32(1e-4) * m
        states = {"master": w, "model": w.astype(DTYPES["bfloat16"]), "exp_avg": m, "exp_avg_sq": v}
        yield checkpoint(
            [parameter("w", states, step=step)], (Group({"lr": 1e-4}, ("w",)),), origin=Origin("held", None, step)
        )


def chain_of(run: Path, states: Iterator[Checkpoint], codec: str = "auto", **policy: Any) -> list[Checkpoint]:
    """Append all; what was appended."""
    checkpoints = list(states)
    for state in checkpoints:
        append(run, state, None, DeltaPolicy(codec, **policy), Execution())
    return checkpoints


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("optimizer", "form"), [("adamw", "torch"), ("adamw", "dcp"), ("momentum", "torch"), ("rmsprop", "dcp")]
)
def test_every_step_of_a_real_run_comes_back(optimizer: str, form: str, tmp_path: Path) -> None:
    saved = save_run(tmp_path, STEPS, optimizer, form)
    run = tmp_path / "run"
    for path in saved:
        done = ckpt("append", run, path, "--json")
        assert done.code == 0, done.err
        assert json.loads(done.out)["exact"] is True
    assert ckpt("verify", run).code == 0
    chain = chain_file.read(run)
    assert [member.kind for member in chain.members] == ["base", "delta", "delta", "delta"]
    assert all(member.stored_nbytes < chain.members[0].stored_nbytes for member in chain.members[1:])
    for step, path in enumerate(saved, 1):
        expected = open_checkpoint(path)
        assert_same_state(open_step(run, step, ReadOptions()).checkpoint, expected)
        save(expected, tmp_path / f"whole{step}", writable("universal"))
        assert chain.members[step - 1].content == content(tmp_path / f"whole{step}")


def test_a_chain_is_a_checkpoint_to_every_command(tmp_path: Path) -> None:
    saved = save_run(tmp_path, 2)
    run = tmp_path / "run"
    for path in saved:
        ckpt("append", run, path)
    assert detect(run).name == "chain"
    assert detect(run / chain_file.read(run).members[1].folder).name == "universal"
    assert ckpt("diff", run, saved[1]).code == 0
    assert ckpt("diff", run, saved[0]).code == 1
    assert "delta" in ckpt("inspect", run).out
    assert ckpt("convert", run, tmp_path / "out.pt", "--to", "torch").code == 0
    assert contents(open_checkpoint(tmp_path / "out.pt")) == contents(open_checkpoint(saved[1]))
    assert ckpt("compress", run, tmp_path / "small").code == 0
    assert content(tmp_path / "small") == chain_file.read(run).members[1].content


def test_tensors_may_come_go_and_change(tmp_path: Path) -> None:
    f32, i64 = DTYPES["float32"], DTYPES["int64"]
    first = [
        parameter("stays", {"master": array(f32, (50, 7)), "exp_avg": array(f32, (50, 7), 1)}),
        parameter("goes", {"master": array(f32, (50,))}),
        parameter("reshaped", {"master": array(f32, (6, 10))}),
        parameter("retyped", {"master": array(f32, (60,))}),
        parameter("count", {"model": array(i64, (40,))}, "buffer"),
    ]
    second = [
        parameter("comes", {"master": array(f32, (50,), 2)}),
        parameter("stays", {"master": array(f32, (50, 7)), "exp_avg_sq": array(f32, (50, 7), 3)}),
        parameter("reshaped", {"master": array(f32, (10, 6))}),
        parameter("retyped", {"master": array(DTYPES["bfloat16"], (60,))}),
        parameter("count", {"model": array(i64, (40,))}, "buffer"),
        parameter("rng", {"model": array(DTYPES["uint8"], (16,))}, "extra"),
    ]
    third = everything(5).parameters.values()
    checkpoints = [
        checkpoint(held, origin=Origin("held", None, i)) for i, held in enumerate((first, second, third, first), 1)
    ]
    run = tmp_path / "run"
    chain_of(run, iter(checkpoints))
    for step, state in enumerate(checkpoints, 1):
        assert_same_state(open_step(run, step, ReadOptions()).checkpoint, state)


@given(st.data())
@settings(max_examples=examples(25), phases=[Phase.generate])
def test_any_two_checkpoints_make_a_delta(data: st.DataObject) -> None:
    """Of any types, shapes and bits, NaNs among them, whatever the two have to do with each other."""

    def drawn(seed: int) -> Checkpoint:
        names = data.draw(st.lists(st.sampled_from("abc"), unique=True, min_size=1))
        held = []
        for name in names:
            states = data.draw(
                st.lists(st.sampled_from(["master", "model", "exp_avg", "step"]), unique=True, min_size=1)
            )
            shape = data.draw(st.sampled_from([(), (0,), (3,), (40, 8), (300,)]))
            kinds = {state: data.draw(st.sampled_from(STORABLE)) for state in states}
            held.append(
                parameter(name, {state: array(kinds[state], shape, data.draw(st.integers(0, 2))) for state in states})
            )
        return checkpoint(held, origin=Origin("held", None, seed))

    with folder() as at:
        checkpoints = chain_of(at / "run", (drawn(step) for step in (1, 2, 3)))
        for step, state in enumerate(checkpoints, 1):
            assert_same_state(open_step(at / "run", step, ReadOptions()).checkpoint, state)


@dataclass(frozen=True)
class Refusing(DeltaCodec):
    """Holds so many chunks, then no more."""

    holds: int = 0
    name: ClassVar[str] = "test-refusing"
    lossless: ClassVar[bool] = True
    encoded: ClassVar[list[int]] = []

    def encode(self, change: StatePair) -> bytes:
        self.encoded.append(1)
        if len(self.encoded) > self.holds:
            raise NotApplicable("no more")
        return b""

    def decode(
        self, data: bytes, before: States, shape: Shape, form: StateTypes, wanted: frozenset[str] | None = None
    ) -> dict[str, Array]:
        return {state: before[state] for state in form}


@pytest.mark.parametrize("holds", [0, 1, 2, 3])
def test_parameter_is_stored_alone_when_the_codec_gives_up(
    holds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Be it at one of the two chunks that are tried, or in the midst of writing."""
    monkeypatch.setitem(DELTA_CODECS, Refusing.name, f"{__name__}:Refusing")
    state = next(drifting(1, 2 * CHUNK + 5))
    chain_of(tmp_path / "run", iter([state]))
    Refusing.encoded.clear()
    later = checkpoint(state.parameters.values(), state.groups, origin=Origin("held", None, 2))
    append(tmp_path / "run", later, None, DeltaPolicy(f"{Refusing.name}:holds={holds}"), Execution(1))
    assert chain_file.read(tmp_path / "run").members[1].kind == "base"
    assert_same_state(open_checkpoint(tmp_path / "run"), later)


def test_deltas_without_bytes_are_at_one_place_and_are_not_taken_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A codec may need no byte for a parameter that did not change. Then deltas of several have the same offset."""
    monkeypatch.setitem(DELTA_CODECS, Refusing.name, f"{__name__}:Refusing")
    state = next(drifting(1))
    Refusing.encoded.clear()
    values = {name: read(tensor) for name, tensor in state.parameters["w"].states.items()}
    opposite = {name: -one for name, one in values.items()}
    held = [parameter("one", values), parameter("two", opposite), parameter("three", opposite)]
    for step in (1, 2):
        same = checkpoint(held, origin=Origin("held", None, step))
        append(tmp_path / "run", same, None, DeltaPolicy(f"{Refusing.name}:holds=99"), Execution(1))
    restored = open_checkpoint(tmp_path / "run")
    entries = manifest.load(tmp_path / "run" / "step-0000000002" / manifest.NAME).entries
    assert len({(entry.delta.extent.offset, entry.delta.extent.nbytes) for entry in entries}) == 1
    with Reader() as reader:
        for one, name, tensor in restored.tensors():
            expected = values if one.name == "one" else opposite
            assert bits(read(tensor, reader)) == bits(expected[name])


@dataclass(frozen=True)
class Coarse(DeltaCodec):
    """Changes in whole units of 2^-12."""

    name: ClassVar[str] = "test-coarse"
    lossless: ClassVar[bool] = False
    unit: ClassVar[float] = 2.0**-12

    def encode(self, change: StatePair) -> bytes:
        units = (
            np.round((values.astype(np.float64) - self._base(change.before, state)) / self.unit).astype(np.int32)
            for state, values in change.after.items()
        )
        return zlib.compress(b"".join(one.tobytes() for one in units))

    def decode(
        self, data: bytes, before: States, shape: Shape, form: StateTypes, wanted: frozenset[str] | None = None
    ) -> dict[str, Array]:
        units = np.frombuffer(zlib.decompress(data), np.int32).reshape(len(form), *shape)
        return {
            state: (self._base(before, state) + one * self.unit).astype(dtype)
            for one, (state, dtype) in zip(units, form.items(), strict=True)
        }

    def _base(self, states: States, state: str) -> Array:
        return states[state].astype(np.float64) if state in states else np.zeros((), np.float64)


@pytest.fixture
def coarse(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setitem(DELTA_CODECS, Coarse.name, f"{__name__}:Coarse")
    return Coarse.name


@pytest.mark.parametrize("coded", [False, True], ids=["exact anchor", "coded anchor"])
def test_losses_do_not_add_up_and_are_recorded(coded: bool, coarse: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoints = chain_of(run, drifting(12), coarse, base="coded" if coded else "exact")
    largest = []
    for step, state in enumerate(checkpoints, 1):
        restored = open_step(run, step, ReadOptions()).checkpoint
        true, kept = (read(one.parameters["w"].states["master"]) for one in (state, restored))
        largest.append(float(np.abs(true.astype(np.float64) - kept).max()))
        copied = read(restored.parameters["w"].states["model"])
        assert bits(copied) == bits(kept.astype(DTYPES["bfloat16"]))
        if step == 1 and not coded:
            assert not restored.errors
            continue
        assert restored.errors["w", "master"]["max_abs"] == largest[-1]
        assert set(restored.errors) == {("w", state) for state in state.parameters["w"].states}
        assert "approximate" in restored.notices[0]
    assert 0 < max(largest) <= Coarse.unit
    report = json.loads(ckpt("log", run, "--json").out)
    assert [step["exact"] for step in report["steps"]] == [not coded] + [False] * 11
    assert report["steps"][-1]["errors"]["master"]["max_abs"] == largest[-1]
    assert "approximate" in ckpt("log", run).out
    assert "approximate" in ckpt("restore", run, tmp_path / "out").err
    assert ckpt("verify", run).code == 0


def test_exact_names_and_untrained_parameters_lose_nothing(coarse: str, tmp_path: Path) -> None:
    states = list(drifting(2))
    w = [state.parameters["w"].states for state in states]
    held = [[("lossy", "parameter"), ("kept", "parameter"), ("frozen", "frozen")] for _ in states]
    checkpoints = []
    for step, (of, names) in enumerate(zip(w, held, strict=True), 1):
        arrays = {state: read(tensor) for state, tensor in of.items()}
        checkpoints.append(
            checkpoint([parameter(n, arrays, role) for n, role in names], origin=Origin("held", None, step))
        )
    run = tmp_path / "run"
    for state in checkpoints:
        append(run, state, None, DeltaPolicy(coarse, ("^kept",)), Execution())
    restored = open_checkpoint(run)
    assert {name for name, _ in restored.errors} == {"lossy"}
    assert contents(restored) != contents(checkpoints[1])
    for name in ("kept", "frozen"):
        for state, tensor in checkpoints[1].parameters[name].states.items():
            assert bits(read(restored.parameters[name].states[state])) == bits(read(tensor))


def test_each_nth_member_is_a_base(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoints = chain_of(run, drifting(7), base_every=3)
    assert "".join(member.kind[0] for member in chain_file.read(run).members) == "bddbddb"
    for step, state in enumerate(checkpoints, 1):
        assert_same_state(open_step(run, step, ReadOptions()).checkpoint, state)


def test_a_reader_of_the_page_reads_deltas(tmp_path: Path) -> None:
    """One that knows only docs/format.md, and asks us what the bytes of a chunk mean."""

    def decode(config, data, shape, dtype, base, base_dtype):  # type: ignore[no-untyped-def]
        base = None if base is None else np.frombuffer(base, DTYPES[base_dtype]).reshape(shape)
        return from_config(config).decode(data, tuple(shape), DTYPES[dtype], base).tobytes()

    def replay(config, data, shape, before, form):  # type: ignore[no-untyped-def]
        known = {state: np.frombuffer(values, DTYPES[form[state]]).reshape(shape) for state, values in before.items()}
        types = {state: DTYPES[name] for state, name in form.items()}
        decoded = delta_from_config(typed(config)).decode(data, known, tuple(shape), types)
        return {state: np.ascontiguousarray(values).tobytes() for state, values in decoded.items()}

    def typed(fields):  # type: ignore[no-untyped-def]
        return {key: tuple(v["$tuple"]) if isinstance(v, dict) and "$tuple" in v else v for key, v in fields.items()}

    saved = save_run(tmp_path, 3)
    for path in saved:
        ckpt("append", tmp_path / "run", path)
    decoder = UniversalDecoder(tmp_path / "run" / "step-0000000003", decode, replay)
    assert any("delta" in entry for entry in decoder.entries.values())
    for one, state, tensor in open_checkpoint(saved[2]).tensors():
        assert decoder.values(one.name, to_stored(state)) == read(tensor).tobytes()


def test_steps_only_grow(tmp_path: Path) -> None:
    saved = save_run(tmp_path, 3)
    run = tmp_path / "run"
    assert ckpt("append", run, saved[1]).code == 0
    before = sorted(os.listdir(run))
    for path, options, words in (
        (saved[1], (), "step 2 exists already"),
        (saved[0], (), "step 1 is before 2"),
        (saved[2], ("--step", "1"), "step 1 is before 2"),
    ):
        done = ckpt("append", run, path, *options)
        assert done.code == 22
        assert words in done.err
        assert sorted(os.listdir(run)) == before
    assert ckpt("append", run, saved[0], "--step", "9").code == 0
    assert [member.step for member in chain_file.read(run).members] == [2, 9]


def test_a_checkpoint_without_a_step_needs_one(tmp_path: Path) -> None:
    state = checkpoint(next(drifting(1)).parameters.values(), origin=Origin("held"))
    save(state, tmp_path / "w.safetensors", writable("safetensors"))
    done = ckpt("append", tmp_path / "run", tmp_path / "w.safetensors")
    assert done.code == 22
    assert "--step N" in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_dry_run_tells_what_will_be_stored_and_writes_nothing(tmp_path: Path) -> None:
    saved, run, alone = save_run(tmp_path, 3), tmp_path / "run", tmp_path / "alone"
    for path, options in zip(saved, ((), (), ("--preset", "resume")), strict=True):
        before = sorted(run.rglob("*"))
        arguments = ("append", run, path, *options, "--json")
        dry = json.loads(ckpt(*arguments, "--dry-run").out)
        assert sorted(run.rglob("*")) == before
        assert run.exists() == (path != saved[0])
        report = json.loads(ckpt(*arguments).out)
        for key in ("step", "kind", "raw_nbytes"):
            assert dry[key] == report[key]
        assert ("approximate" in dry) == (not report["exact"])
        assert dry["stored_nbytes"] == pytest.approx(report["stored_nbytes"], rel=0.15)
        assert dry["ratio"] == pytest.approx(dry["raw_nbytes"] / dry["stored_nbytes"], rel=1e-3)
    dry = json.loads(ckpt("diff", run, saved[0], "-o", alone, "--dry-run", "--json").out)
    assert not alone.exists()
    report = json.loads(ckpt("diff", run, saved[0], "-o", alone, "--json").out)
    assert dry["stored_nbytes"] == pytest.approx(report["stored_nbytes"], rel=0.15)


def test_a_folder_that_holds_other_things_is_no_place_for_a_chain(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, 1)
    done = ckpt("append", tmp_path, path)
    assert done.code == 30
    assert "is not a chain" in done.err
    assert os.listdir(tmp_path) == [path.name]


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    saved = save_run(tmp_path, 2)
    run = tmp_path / "run"
    ckpt("append", run, saved[0])
    with change(run, Execution()):
        for command in (("append", run, saved[1]), ("compact", run)):
            assert ckpt(*command).code == 11
    assert ckpt("append", run, saved[1]).code == 0


def test_second_to_begin_a_chain_leaves_the_lock_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It made the folder, and the other one was faster with the lock: without its file, a third one would join in."""
    run, make, first = tmp_path / "run", chain_folder.make, ExitStack()

    def make_and_wait(run: Path) -> bool:
        is_new = make(run)
        monkeypatch.setattr(chain_folder, "make", make)
        first.enter_context(change(run, Execution(), create=True))
        return is_new

    monkeypatch.setattr(chain_folder, "make", make_and_wait)
    with first:
        for _ in range(2):
            with pytest.raises(LockedError), change(run, Execution(), create=True):
                pass
        assert os.listdir(run) == ["chain.lock"]


def test_append_names_and_removes_leftovers_of_a_crash(tmp_path: Path) -> None:
    saved = save_run(tmp_path, 3)
    run = tmp_path / "run"
    ckpt("append", run, saved[0])
    before = (run / chain_file.NAME).read_bytes()
    ckpt("append", run, saved[1])
    (run / chain_file.NAME).write_bytes(before)  # as if the machine had stopped just before
    (run / ".step-0000000009.ckpt-partial").mkdir()
    (run / "mine").write_text("a file of the user's")
    assert contents(open_checkpoint(run)) == contents(open_checkpoint(saved[0]))
    done = ckpt("append", run, saved[2])
    assert done.code == 0
    assert "removed step-0000000002" in done.err
    assert "removed .step-0000000009" in done.err
    assert sorted(os.listdir(run)) == ["chain.json", "chain.lock", "mine", "step-0000000001", "step-0000000003"]
    assert contents(open_checkpoint(run)) == contents(open_checkpoint(saved[2]))


def test_a_delta_on_its_own(tmp_path: Path) -> None:
    saved = save_run(tmp_path, 3)
    base, second, third = tmp_path / "base", tmp_path / "second", tmp_path / "third"
    done = ckpt("diff", saved[0], saved[1], "-o", second)
    assert done.code == 22
    assert "ckpt compress" in done.err
    assert not second.exists()
    ckpt("compress", saved[0], f"{base}/")
    assert ckpt("diff", base, saved[1], "-o", second).code == 0
    assert ckpt("diff", second, saved[2], "-o", third, "--codec", "difference").code == 0
    for path, source in ((second, saved[1]), (third, saved[2])):
        assert_same_state(open_checkpoint(path), open_checkpoint(source))
        assert ckpt("verify", path).code == 0
    assert json.loads((third / manifest.NAME).read_text())["parent"] == {
        "content": content(second),
        "path": "../second",
    }
    done = ckpt("restore", third, tmp_path / "whole")
    assert done.code == 0
    assert "exact" in done.out
    assert json.loads((tmp_path / "whole" / manifest.NAME).read_text())["version"] == 1
    ckpt("append", tmp_path / "run", saved[0])
    assert ckpt("diff", tmp_path / "run", saved[1], "-o", tmp_path / "fourth").code == 0
    assert_same_state(open_checkpoint(tmp_path / "fourth"), open_checkpoint(saved[1]))


def test_a_codec_that_is_not_there(tmp_path: Path) -> None:
    (path,) = save_run(tmp_path, 1)
    done = ckpt("append", tmp_path / "run", path, "--codec", "no-such")
    assert done.code == 2
    assert DEFAULT_DELTA in done.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("diff", SAMPLES / "universal-1-plain", "-o", "d"),
        ("diff", SAMPLES / "universal-1-plain"),
        ("append", "c"),
        ("diff", "a", "b", "--into", "c"),
    ],
)
def test_wrong_usage(arguments: tuple[str | Path, ...]) -> None:
    assert ckpt(*arguments).code == 2


def peak(run: Path) -> int:
    """Bytes of memory at most while the last state of a chain is read, slab by slab."""
    tensors = [tensor for _, _, tensor in open_checkpoint(run).tensors()]
    tracemalloc.start()
    with Reader() as reader:
        for tensor in tensors:
            out = np.empty(tensor.shape, tensor.dtype)
            tensor.read_into(out, reader)
            del out
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return most


@pytest.mark.slow
def test_memory_does_not_grow_with_the_chain(tmp_path: Path) -> None:
    states = list(drifting(12, CHUNK))
    chain_of(tmp_path / "short", iter(states[:2]))
    chain_of(tmp_path / "long", iter(states))
    short, long = peak(tmp_path / "short"), peak(tmp_path / "long")
    assert long < 1.2 * short


def counted(run: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How many bytes of a chain are read from now on."""
    numbers = {"nbytes": 0}
    original = Reader.read_into

    def counting(self: Reader, path: Path, offset: int, out: memoryview, seal: object = None) -> None:
        if path.is_relative_to(run):
            numbers["nbytes"] += len(out)
        original(self, path, offset, out, seal)  # type: ignore[arg-type]

    monkeypatch.setattr(Reader, "read_into", counting)
    return numbers


def packed(run: Path) -> int:
    """Bytes of all packs."""
    return sum(path.stat().st_size for path in run.glob("*/packs/*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "elements"),
    [
        *((form, 5 * CHUNK + 100) for form in ("universal", "dcp", "torch")),
        ("universal", 5 * CHUNK + 101),  # its states are not aligned, and so are not where they would be in order
    ],
)
def test_each_stored_byte_is_read_once(
    form: str, elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    checkpoints = chain_of(run, drifting(3, elements))
    numbers = counted(run, monkeypatch)
    assert ckpt("restore", run, tmp_path / "out", "--to", form).code == 0
    stored = packed(run)
    assert 0.9 * stored < numbers["nbytes"] <= 1.05 * stored
    assert contents(open_checkpoint(tmp_path / "out")) == contents(checkpoints[-1])
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]
    if form == "universal":
        save(checkpoints[-1], tmp_path / "saved", writable(form))
        files = [path.relative_to(tmp_path / "saved") for path in (tmp_path / "saved").rglob("*.safetensors")]
        assert files
        assert all((tmp_path / "out" / file).read_bytes() == (tmp_path / "saved" / file).read_bytes() for file in files)


def test_verify_reads_each_byte_for_its_checksum_and_once_to_decode_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    chain_of(run, drifting(3, 5 * CHUNK + 100))
    numbers = counted(run, monkeypatch)
    assert ckpt("verify", run).code == 0
    stored = packed(run)
    assert 1.9 * stored < numbers["nbytes"] <= 2.1 * stored


def test_the_default_codec_loses_nothing() -> None:
    assert parse_delta(DEFAULT_DELTA).lossless


def test_member_at_names_the_steps_that_are_nearest() -> None:
    steps = (1, 2, 3, 4, 50, 51, 60, 90, 91)
    of = [chain_file.Member(f"{step}", "base", step, "", None, (), 1, 1, "") for step in steps]
    run = chain_file.ChainIndex(tuple(of))
    assert member_at(Path("run"), run, 60) is of[6]
    assert member_at(Path("run"), run, None) is of[-1]
    with pytest.raises(NotFoundError) as refused:
        member_at(Path("run"), run, 61)
    assert refused.value.hint == "The nearest are 50, 51, 60, 90, 91; `ckpt log` lists all."


def test_an_estimate_takes_samples_from_all_of_a_model() -> None:
    sizes = [(100,), (800,), (100,)]
    samples = sample_evenly([parameter(str(i), {"model": np.zeros(size, np.uint8)}) for i, size in enumerate(sizes)])
    assert len(samples) == CHUNKS
    assert [(one.name, at) for one, at in samples][::7] == [("0", 62), ("2", 37)]


def test_restore_refuses_a_path_without_a_chain(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="there is no chain at this path"):
        Chain(tmp_path / "run").restore(None, tmp_path / "target.pt")


def test_a_delta_refuses_a_parent_that_is_no_universal_checkpoint(tmp_path: Path) -> None:
    values = checkpoint([parameter("w", {"model": np.ones(4, np.float32)})])
    save(values, tmp_path / "parent")
    assert parent_folder(open_checkpoint(tmp_path / "parent")) == tmp_path / "parent"
    with pytest.raises(UnsupportedError, match="a delta's parent is a universal checkpoint or a chain"):
        parent_folder(values)


@pytest.mark.slow
def test_a_delta_names_the_step_that_it_was_given(tmp_path: Path) -> None:
    ran = ckpt(
        "diff", f"{SAMPLES / 'universal-1-delta'}@10", f"{SAMPLES / 'universal-1-delta'}@12", "-o", tmp_path / "d"
    )
    assert ran.code == 0
    assert contents(open_checkpoint(tmp_path / "d")) == contents(open_checkpoint(SAMPLES / "universal-1-delta@12"))
    run = SAMPLES / "recorded-1/run.chain"
    with pytest.raises(UnsupportedError, match="this one is computed from a log"):
        parent_folder(open_checkpoint(run.with_name("run.chain@5")))
    assert parent_folder(open_checkpoint(run.with_name("run.chain@3"))).name == "step-0000000003"
