"""Checkpoints of boxes: the ranks of a run save what they have, each in a pack of its own."""

import inspect
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import xxhash

from boxed import ADAM, OPTIMIZER, RANKS, BoxedRun, add_all, box, checkpoint_at, notes_at, states_at
from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_codecs.delta import StepInfo
from ckpt_formats.core.checkpoint import Origin
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, InvalidArgumentError, OutputError
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.state_names import to_stored
from ckpt_formats.core.tensor import read
from ckpt_formats.registry import writable
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal.boxes import CheckpointNotes, PackReceipt, RankBox, RankPack, assemble
from ckpt_formats.universal.format import read_lineage
from ckpt_formats.universal.lineage import LoadedFiles, lineage
from ckpt_formats.universal.manifest import Parent
from damage import SAMPLES
from forged import Change, Forged, both, forge, number, put
from held import contents
from page_codecs import decode, decode_delta
from universal_decoder import UniversalDecoder

EFFORT = Execution(1)


@pytest.fixture(scope="module")
def boxed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain: a plain base, three deltas, a coded base, a delta."""
    folder = tmp_path_factory.mktemp("boxed")
    run = BoxedRun(folder / "run", folder)
    run.save(1, plain=True)
    for step in (2, 3, 4):
        run.save(step, delta=True)
    run.save(5, codec="auto")
    run.save(6, delta=True)
    assert run.notes == []
    assert [(one.kind, "replay" in one.codecs) for one in run.members] == [
        ("base", False), ("delta", True), ("delta", True), ("delta", True), ("base", False), ("delta", True)
    ]  # fmt: skip
    return run.run


@pytest.mark.parametrize("step", range(1, 7))
def test_boxes_are_whole_tensors_bit_for_bit(boxed: Path, step: int) -> None:
    opened = open_checkpoint(Path(f"{boxed}@{step}"))
    whole = checkpoint_at(step)
    assert contents(opened) == contents(whole)
    assert {name: (p.role, p.values) for name, p in opened.parameters.items()} == {
        name: (p.role, p.values) for name, p in whole.parameters.items()
    }
    assert (opened.groups, opened.aliases, opened.extras) == (whole.groups, whole.aliases, whole.extras)
    assert find_problems(opened, EFFORT) == []


@pytest.mark.parametrize("step", range(1, 7))
def test_the_reader_of_the_page_reads_boxes(boxed: Path, step: int) -> None:
    reader = UniversalDecoder(boxed / f"step-{step:010d}", decode, decode_delta)
    for name, states in states_at(step).items():
        for state, values in states.items():
            assert reader.whole_values(name, to_stored(state)) == values.tobytes(), (name, state)


def test_sample_has_every_bit_by_this_program_and_by_the_page() -> None:
    expected = json.loads((SAMPLES / "universal-2-boxes.expected.json").read_text())
    for step, hashes in expected.items():
        run = SAMPLES / "universal-2-boxes"
        opened = open_checkpoint(Path(f"{run}@{step}"))
        assert hashes == {
            f"{p.name}/{to_stored(s)}": xxhash.xxh3_128_hexdigest(read(t).tobytes()) for p, s, t in opened.tensors()
        }
        reader = UniversalDecoder(run / f"step-{int(step):010d}", decode, decode_delta)
        for name, digest in hashes.items():
            assert xxhash.xxh3_128_hexdigest(reader.whole_values(*name.rsplit("/", 1))) == digest, name


@pytest.mark.parametrize(
    "target", ["universal", "torch", "safetensors", "dcp", "deepspeed", "deepspeed-universal", "flax"]
)
def test_convert_writes_the_same_files_of_boxes_as_of_whole_tensors(boxed: Path, tmp_path: Path, target: str) -> None:
    save(checkpoint_at(3), tmp_path / "whole", writable("universal"), resources=EFFORT)
    written = list[Mapping[str, bytes]]()
    for name, source in (("boxes", Path(f"{boxed}@3")), ("others", tmp_path / "whole")):
        save(open_checkpoint(source), tmp_path / name, writable(target), resources=EFFORT)
        files = (path for path in sorted((tmp_path / name).rglob("*")) if path.is_file())
        written.append({str(path.relative_to(tmp_path / name)): path.read_bytes() for path in files})
    assert written[0] == written[1]


def test_a_block_across_boxes_reads_only_these(boxed: Path) -> None:
    master = open_checkpoint(Path(f"{boxed}@1")).parameters["rows"].states["master"]
    assert np.array_equal(master[12:30, 3], states_at(1)["rows"]["master"][12:30, 3])
    assert {one.path.name for one in master.crop(Box((0, 0), (14, 2))).sources()} == {"00000.safetensors"}


def first_box(name: str, rank: int) -> Callable[[Forged], int]:
    """The row of the box of a parameter that a rank has."""
    return lambda forged: next(
        i for i, one in enumerate(forged.names) if one.startswith(name) and one.endswith(f"@{rank}")
    )


def at_box(name: str, rank: int, column: str, value: int, axis: int | None = None) -> Change:
    """Set a number of a box. `axis`: of a column of axes."""

    def change(forged: Forged) -> None:
        row = first_box(name, rank)(forged)
        place = row if axis is None else int(forged.columns["box.rank"][:row].sum()) + axis
        forged.columns[column][place] = value

    return change


def other_type(forged: Forged) -> None:
    forged.fields["dtypes"].append("int32")
    forged.columns["state.dtype"][forged.row(forged.names[first_box("rows", 1)(forged)], "exp_avg")] = (
        len(forged.fields["dtypes"]) - 1
    )


def resized(column: str, count: int) -> Change:
    def change(forged: Forged) -> None:
        forged.columns[column] = np.resize(forged.columns[column], len(forged.columns[column]) + count)

    return change


def without_boxes(forged: Forged) -> None:
    for name in [name for name in forged.columns if name.startswith(("box.", "whole."))]:
        del forged.columns[name]


HOSTILE: dict[str, tuple[Change, str]] = {
    "a range that begins later": (at_box("flat", 1, "box.first", 31), "`flat` master: two of its boxes overlap"),
    "a range that ends outside": (at_box("flat", 2, "box.first", 32), "another shape than its block"),
    "a block with a first element": (at_box("rows", 0, "box.first", 1), "another shape than its block"),
    "a range that begins at 2^64 - 1": (at_box("flat", 2, "box.first", (1 << 64) - 1), "another shape"),
    "a block at another place": (
        both(at_box("rows", 0, "box.start", 2, 0), at_box("rows", 0, "box.stop", 16, 0)),
        "`rows` master: two of its boxes overlap",
    ),
    "a block outside": (
        both(at_box("rows", 2, "box.start", 30, 0), at_box("rows", 2, "box.stop", 42, 0)),
        "not within its tensor",
    ),
    "a block that ends before it begins": (at_box("rows", 2, "box.start", 41, 0), "not within its tensor"),
    "a block of another shape": (at_box("rows", 1, "box.stop", 27, 0), "another shape than its block"),
    "a larger tensor": (
        both(*(at_box("rows", rank, "box.dims", 41, 0) for rank in range(3))),
        "its boxes have 480 elements of 492",
    ),
    "a tensor of 2^63 rows": (
        both(*(at_box("rows", rank, "box.dims", 1 << 63, 0) for rank in range(3))),
        "the tensor of a box is too large",
    ),
    "a tensor of 2^62 x 0": (at_box("empty", 2, "box.dims", 1 << 62, 1), "the tensor of a box is too large"),
    "different shapes": (at_box("rows", 2, "box.dims", 50, 0), "different shapes"),
    "65 axes": (at_box("rows", 0, "box.rank", 65), "more than 64 dimensions"),
    "another sum of axes": (at_box("rows", 0, "box.rank", 3), "the length of column box.dims"),
    "no parameter": (at_box("rng", 0, "box.whole", 99), "the number of the parameter of a box"),
    "boxes in another order": (at_box("rows", 1, "box.whole", 1), "not in the order of their parameters"),
    "a parameter without boxes": (at_box("rng", 0, "box.whole", 6), "a parameter without boxes"),
    "a box of another parameter": (at_box("rows", 2, "box.whole", 1), "its boxes have 336 elements of 480"),
    "another type": (other_type, "`rows` exp_avg: boxes of different types"),
    "another role": (at_box("rows", 1, "parameter.role", 1), "`rows`: boxes of different role"),
    "other values": (at_box("rows", 1, "parameter.values", 0), "`rows`: boxes of different values"),
    "ends that fall": (number("whole.ends", 0, 9), "the ends of names of parameters"),
    "a name twice": (number("whole.names", slice(0, 4), np.frombuffer(b"flat", "u1")), "a parameter's name twice"),
    "a name that is not a text": (number("whole.names", 0, 255), "a parameter's name is not UTF-8"),
    "more boxes": (resized("box.first", 1), "the length of column box.first"),
    "more axes": (resized("box.start", 1), "the length of column box.start"),
    "no table": (without_boxes, "is missing or unknown"),
    "version 1": (put("version", value=1), "is missing or unknown"),
    "a group of a box": (put("groups", 0, "parameters", value=[[7, 2]]), "groups: numbers of parameters"),
    "an alias of a box": (put("aliases", "tied", value="rows[0:14, 0:12]@0"), "aliases"),
}  # type: ignore[arg-type]


@pytest.mark.parametrize("case", HOSTILE)
def test_reader_refuses_tables_of_boxes_that_do_not_fit(boxed: Path, tmp_path: Path, case: str) -> None:
    change, message = HOSTILE[case]
    folder = shutil.copytree(boxed / "step-0000000001", tmp_path / "folder")
    forge(folder, change)
    with pytest.raises(CorruptError) as caught:
        open_checkpoint(folder)
    assert message in caught.value.what
    with pytest.raises((AssertionError, ValueError, IndexError, UnicodeDecodeError, KeyError, StopIteration)):
        UniversalDecoder(folder, decode, decode_delta)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_a_flipped_bit_in_a_box_is_named(boxed: Path, tmp_path: Path, step: int) -> None:
    run = shutil.copytree(boxed, tmp_path / "run")
    pack = run / f"step-{step:010d}" / "packs" / "00001.safetensors"
    data = bytearray(pack.read_bytes())
    data[-9] ^= 1
    pack.write_bytes(data)
    findings = find_problems(open_checkpoint(Path(f"{run}@{step}")), EFFORT)
    assert [(one.kind, Path(one.where).name) for one in findings][:1] == [("checksum", pack.name)]
    assert findings[0].tensors[0].endswith("@1")
    with pytest.raises(CkptError):
        save(open_checkpoint(Path(f"{run}@{step}")), tmp_path / "out", writable("universal"), resources=EFFORT)
    assert not (tmp_path / "out").exists()


def test_verify_compares_copies_with_masters_that_others_save(tmp_path: Path) -> None:
    boxes = [RANKS[0][3], RANKS[1][3], RANKS[2][3]]
    receipts, states = list[PackReceipt](), states_at(1)
    states["zero"]["model"][3] = 7
    for rank, one in enumerate(boxes):
        with RankPack(tmp_path / "saved", rank, [one], save="s") as pack:
            add_all(pack, [one], states)
            receipts.append(pack.finish())
    assemble(tmp_path / "saved", receipts, CheckpointNotes(Origin("torch")))
    findings = find_problems(open_checkpoint(tmp_path / "saved"), EFFORT)
    assert [(one.kind, one.what, one.tensors) for one in findings] == [
        ("copy", "1 of 30 weights differ from their rounded masters", ("zero",))
    ]


def test_a_chain_may_have_more_deltas_than_the_stack_has_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = box("rows", OPTIMIZER, (0, 0), (40, 12))
    before = states_at(1)["rows"]
    monkeypatch.setattr(
        "boxed.states_at", lambda step: {"rows": {s: before[s] * np.float32(1 + step * 1e-6) for s in OPTIMIZER}}
    )
    monkeypatch.setattr("boxed.notes_at", lambda step: CheckpointNotes(Origin("torch", None, step)))
    run = BoxedRun(tmp_path / "run", tmp_path, [[own]])
    run.save(1, codec="auto")
    for step in range(2, 22):
        run.save(step, delta=True)
    opened = read_lineage(lineage(tmp_path / "run" / "step-0000000021"), LoadedFiles())
    assert len(opened.files) == 21
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 90)
    try:
        parameter = opened.parameters["rows"]
    finally:
        sys.setrecursionlimit(limit)
    assert np.array_equal(parameter.states["master"], before["master"] * np.float32(1 + 21 * 1e-6))


def receipts_of(folder: Path, ranks: list[list[RankBox]]) -> list[PackReceipt]:
    receipts = []
    for rank, boxes in enumerate(ranks):
        with RankPack(folder, rank, boxes, save="s") as pack:
            add_all(pack, boxes, states_at(1))
            receipts.append(pack.finish())
    return receipts


WRONG: dict[str, tuple[list[list[RankBox]], str]] = {
    "a gap": ([*RANKS[:2], RANKS[2][1:]], "`rows` master: its boxes have 336 elements of 480"),
    "an overlap": (
        [RANKS[0], RANKS[1], [*RANKS[2][:1], box("flat", ADAM, (0, 0), (7, 11), 30, 76), *RANKS[2][2:]]],
        "`flat` master: two of its boxes overlap",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_assemble_refuses_boxes_that_are_not_everything_once(tmp_path: Path, case: str) -> None:
    ranks, message = WRONG[case]
    receipts = receipts_of(tmp_path / "saved", ranks)
    with pytest.raises(IncompleteError, match=message):
        assemble(tmp_path / "saved", receipts, notes_at(1))
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["packs"]


def test_assemble_refuses_receipts_of_other_saves_and_ranks(tmp_path: Path) -> None:
    receipts = receipts_of(tmp_path / "saved", RANKS)
    with pytest.raises(IncompleteError, match=r"packs \[0, 2\]"):
        assemble(tmp_path / "saved", [receipts[2], receipts[0]], notes_at(1))
    with RankPack(tmp_path / "other", 1, [], save="another") as pack:
        other = pack.finish()
    with pytest.raises(InvalidArgumentError, match="receipts of 2 saves"):
        assemble(tmp_path / "saved", [receipts[0], other, receipts[2]], notes_at(1))
    (tmp_path / "saved" / "packs" / "00001.safetensors").unlink()
    with pytest.raises(IncompleteError, match="the pack is not as its receipt states"):
        assemble(tmp_path / "saved", receipts, notes_at(1))
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["packs"]


def test_a_pack_takes_the_next_bytes_only(tmp_path: Path) -> None:
    own = box("bias", {"master": "float32"}, (0,), (5,))
    with RankPack(tmp_path / "saved", 0, [own], save="s") as pack:
        pack.add(0, "master", 0, bytes(8))
        for state, offset, count in (("master", 0, 4), ("master", 12, 4), ("master", 8, 16), ("model", 0, 4)):
            with pytest.raises(InvalidArgumentError, match="not the next ones"):
                pack.add(0, state, offset, bytes(count))
        with pytest.raises(InvalidArgumentError, match="bytes of `master` were not added"):
            pack.finish()
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"):
        RankPack(tmp_path / "file", 0, [own], save="s")
    with pytest.raises(OutputError, match="cannot be written"):
        RankPack(tmp_path / "saved", 0, [own], save="s", values=tmp_path / "file" / "values")
    with pytest.raises(InvalidArgumentError, match="no box of `bias`"):
        box("bias", {"master": "float32"}, (3,), (6,))
    with pytest.raises(InvalidArgumentError, match="two boxes have the same elements"):
        RankPack(tmp_path / "other", 0, [own, own], save="s")


def test_boxes_of_one_step_share_a_fit_unless_it_suits_them_worse(tmp_path: Path) -> None:
    """The second box is stepped as the first; the third has other values altogether, the last ones did not change."""
    shape, options = (64, 400), {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
    boxes = [RankBox(name, "parameter", shape, Box((0, 0), shape), OPTIMIZER) for name in "abcde"]
    random = np.random.default_rng(1)
    before = {name: {state: random.random(shape, np.float32) for state in OPTIMIZER} for name in "abcde"}
    after = {name: dict(states) for name, states in before.items()}
    for name in "ab":
        grad, own = random.standard_normal(shape).astype(np.float32), before[name]
        mean = own["exp_avg"] + (grad - own["exp_avg"]) * np.float32(0.1)
        square = own["exp_avg_sq"] * np.float32(0.999) + grad * grad * np.float32(0.001)
        root = np.sqrt(square) / np.float32(np.sqrt(1 - 0.999**5)) + np.float32(1e-8)
        master = own["master"] - np.float32(1e-3 / (1 - 0.9**5)) * mean / root
        after[name] = {"master": master, "exp_avg": mean, "exp_avg_sq": square}
    after["c"] = {s: random.integers(0, 256, (64, 1600), np.uint8).view(np.float32) for s in OPTIMIZER}  # any bits
    steps = {name: StepInfo(4, 5, options) for name in "abcde"}
    values, content = None, ""
    for save_number, states in enumerate((before, after)):
        folder, local = tmp_path / f"saved-{save_number}", tmp_path / f"values-{save_number}"
        with RankPack(folder, 0, boxes, save="s", values=local, earlier=values, steps=steps) as pack:
            add_all(pack, boxes, states)
            receipt = pack.finish()
        parent = None if values is None else Parent(content, "../saved-0")
        content = assemble(folder, [receipt], CheckpointNotes(Origin("torch")), parent).content
        values = pack.rank_values
    deltas = {entry.name[0]: entry.delta for entry in receipt.entries}
    assert {name for name, delta in deltas.items() if delta is not None} == set("abde")
    assert deltas["a"].codec == deltas["b"].codec
    opened = open_checkpoint(folder)
    for name, states in after.items():
        for state, expected in states.items():
            assert read(opened.parameters[name].states[state]).tobytes() == expected.tobytes(), (name, state)


def test_damaged_local_values_cost_the_delta_and_no_value(tmp_path: Path) -> None:
    """The values of the save before are compared with their checksums: a wrong byte would make a delta unreadable."""
    run = BoxedRun(tmp_path / "run", tmp_path)
    run.save(1, codec="auto")
    path = run.values[1].path
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    run.values[2].path.unlink()
    run.save(2, delta=True)
    assert any("rows[14:28, 0:12]@1 is stored without a delta" in note for note in run.notes)
    assert sum("@2 is stored without a delta" in note for note in run.notes) == 4
    assert contents(open_checkpoint(Path(f"{tmp_path / 'run'}@2"))) == contents(checkpoint_at(2))
