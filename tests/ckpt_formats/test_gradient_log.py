"""The log of gradients: layouts and records go round; what is cut, damaged, swapped or forged is never a value."""

import json
import os
import random
import shutil
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_formats.containers import sealed_json
from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, NotFoundError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.tensor import ArrayBlob, Tensor, read
from ckpt_formats.core.values import TensorName
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.gradients import layout as layouts
from ckpt_formats.universal.gradients import random_states
from ckpt_formats.universal.gradients.held import HeldState, SegmentTail
from ckpt_formats.universal.gradients.layout import (
    ALONE,
    CHUNK,
    EXACTNESS,
    STEPPED,
    LoggedOptimizer,
    LoggedTensor,
    OptimizerVector,
    RankLayout,
    SegmentLayout,
    VectorPart,
)
from ckpt_formats.universal.gradients.record import FileHead, Kind, RankLog, hash_values, record_parts, scan
from ckpt_formats.universal.gradients.recorded_values import DELTA, WHOLE, encode_chunk
from ckpt_formats.universal.gradients.replay import SegmentReplay, StartState
from ckpt_formats.universal.gradients.segment import Segment, open_segment, rank_file
from ckpt_formats.universal.gradients.state import Base, checkpoint_at
from damage import BROKEN, NOT_FOUND, OUTPUT, UNSAFE, UNSUPPORTED, ckpt
from effort import TIMES
from gradient_logs import OPTIONS, Entry, Log, changes, coded, fingerprint, restored, same, small_log, values_of, vector
from held import folder

MUTATIONS = 84 * TIMES
MOST_MEMORY = 32 << 20
"""Bytes that reading a log of a few kilobytes may take."""
REFUSED = (NOT_FOUND, BROKEN, UNSAFE, UNSUPPORTED, OUTPUT)


# Layouts

SIZES = st.one_of(
    st.integers(1, 40), st.sampled_from([ALONE - 1, ALONE, ALONE + 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
)


def rank_of(sizes: list[int]) -> RankLayout:
    pieces = [VectorPart(i, 0, 0, size, size, Box((0,), (size,))) for i, size in enumerate(sizes)]
    return RankLayout((OptimizerVector(0, 0, 0),), tuple(pieces))


@given(st.lists(SIZES, max_size=60))
def test_chunks_tile_a_vector_and_hold_each_element_once(sizes: list[int]) -> None:
    rank = rank_of(sizes)
    at, slices = 0, list[tuple[int, int, int]]()
    for chunk in range(rank.chunk_count):
        start, stop = rank.chunk_bounds(chunk)
        assert start == at < stop <= start + CHUNK
        assert {rank.chunk_of(start), rank.chunk_of((start + stop) // 2), rank.chunk_of(stop - 1)} == {chunk}
        offset, ranges = 0, list(rank.ranges(chunk))
        for one in ranges:
            assert one.offset == offset
            assert one.vectorized == one.size
            offset += one.size
            slices.append((one.part.tensor, one.start, one.stop))
        assert offset == stop - start
        if any(one.part.size >= ALONE for one in ranges):
            assert len(ranges) == 1
        at = stop
    assert at == rank.size == sum(sizes)
    ends = dict[int, int]()
    for tensor, start, stop in slices:
        assert ends.get(tensor, 0) == start < stop
        ends[tensor] = stop
    assert ends == dict(enumerate(sizes))


def test_layout_takes_a_rank_that_has_nothing() -> None:
    assert (rank_of([]).chunk_count, rank_of([]).size) == (0, 0)


TEXT = st.text(st.characters(codec="utf-8"), max_size=8)


@st.composite
def some_layouts(draw: st.DrawFn) -> SegmentLayout:
    names = draw(st.lists(TEXT, min_size=1, max_size=5, unique=True))
    tensors = [
        LoggedTensor(
            name,
            draw(st.sampled_from(["float32", "bfloat16"])),
            tuple(draw(st.lists(st.integers(0, 5), max_size=3))),
            draw(st.sampled_from(STEPPED)),
        )
        for name in names
    ]
    world = draw(st.integers(1, 3))
    pieces: list[list[VectorPart]] = [[] for _ in range(world)]
    for number, tensor in enumerate(tensors):
        for box in _halves(draw, Box.whole(tensor.shape)):
            cuts = sorted({0, box.size, *draw(st.lists(st.integers(0, box.size), max_size=3))})
            for start, stop in pairwise(cuts):
                whole = draw(st.integers(0, stop - start))
                pieces[draw(st.integers(0, world - 1))].append(VectorPart(number, 0, start, stop, whole, box))
    count = draw(st.integers(0, 1 << 40))
    options = st.dictionaries(TEXT, st.one_of(st.integers(), st.floats(allow_nan=False), TEXT), max_size=2)
    are_whole = all(part.size == part.box.size for one in pieces for part in one)
    threads = draw(st.one_of(st.none(), st.integers(1, 64))) if are_whole else None
    optimizer = LoggedOptimizer(
        *(draw(TEXT), draw(TEXT), draw(st.sampled_from(EXACTNESS)), draw(options)),
        *((tuple(names[:1]), tuple(names[1:])), threads),
    )
    whole = frozenset[int]() if threads is None else frozenset({0})
    ranks = tuple(RankLayout((OptimizerVector(0, 1, count),), tuple(one), whole) for one in pieces)
    return SegmentLayout(
        draw(TEXT), draw(st.integers(0, 1 << 60)), draw(TEXT), tuple(tensors), (optimizer,), ranks,
        draw(st.dictionaries(TEXT, TEXT, max_size=2)), draw(options), draw(st.none() | TEXT),
    )  # fmt: skip


def _halves(draw: st.DrawFn, box: Box) -> Iterator[Box]:
    if not box.size:
        return
    if not box.start or not draw(st.booleans()):
        yield box
        return
    axis = draw(st.integers(0, len(box.start) - 1))
    at = draw(st.integers(box.start[axis], box.stop[axis]))
    for low, high in ((box.start[axis], at), (at, box.stop[axis])):
        start = (*box.start[:axis], low, *box.start[axis + 1 :])
        yield from _halves(draw, Box(start, (*box.stop[:axis], high, *box.stop[axis + 1 :]))) if low < high else ()


@given(some_layouts())
def test_layout_is_read_back_as_it_was_written(layout: SegmentLayout) -> None:
    with folder() as at:
        (at / layouts.NAME).write_bytes(layouts.dump(layout))
        assert layouts.load(at / layouts.NAME) == layout


# Records

META = st.dictionaries(
    st.sampled_from(["groups", "random", "notes", "state", "x"]),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-(1 << 60), 1 << 60), TEXT),
        lambda inner: st.lists(inner, max_size=3),
    ),
)
RECORDS = st.lists(
    st.tuples(st.sampled_from(Kind), st.integers(0, (1 << 64) - 1), META, st.lists(st.binary(max_size=20), max_size=4)),
    max_size=6,
)


@given(RECORDS)
def test_records_are_read_back_as_they_were_written(
    wanted: list[tuple[Kind, int, dict[str, Any], list[bytes]]],
) -> None:
    head = FileHead(2, 5, 7, bytes(range(16)))
    content = head.dump()
    previous = int.from_bytes(content[56:], "little")
    for kind, step, meta, chunks in wanted:
        hashes = [hash_values(np.frombuffer(chunk, np.uint8)) for chunk in chunks]
        parts, previous = record_parts(kind, step, meta, chunks, hashes, previous)
        content += b"".join(map(bytes, parts))
        assert len(content) % 8 == 0
    with folder() as at, Reader(check=False) as reader:
        path = at / "rank"
        path.write_bytes(content)
        log = scan(path, head, check_from=0)
        assert (log.end, log.last_hash, log.torn) == (len(content), previous, None)
        for record, (kind, step, meta, chunks) in zip(log.records, wanted, strict=True):
            assert (record.kind, record.step, record.count) == (kind, step, len(chunks))
            assert record.read_meta(path, reader) == meta
            for i, chunk in enumerate(chunks):
                data, digest = record.read_chunk(path, i, 20, reader)
                assert (data.tobytes(), digest) == (chunk, hash_values(data))


@pytest.fixture(scope="module")
def small() -> Log:
    return small_log()


@pytest.fixture
def written(small: Log, tmp_path: Path) -> Path:
    """The folder of the segment of a chain, `run`."""
    return small.write(tmp_path / "run")


def head_of(segment: Path, rank: int) -> FileHead:
    return FileHead(rank, 2, 0, layouts.identity((segment / layouts.NAME).read_bytes()))


def ends_of(log: RankLog) -> list[int]:
    """Where each record ends."""
    return [*(record.begin - 64 for record in log.records[1:]), log.end]


def test_log_has_every_step_of_the_run(small: Log, written: Path) -> None:
    for step, truth in enumerate(small.truth):
        assert same(values_of(restored(written.parent, step)), truth)
        assert restored(written.parent, step).extras.get("seen") == (step or None)


def test_log_has_the_random_states_of_every_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_states, "MAX_CHANGES", 2)
    run = small_log(7).write(tmp_path / "run").parent
    tail = SegmentTail(run / "gradients-0000000000", None)
    for step in range(1, 8):
        assert tail.poll(1) >= step
        tail.move_to(step)
        with Reader() as reader:
            of_shadow = tail.last_step().random_states(step, reader)
        assert encode(of_shadow) == encode(restored(run, step).extras["random_states"])
        for rank in range(2):
            states: Any = of_shadow[f"rank-{rank:05d}"]
            assert states["torch"].tolist() == list(range(rank + step, rank + step + 16))
            assert states["numpy"]["position"] == (step if step % 2 else step - 1)
        applied = [one for one in tail.last_step().records(1, Kind.RANDOM) if one.step <= step]
        assert len(applied) <= 3  # those that later ones replace are forgotten


@pytest.mark.parametrize(
    "meta",
    [
        {"full": [["torch", 1 << 20], ["numpy", 16]]},
        {"full": [["torch", 16], ["torch", 16]]},
        {"full": [["torch"]]},
        {"full": []},
        {"fields": {"numpy": []}},
        {"fields": {"numpy": {"keys": {"$exec": 1}}}},
        {"twists": [1]},
        {"twists": {"torch": 1 << 40}},
    ],
    ids=str,
)
def test_log_refuses_random_states_that_lie(meta: dict[str, Any], small: Log, tmp_path: Path) -> None:
    log = small.copy()
    entry = next(one for one in log.ranks[0] if one.kind is Kind.RANDOM)
    entry.meta = entry.meta | meta
    _refused(log.write(tmp_path / "run"), step=1)


@pytest.mark.parametrize(
    "meta", [{"changes": 5}, {"changes": [5]}, {"changes": [[[], 0]]}, {"values": 5}, {"extras": [[]]}], ids=str
)
def test_held_log_refuses_values_that_lie(meta: dict[str, Any], small: Log, tmp_path: Path) -> None:
    log = small.copy()
    log.ranks[0].insert(-1, Entry(Kind.VALUES, 1, meta))
    held = HeldState(log.write(tmp_path / "run"), None)
    assert held.find_start(8)
    held.load(1)
    held.advance(2, 1)
    with pytest.raises(CorruptError):
        held.checkpoint()


def test_log_refuses_notes_whose_groups_are_no_list(small: Log, tmp_path: Path) -> None:
    log = small.copy()
    entry = next(one for one in log.ranks[0] if one.kind is Kind.NOTES)
    entry.meta = entry.meta | {"groups": 7}
    log.write(tmp_path / "run")
    for command in (("restore", tmp_path / "run", tmp_path / "out"), ("verify", tmp_path / "run")):
        done = ckpt(*command)
        assert done.code == BROKEN, done
        assert "its notes are damaged" in done.out + done.err


def test_a_note_takes_the_place_of_an_extra_with_its_tensors(small: Log, written: Path) -> None:
    """The base has tensors in extras `seen` and `kept`. One is in both."""
    segment, tensor = open_segment(written), Tensor.of(ArrayBlob(np.ones(2, np.float32)))
    start = checkpoint_at(segment, 0, None)
    extras = {"seen": [TensorName("own"), TensorName("both")], "kept": TensorName("both")}
    others = {name: Parameter(name, "extra", {"model": tensor}) for name in ("own", "both")}
    base = replace(start, parameters={**start.parameters, **others}, extras={**start.extras, **extras})
    state = checkpoint_at(segment, 2, Base(0, base))
    assert state.extras["seen"] == 2
    assert [name for name in others if name in state.parameters] == ["both"]


def test_notes_that_come_after_buffers_of_the_next_step_stay_when_a_log_is_cut(small: Log, tmp_path: Path) -> None:
    """As where a run notes a step after the forward pass of the next one."""
    log, run = small.copy(), tmp_path / "run"
    place = next(at for at, one in enumerate(log.ranks[0]) if one.kind is Kind.NOTES and one.step == 1)
    log.ranks[0].insert(place, Entry(Kind.VALUES, 2, {"extras": {"of the next step": 2}}))
    log.write(run)
    before = restored(run, 1).extras
    assert ckpt("compact", run, "--upto", 1).code == 0
    assert same(values_of(restored(run, 1)), small.truth[1])
    assert before.keys() > {"random_states"}
    assert str(restored(run, 1).extras) == str(before)


def test_values_of_a_step_may_be_differences_from_those_of_the_next_one(small: Log, tmp_path: Path) -> None:
    """A run notes step 1 after a forward pass of step 2, changes a buffer, and begins step 2 again."""
    log, values = small.copy(), [np.full(4, number, np.float32) for number in range(3)]
    place = next(at for at, one in enumerate(log.ranks[0]) if one.kind is Kind.NOTES and one.step == 1)
    rows = {"tensors": [["seen", "param", "buffer", "float32", [4]]]}
    for number, (at, step, meta) in enumerate([(1, 0, rows), (place + 1, 2, {}), (place + 2, 1, {})]):
        before = values[number - 1] if number else None
        chunk, digest = encode_chunk("param", values[number], before), hash_values(values[number])
        coding = WHOLE if before is None else DELTA
        log.ranks[0].insert(at, Entry(Kind.VALUES, step, meta | {"changes": [[0, coding]]}, [chunk], [digest]))
    held = HeldState(log.write(tmp_path / "run"), None)
    assert held.find_start(1)
    held.load(1)
    for step, expected in enumerate([0, 2, 2, 2]):
        held.tail.poll(1)
        held.advance(step, 1)
        for state in (restored(tmp_path / "run", step), held.checkpoint()):
            assert read(state.parameters["seen"].weight).tolist() == [expected] * 4, step


def test_random_states_of_an_interrupted_step_count_for_those_that_follow_them(small: Log, tmp_path: Path) -> None:
    """An error has interrupted step 2; the run notes step 1 once more, with changes since the states of step 2."""
    small.write(tmp_path / "run")
    log = small.copy()
    later = [one for one in log.ranks[0] if one.kind is Kind.RANDOM and one.step > 1]
    later[1].step = 1
    log.write(tmp_path / "noted")
    last = restored(tmp_path / "run", 3).extras["random_states"]
    assert str(restored(tmp_path / "noted", 1).extras["random_states"]["rank-00000"]) == str(last["rank-00000"])


@pytest.mark.parametrize("count", [[1], None, {}, "x", True], ids=str)
def test_base_whose_count_of_steps_is_no_number_is_refused(count: Any, written: Path) -> None:
    segment = open_segment(written)
    base = checkpoint_at(segment, 0, None)
    base.parameters["w"].values["step"] = count
    with pytest.raises(CorruptError, match="`w` has a count of steps that is no number"):
        checkpoint_at(segment, 2, Base(0, base))


@pytest.mark.parametrize("zeros", [1, 500, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 63, 64))])
def test_cut_at_every_byte_a_file_has_the_records_before(zeros: int, written: Path) -> None:
    path = written / rank_file(1)
    content, head = path.read_bytes(), head_of(written, 1)
    whole = scan(path, head)
    places = {*range(0, len(content) + 1, 7 if zeros else 1)}
    if zeros == 64:  # as many as the head has: the bytes around the end of each record count
        places |= {*range(72)} | {
            end + near for end in ends_of(whole) for near in range(-8, 9) if end + near <= len(content)
        }
    for at in sorted(places):
        kept = content[:at] + bytes(zeros)
        path.write_bytes(kept)
        # What is cut may have been zeros.
        count = sum(len(kept) >= end and kept[:end] == content[:end] for end in ends_of(whole))
        if at < 64 and any(kept[:64]) and len(kept) >= 64 and kept[:64] != content[:64]:
            with pytest.raises(CorruptError, match="its head is damaged"):
                scan(path, head)
            continue
        for check in (False, True):
            assert scan(path, head, check).records == whole.records[:count], at


@pytest.mark.slow
def test_log_file_has_the_records_before_a_flipped_bit(small: Log, written: Path) -> None:
    path, head, rng = written / rank_file(1), head_of(written, 1), random.Random(1)
    content, whole = path.read_bytes(), scan(path, head_of(written, 1))
    heads = {start + near for start in (0, 64, *ends_of(whole)) for near in range(64)}  # elsewhere every third byte
    for byte in (at for at in range(len(content)) if TIMES > 1 or at in heads or at % 3 == 0):
        bit = rng.randrange(8)
        for flipped in range(8) if byte % 16 == 0 or TIMES > 1 else (bit,):
            path.write_bytes(content[:byte] + bytes([content[byte] ^ 1 << flipped]) + content[byte + 1 :])
            if byte < 64:
                with pytest.raises(CorruptError):
                    scan(path, head)
                continue
            count = sum(end <= byte for end in ends_of(whole))
            assert scan(path, head, check_from=0).records == whole.records[:count]
            assert scan(path, head).records in (whole.records[:count], whole.records)


def test_values_that_were_not_flushed_are_read_and_others_only_if_asked(small: Log, tmp_path: Path) -> None:
    """The last record of a run that was killed says up to where the disk had the file: here, up to its fourth one."""
    log = small.copy()
    last, _ = log.ranks[1].pop(-2), log.ranks[1].pop()
    written = log.write(tmp_path / "without")
    path, head = written / rank_file(1), head_of(written, 1)
    flushed = ends_of(scan(path, head))[3]
    log.ranks[1].append(replace(last, meta={**last.meta, "flushed": flushed}))
    path.write_bytes(log.content(1, log.ranks[1], (written / layouts.NAME).read_bytes()))
    content, whole = path.read_bytes(), scan(path, head)
    assert [one.flushed for one in whole.records[-2:]] == [0, flushed]
    seen = list[tuple[bool, bool]]()
    for number, record in enumerate(whole.records):
        if record.count:  # its values begin behind its text and directory
            at = record.begin + record.meta_nbytes + 16 * record.count
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            was_flushed = record.begin - 64 < flushed
            found, checked = scan(path, head), scan(path, head, check_from=0)
            assert checked.records == whole.records[:number]
            assert found.records == (whole.records if was_flushed else checked.records)
            assert (checked.damaged is not None) == was_flushed, "what was flushed is not torn by the end of a writer"
            seen.append((was_flushed, record.begin - 64 == flushed))
    assert {(True, False), (False, True), (False, False)} == {*seen}


@pytest.mark.slow
def test_log_file_has_no_other_values_when_a_bit_is_flipped(small: Log, written: Path) -> None:
    path, rng = written / rank_file(0), random.Random(2)
    content = path.read_bytes()
    for _ in range(170 * TIMES):
        byte, bit = rng.randrange(len(content)), rng.randrange(8)
        path.write_bytes(content[:byte] + bytes([content[byte] ^ 1 << bit]) + content[byte + 1 :])
        for step, truth in enumerate(small.truth):
            try:
                actual = values_of(restored(written.parent, step))
            except CkptError:
                continue
            assert same(actual, truth), (byte, bit, step)


def test_a_start_that_is_not_whole_is_not_zeros(small: Log, written: Path) -> None:
    path = written / rank_file(0)
    content, ends = path.read_bytes(), ends_of(scan(path, head_of(written, 0)))
    for at in (10, 64, 100, *ends[:4], ends[4] - 1):
        path.write_bytes(content[:at])
        with pytest.raises(IncompleteError, match="state at step 0"):
            restored(written.parent, 0)
    path.write_bytes(content[: ends[4]])
    assert same(values_of(restored(written.parent, 0)), small.truth[0])


def _refused(segment: Path, *words: str, step: int = 2) -> None:
    with pytest.raises(CkptError) as refused:
        values_of(restored(segment.parent, step))
    assert all(word in f"{refused.value} {refused.value.hint}" for word in words), refused.value


def test_files_of_other_ranks_and_runs_are_refused_by_name(small: Log, written: Path, tmp_path: Path) -> None:
    first, second = (written / rank_file(rank) for rank in range(2))
    mine = [first.read_bytes(), second.read_bytes()]
    first.write_bytes(mine[1])
    second.write_bytes(mine[0])
    _refused(written, "rank-00000.ckg", "another run, rank or step")
    first.write_bytes(mine[0])
    other = small.copy()
    other.layout = SegmentLayout(
        "foreign", *[getattr(other.layout, name) for name in list(SegmentLayout.__dataclass_fields__)[1:]]
    )
    foreign = other.write(tmp_path / "foreign")
    shutil.copy(foreign / rank_file(1), second)
    _refused(written, "rank-00001.ckg", "another run, rank or step")
    shutil.copytree(foreign, written, dirs_exist_ok=True)
    _refused(written, "another log is in the place of this one")
    second.unlink()
    _refused(written, "rank-00001.ckg", "missing")


def test_records_of_another_file_do_not_follow(small: Log, written: Path, tmp_path: Path) -> None:
    other = small_log(seed=2)
    foreign = other.write(tmp_path / "other")
    assert (foreign / layouts.NAME).read_bytes() == (written / layouts.NAME).read_bytes()
    path, theirs = written / rank_file(1), foreign / rank_file(1)
    log, content, alien = scan(path, head_of(written, 1)), path.read_bytes(), theirs.read_bytes()
    for number, end in enumerate(ends_of(log)):
        end_there = ends_of(scan(theirs, head_of(written, 1)))[number]
        path.write_bytes(content[:end] + alien[end_there:])
        scanned = scan(path, head_of(written, 1))
        assert scanned.records == log.records[: number + 1]
        assert (scanned.torn is None) == (number + 1 == len(log.records))
        path.write_bytes(content[:end] + content[64:])  # its own, twice
        assert scan(path, head_of(written, 1)).records == log.records[: number + 1]


def _entries(small: Log, change: Any, run: Path) -> Path:
    log = small.copy()
    change(log.ranks)
    return log.write(run)


def test_steps_that_are_missing_twice_or_in_disorder_are_refused(small: Log, tmp_path: Path) -> None:
    at = [i for i, one in enumerate(small.ranks[1]) if one.kind is Kind.GRADIENTS]

    def swap(ranks: list[list[Entry]]) -> None:
        ranks[1][at[0]], ranks[1][at[1]] = ranks[1][at[1]], ranks[1][at[0]]

    _refused(
        _entries(small, lambda ranks: ranks[1].pop(at[1]), tmp_path / "gap"), "steps are missing", "rank-00001", step=3
    )
    _refused(
        _entries(small, lambda ranks: ranks[1].insert(at[1], ranks[1][at[1]]), tmp_path / "twice"), "steps", step=3
    )
    _refused(_entries(small, swap, tmp_path / "swapped"), "steps are missing", "rank-00001", step=3)


def test_a_log_of_another_model_does_not_fit_a_base(small: Log, tmp_path: Path) -> None:
    import torch

    good = {"w": torch.zeros(3, 4), "b": torch.zeros(5), "v": torch.zeros(2, 3, 2)}
    for name, tensors in {
        "shape": good | {"b": torch.zeros(6)},
        "name": {"w": good["w"], "c": good["b"], "v": good["v"]},
        "values": good,
        "type": good | {"w": good["w"].double()},
    }.items():
        run = tmp_path / name
        torch.save({"model": tensors, "step": 0}, tmp_path / f"{name}.pt")
        assert ckpt("append", run, tmp_path / f"{name}.pt").code == 0
        base = chain_file.load(run / chain_file.NAME).members[0]
        log = small.copy()
        log.layout = replace(log.layout, parent=base.content)
        segment = log.write(tmp_path / f"{name}.log")
        line = (chain_file.LoggedSteps(segment.name, "run", 0, None, base.content, base.time),)
        shutil.copytree(segment, run / segment.name)
        (run / chain_file.NAME).write_bytes(chain_file.dump(chain_file.ChainIndex((base,), line)))
        assert restored(run, 0).parameters.keys() == tensors.keys()
        with pytest.raises(CkptError, match=r"another model|not the one that the run had|float32"):
            values_of(restored(run, 2))
        assert ckpt("restore", run, tmp_path / f"{name}.out", "--step", 2).code in REFUSED
        assert not (tmp_path / f"{name}.out").exists()


# Fields that lie, under hashes that fit


def _sampled(fields: Any, seed: int, count: int) -> list[tuple[str, Any]]:
    """So many changes: of each place about as many."""
    ways, seen = list(changes(fields)), Counter[str]()
    random.Random(seed).shuffle(ways)
    turns = list[int]()
    for what, _ in ways:
        place = what.partition(" ")[0]
        turns.append(seen[place])
        seen[place] += 1
    chosen = [ways[at] for at in sorted(range(len(ways)), key=turns.__getitem__)[:count]]
    return [(what, change()) for what, change in chosen]


def _fields(content: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(content)
    del fields["checksum"]
    return fields


def _sealed(fields: dict[str, Any]) -> bytes | None:
    try:
        return sealed_json.dump(fields)
    except ValueError:  # NaN is no JSON
        return None


def assert_harmless(run: Path, log: Log, what: str, values: bool = True) -> int:
    """Each command ends well or with an error of ours, writes nothing then, and takes little; the code of `restore`.

    The two commands that only show what is there take turns.
    """
    out, shows = run.parent / "out", ("inspect", "log")[zlib.crc32(what.encode("utf-8", "replace")) % 2]
    for command in ([shows, run], ["verify", run, "--replay"]):
        done = ckpt(*command)
        assert done.code in (0, 1, *REFUSED), (what, command, done)
        assert "Traceback" not in done.err, (what, command, done.err)
    tracemalloc.start()
    done = ckpt("restore", run, out, "--to", "safetensors")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MOST_MEMORY, (what, peak)
    assert done.code in (0, *REFUSED), (what, done)
    assert "Traceback" not in done.err, (what, done.err)
    if done.code:
        assert not out.exists(), what
    elif values:
        _assert_true_values(run, log, what)
    shutil.rmtree(run)
    for path in run.parent.glob("*out*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return done.code


def _assert_true_values(run: Path, log: Log, what: str) -> None:
    """What has the name and the shape of a tensor of the run has a value that it had."""
    actual = values_of(restored(run, states_last(run)))
    for name, held in actual.items():
        for truth in log.truth:
            if name in truth and all(truth[name][s].tobytes() == held[s].tobytes() for s in held if s in truth[name]):
                break
        else:
            assert name not in log.truth[0] or held["param"].shape != log.truth[0][name]["param"].shape, (what, name)


def states_last(run: Path) -> int:
    from ckpt_formats.universal.chain import states

    return states.last_step(run, chain_file.load(run / chain_file.NAME))


@pytest.mark.slow
def test_layouts_that_lie_are_refused_or_do_no_harm(small: Log, tmp_path: Path) -> None:
    refused = 0
    for what, fields in _sampled(_fields(layouts.dump(small.layout)), 1, MUTATIONS):
        content = _sealed(fields)
        if content is not None:
            small.write(tmp_path / "run", content)
            # Which element is whose is stated nowhere else: pieces in another order are another, sound log.
            refused += assert_harmless(tmp_path / "run", small, what, values="parts reversed" not in what) != 0
    assert refused > MUTATIONS // 2


@pytest.mark.slow
def test_lists_of_a_chain_that_lie_are_refused_or_do_no_harm(small: Log, tmp_path: Path) -> None:
    run = tmp_path / "run"
    small.write(run)
    listed = _fields((run / chain_file.NAME).read_bytes())
    shutil.rmtree(run)
    for what, fields in _sampled(listed, 2, MUTATIONS // 2):
        content = _sealed(fields)
        if content is not None:
            small.write(run, chain=content)
            assert_harmless(run, small, what)


@pytest.mark.slow
def test_texts_of_records_that_lie_are_refused_or_do_no_harm(small: Log, tmp_path: Path) -> None:
    kinds = dict[int, int]()
    for number, one in enumerate(small.ranks[0]):
        kinds.setdefault(one.kind, number)
    for kind, number in kinds.items():
        meta = {"part": [0, 1], "optimizer": 0, "vectors": [0, 2], **small.ranks[0][number].meta}
        if kind is not Kind.GRADIENTS:
            meta = small.ranks[0][number].meta
        for what, fields in _sampled(meta, int(kind), MUTATIONS if kind is Kind.GRADIENTS else MUTATIONS // 3):
            log = small.copy()
            log.ranks[0][number].meta = fields
            try:
                log.write(tmp_path / "run")
            except ValueError:
                shutil.rmtree(tmp_path / "run", ignore_errors=True)
                continue
            assert_harmless(tmp_path / "run", small, f"{kind!r}: {what}", values="groups" not in what)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(change, id=name)
        for name, change in {
            "a rate of text": lambda groups: groups[0].update(lr="fast"),
            "one beta": lambda groups: groups[0].update(betas={"$tuple": [0.9]}),
            "no rate": lambda groups: groups[0].pop("lr"),
            "no groups": lambda groups: groups.clear(),
            "a group too many": lambda groups: groups.append(groups[0]),
            "betas of texts": lambda groups: groups[0].update(betas=["a", "b"]),
            "an endless rate": lambda groups: groups[0].update(lr={"$int": "0x" + "f" * 400}),
            "keys that are no texts": lambda groups: groups.__setitem__(0, {"$dict": [[{"$tuple": [1]}, 2], [3, 4]]}),
        }.items()
    ],
)
def test_log_refuses_options_that_are_none(change: Any, small: Log, tmp_path: Path) -> None:
    log = small.copy()
    entry = next(one for one in log.ranks[0] if one.kind is Kind.GRADIENTS)
    change(entry.meta["groups"])
    _refused(log.write(tmp_path / "run"), step=1)


def _first_gradients(log: Log, rank: int = 0) -> Entry:
    return next(one for one in log.ranks[rank] if one.kind is Kind.GRADIENTS)


@pytest.mark.parametrize(
    "meta",
    [
        {"part": [5, 1]},
        {"part": [0, 2]},
        {"part": [0]},
        {"vectors": [3]},
        {"vectors": [-1]},
        {"vectors": "all"},
        {"optimizer": 1},
        {"optimizer": True},
    ],
    ids=str,
)
def test_log_refuses_records_of_absent_tensors(meta: dict[str, Any], small: Log, tmp_path: Path) -> None:
    log = small.copy()
    _first_gradients(log).meta.update(meta)
    _refused(log.write(tmp_path / "run"), step=1)


def test_chunks_whose_values_do_not_fit_their_hash_are_refused(small: Log, tmp_path: Path) -> None:
    log = small.copy()
    other = coded(log.layout, 0, Kind.GRADIENTS, 1, {}, np.ones(13, np.float32))
    _first_gradients(log).chunks = other.chunks
    segment = log.write(tmp_path / "run")
    _refused(segment, "chunk 0 of rank 0", "do not fit their hash", "Step 0", step=1)
    done = ckpt("verify", tmp_path / "run", "--replay")
    assert done.code == 1 or done.code in REFUSED
    log = small.copy()
    _first_gradients(log).chunks = [b"\xff" * 9]
    _refused(log.write(tmp_path / "again"), "chunk 0 of rank 0", "cannot be decoded", step=1)


def test_log_cuts_directories_that_lie(small: Log, tmp_path: Path) -> None:
    segment = small.write(tmp_path / "run")
    path, head = segment / rank_file(0), head_of(segment, 0)
    for ends in ([5, 3], [1 << 63, 3], [3, 1 << 63], [(1 << 64) - 1, 8], [0, 0]):
        content = head.dump()
        parts, _ = record_parts(
            Kind.GRADIENTS, 1, {}, [b"abc", b"defgh"], [1, 2], int.from_bytes(content[56:], "little")
        )
        directory = np.frombuffer(bytearray(parts[2]), np.uint64).copy()
        directory[::2] = ends
        path.write_bytes(content + b"".join(map(bytes, _reindexed(parts, directory.tobytes()))))
        log = scan(path, head)
        assert log.records == (), ends
        assert log.torn is not None


def _reindexed(parts: list[Any], directory: bytes) -> list[Any]:
    """A record with another directory, under hashes that fit."""
    import xxhash

    from ckpt_formats.universal.gradients.record import HEAD

    fields = list(HEAD.unpack(bytes(parts[0])))
    fields[7] = xxhash.xxh3_64_intdigest(bytes(parts[1]) + directory)
    fields[-1] = 0
    head = HEAD.pack(*fields)[:56]
    return [head + xxhash.xxh3_64_intdigest(head).to_bytes(8, "little"), parts[1], directory, *parts[3:]]


def test_a_fingerprint_that_differs_names_step_and_tensor(small: Log, tmp_path: Path) -> None:
    log = small.copy()
    state = deepcopy(log.truth[2])
    state["b"]["exp_avg"][1] += 1
    at = next(i for i, one in enumerate(log.ranks[1]) if one.step == 3)
    log.ranks[1].insert(at, fingerprint(log.layout, 1, 2, state))
    segment = log.write(tmp_path / "run")
    _refused(segment, "step 2", "exp_avg", "`b`")
    assert same(values_of(restored(segment.parent, 1)), small.truth[1])


def test_gradients_in_parts_and_vectors_without_any(small: Log, tmp_path: Path) -> None:
    """A step of two calls; and one in which a group had no gradients: its tensors stand still."""
    log = small.copy()
    first = small.ranks[1].index(_first_gradients(small, 1))
    whole = log.ranks[1][first]
    both = vector(
        log.layout,
        1,
        {name: np.ones(shape, np.float32) for name, shape in {"w": (3, 4), "b": (5,), "v": (2, 3, 2)}.items()},
    )
    halves = [deepcopy(coded(log.layout, 1, Kind.GRADIENTS, 1, dict(whole.meta), both)) for _ in range(2)]
    for number, (half, vectors) in enumerate(zip(halves, ([0, 2], [1]), strict=True)):
        half.meta |= {"part": [number, 2], "vectors": vectors}
    log.ranks[1] = [*log.ranks[1][:first], halves[0]]
    segment = log.write(tmp_path / "half")
    assert open_segment(segment).last == 0
    log.ranks[1].append(halves[1])
    log.ranks[0] = log.ranks[0][: small.ranks[0].index(_first_gradients(small)) + 1]
    segment = log.write(tmp_path / "whole")
    assert open_segment(segment).last == 1
    in_parts = values_of(restored(segment.parent, 1))
    one = coded(log.layout, 1, Kind.GRADIENTS, 1, dict(whole.meta), both)
    log.ranks[1] = [*log.ranks[1][:first], one]
    assert same(values_of(restored(log.write(tmp_path / "one").parent, 1)), in_parts)
    log.ranks[1][-1].meta["vectors"] = [0, 2]
    still = values_of(restored(log.write(tmp_path / "still").parent, 1))
    assert still["b"]["param"].tobytes() == small.truth[0]["b"]["param"].tobytes()
    assert still["v"]["param"].tobytes() == in_parts["v"]["param"].tobytes()


def test_a_file_of_zeros_or_of_nothing_has_no_records(written: Path) -> None:
    path, head = written / rank_file(0), head_of(written, 0)
    for content in (b"", bytes(64), bytes(5000), path.read_bytes()[:63]):
        path.write_bytes(content)
        assert scan(path, head).records == ()
    path.unlink()
    with pytest.raises(IncompleteError):
        scan(path, head)
    os.mkfifo(path)
    with pytest.raises(CkptError):
        restored(written.parent, 1)


def test_verify_notes_a_log_that_ends_before_that_of_another_rank(written: Path) -> None:
    run, path = written.parent, written / rank_file(1)
    record = next(one for one in open_segment(written).records(1, Kind.GRADIENTS) if one.step == 2)
    path.write_bytes(path.read_bytes()[: record.begin - 64])
    done = ckpt("verify", run)
    assert done.code == 0, done
    assert "the log ends at step 1, but the run was at step 3: other ranks have it" in done.err
    assert "rank-00001.ckg: step 1" in done.err


def test_log_names_the_steps_when_one_is_missing(written: Path) -> None:
    with pytest.raises(NotFoundError, match="no step 4"):
        restored(written.parent, 4)
    assert ckpt("restore", f"{written.parent}@last~7", written.parent.parent / "out").code == NOT_FOUND


@pytest.mark.parametrize(
    "name",
    [
        *("os.system", "torch.optim.nope.X", "torch.optim.adamw.nope", "torch.optim.", "torch.optim..x", "torch.optim"),
        *("torch.optim.lr_scheduler.LRScheduler", "torch.optim.optimizer.Optimizer", "torch.optim.LBFGS"),
        *("torch.optim.SparseAdam", "torch.optim.AdamW", "torch.optim.adamw.AdamW.step", "torch.optim.sgd.torch.nn"),
    ],
)
@pytest.mark.parametrize("options", [{}, {"lr": "x"}, {"lr": -1}, {"lr": 0.1, "betas": [5]}], ids=str)
def test_log_refuses_classes_that_it_makes_up(name: str, options: Any, small: Log, tmp_path: Path) -> None:
    log = small.copy()
    fields = {key: getattr(log.layout, key) for key in SegmentLayout.__dataclass_fields__}
    optimizer = log.layout.optimizers[0]
    forged = LoggedOptimizer(name, "torch", optimizer.exactness, optimizer.figures, optimizer.groups)
    log.layout = SegmentLayout(**fields | {"optimizers": (forged,)})
    for entries in log.ranks:
        for entry in entries:
            if entry.kind is Kind.GRADIENTS:
                entry.meta["groups"] = [options, options]
    _refused(log.write(tmp_path / "run"), step=3)


def test_a_tensor_that_is_stepped_as_a_whole_has_one_chunk() -> None:
    sizes = (5, CHUNK + 3, 7, ALONE)
    parts = tuple(VectorPart(n, n, 0, size, 0, Box.whole((size,))) for n, size in enumerate(sizes))
    vectors = tuple(OptimizerVector(n % 2, 0, 0) for n in range(4))
    rank = RankLayout(vectors, parts, frozenset({1}))
    bounds = [rank.chunk_bounds(index) for index in range(rank.chunk_count)]
    assert [stop - start for start, stop in bounds] == list(sizes)
    assert [rank.chunk_of(start) for start, _ in bounds] == [rank.chunk_of(stop - 1) for _, stop in bounds]
    split = RankLayout(vectors, parts, frozenset({0}))
    assert split.chunk_count == 5


def test_a_part_of_a_tensor_that_is_stepped_as_a_whole_is_refused(small: Log, tmp_path: Path) -> None:
    log = small.copy()
    log.layout = replace(log.layout, optimizers=(replace(log.layout.optimizers[0], threads=2),))
    _refused(log.write(tmp_path / "split"), "a tensor that is stepped as a whole")
    for number in (0, -1, 1025):
        log.layout = replace(log.layout, optimizers=(replace(log.layout.optimizers[0], threads=number),))
        _refused(log.write(tmp_path / str(number)), "threads")


def test_a_dtype_that_the_method_does_not_step_is_refused(small: Log, tmp_path: Path) -> None:
    log = small.copy()
    tensors = tuple(replace(one, stepped="bfloat16") for one in log.layout.tensors)
    log.layout = replace(log.layout, tensors=tensors)
    _refused(log.write(tmp_path / "narrow"), "the method adam-fused: it steps parts of float32 tensors")
    log.layout = replace(log.layout, tensors=(replace(tensors[0], stepped="float64"), *tensors[1:]))
    _refused(log.write(tmp_path / "unknown"), "is stepped in an unknown dtype")


def test_a_shape_that_no_array_can_have_is_refused(small: Log, tmp_path: Path) -> None:
    log = small.copy()
    fields = {key: getattr(log.layout, key) for key in SegmentLayout.__dataclass_fields__}
    for shape in ((0, 1 << 62), (1 << 61, 0, 1 << 61), (0,) * 65):
        log.layout = SegmentLayout(**fields | {"tensors": (*small.layout.tensors, LoggedTensor("z", "float32", shape))})
        _refused(log.write(tmp_path / str(len(shape))), "too large")
    log.layout = SegmentLayout(**fields | {"tensors": (*small.layout.tensors, LoggedTensor("z", "float32", (0, 3)))})
    assert values_of(restored(log.write(tmp_path / "empty").parent, 3))["z"]["param"].shape == (0, 3)


# What a small log claims


def claiming(small: Log, shape: tuple[int, ...], entries: list[Entry], vectors: int = 1) -> Log:
    """A log of one rank with one tensor of this shape and these records."""
    size = int(np.prod(shape, dtype=object))
    part = VectorPart(0, 0, 0, size, 0, Box.whole(shape))
    layout = replace(
        small.layout,
        tensors=(LoggedTensor("w", "float32", shape),),
        optimizers=(replace(small.layout.optimizers[0], groups=(("w",),)),),
        ranks=(RankLayout((OptimizerVector(0, 0, 0),) * vectors, (part,)),),
        aliases={},
    )
    return Log(layout, [entries], [])


def test_held_state_refuses_more_elements_than_the_log_describes(small: Log, tmp_path: Path) -> None:
    start = [Entry(Kind.STATE, 0, {"state": "param"}), Entry(Kind.FINGERPRINT, 0, {"digests": {}})]
    log = claiming(small, (1 << 50,), start).write(tmp_path / "run")
    state = HeldState(log, None)
    assert state.find_start(8)
    with pytest.raises(CorruptError, match=r"claims 4,294,967,296 chunks, and its 0 bytes cannot describe as many"):
        state.load(1)


def test_counts_of_steps_take_memory_for_the_records_alone(small: Log, tmp_path: Path) -> None:
    steps, vectors, none = 300, 20_000, [b""]
    meta = {"groups": encode(OPTIONS[:1])}
    one = [Entry(Kind.GRADIENTS, 1 + n, meta | {"vectors": [n % 7, vectors - 1]}, none, [0]) for n in range(steps)]
    log = claiming(small, (5,), one, vectors)
    replayed = SegmentReplay(open_segment(log.write(tmp_path / "run")), steps, StartState(0, {}))
    assert replayed.segment.last == steps
    tracemalloc.start()
    counts = replayed.counts(0, steps)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20  # a row of each step: 48 MB
    assert counts[[0, 6, 7, -1]].tolist() == [43, 42, 0, steps]


def test_records_take_little_memory_when_a_schedule_changes_their_options(small: Log, tmp_path: Path) -> None:
    steps, none = 300, [b""]
    groups = [encode([dict(OPTIONS[0]) | {"lr": 0.1 / (1 + n)}]) for n in range(steps)]
    one = [Entry(Kind.GRADIENTS, 1 + n, {"groups": groups[n], "vectors": [0]}, none, [0]) for n in range(steps)]
    folder = claiming(small, (5,), one).write(tmp_path / "run")
    tracemalloc.start()
    segment = open_segment(folder)
    current, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert segment.last == steps
    assert current < steps * 1000
    assert peak < steps * 1900  # 588 and 1592 B; with a copy of all options in each record 1553 and 2039


def test_a_step_of_many_records_is_read_in_few_passes(
    small: Log, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, passes, meta = 2000, 0, {"groups": encode(OPTIONS[:1])}
    parts = [Entry(Kind.GRADIENTS, 1, meta | {"part": [n, count]}, [b""], [0]) for n in range(count)]
    tail = SegmentTail(claiming(small, (5,), parts).write(tmp_path / "run"), None)
    steps = Segment.steps

    def counted(segment: Segment, rank: int) -> Any:
        nonlocal passes
        passes += 1
        return steps(segment, rank)

    monkeypatch.setattr(Segment, "steps", counted)
    assert tail.poll(8) == 1
    assert passes < 12
