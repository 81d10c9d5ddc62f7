"""A damaged chain: named before anything is written, and what does not stand on the damage is restored all the same."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from ckpt.chains.append import append
from ckpt.chains.write import DeltaPolicy
from ckpt.pipeline import Execution
from ckpt_formats.containers import sealed_json
from ckpt_formats.core.checkpoint import Origin
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import manifest
from ckpt_formats.universal.chain import chain_file
from ckpt_formats.universal.index import CODED, TYPES, Index
from ckpt_formats.universal.tables import Tables
from damage import ckpt
from forged import Change, Forged, both, codec, drop, forge, number, put
from held import checkpoint, contents, flip, parameter
from training import chained

STEPS = 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of four states, `step1` to `step4`, and their chain."""
    return chained(tmp_path_factory.mktemp("whole"), STEPS)


PACK = "packs/00000.safetensors"


def member(run: Path, step: int) -> Path:
    return run / f"step-{step:010d}"


def pack(run: Path, step: int) -> Path:
    """The file with the bytes of all deltas."""
    return member(run, step) / PACK


def remove(run: Path) -> None:
    shutil.rmtree(member(run, 3))


def swap(run: Path) -> None:
    aside = run / "aside"
    member(run, 3).rename(aside)
    member(run, 2).rename(member(run, 3))
    aside.rename(member(run, 2))


def truncate(run: Path) -> None:
    path = pack(run, 3)
    os.truncate(path, path.stat().st_size - 10)


def alter_values(run: Path) -> None:
    path = pack(run, 3)
    flip(path, path.stat().st_size // 2)


def alter_manifest(run: Path) -> None:
    flip(member(run, 3) / manifest.NAME, 500)


def remove_manifest(run: Path) -> None:
    (member(run, 3) / manifest.NAME).unlink()


def remove_pack(run: Path) -> None:
    pack(run, 3).unlink()


def exchange_packs(run: Path) -> None:
    """Each of a length that the other's manifest does not know."""
    aside = run / "aside"
    pack(run, 3).rename(aside)
    pack(run, 4).rename(pack(run, 3))
    aside.rename(pack(run, 4))


def alter_header(run: Path) -> None:
    """In the names of the states, which no program of ours reads."""
    flip(pack(run, 3), 100)


def truncate_index(run: Path) -> None:
    path = member(run, 3) / manifest.INDEX
    os.truncate(path, path.stat().st_size - 10)


def alter_index(run: Path) -> None:
    path = member(run, 3) / manifest.INDEX
    flip(path, path.stat().st_size // 2)


def remove_index(run: Path) -> None:
    (member(run, 3) / manifest.INDEX).unlink()


def index_of_another_step(run: Path) -> None:
    shutil.copy(member(run, 2) / manifest.INDEX, member(run, 3) / manifest.INDEX)


def replace_by_another_run(run: Path) -> None:
    """The same step of a run that was trained otherwise, whole and with every checksum right."""
    other = run.parent / "other"
    shutil.rmtree(other, ignore_errors=True)
    other.mkdir()
    chained(other, 3, "momentum")
    remove(run)
    shutil.copytree(member(other / "run", 3), member(run, 3))


_THIRD = "step-0000000003"
DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing": (remove, _THIRD),
    "reordered": (swap, "step-000000000"),
    "truncated": (truncate, f"{_THIRD}/{PACK}"),
    "altered": (alter_values, f"{_THIRD}/{PACK}"),
    "without a pack": (remove_pack, f"{_THIRD}/{PACK}"),
    "with the pack of another step": (exchange_packs, f"{_THIRD}/{PACK}"),
    "altered manifest": (alter_manifest, f"{_THIRD}/{manifest.NAME}"),
    "without manifest": (remove_manifest, _THIRD),
    "truncated index": (truncate_index, f"{_THIRD}/{manifest.INDEX}"),
    "altered index": (alter_index, f"{_THIRD}/{manifest.INDEX}"),
    "without index": (remove_index, f"{_THIRD}/{manifest.INDEX}"),
    "with the index of another step": (index_of_another_step, f"{_THIRD}/{manifest.INDEX}"),
    "of another run": (replace_by_another_run, _THIRD),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named_and_nothing_is_written(name: str, whole: Path, tmp_path: Path) -> None:
    harm, says = DAMAGES[name]
    run = shutil.copytree(whole / "run", tmp_path / "run")
    harm(run)
    out = tmp_path / "out"
    out.mkdir()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    good = 1 if name == "reordered" else 2
    for arguments in (
        ("restore", run, out / "it"),
        ("restore", run, out / "it", "--to", "dcp"),
        ("convert", run, out / "it"),
    ):
        done = ckpt(*arguments)
        assert done.code == 20, done.err
        assert says in done.err
        assert "Traceback" not in done.err
        assert f"--step {good}" in done.err or arguments[0] == "convert"
        assert os.listdir(out) == []
    done = ckpt("verify", run, "--json")
    assert done.code == 20
    report = json.loads(done.out)
    assert says in json.dumps(report["findings"])
    assert set(report["damaged_steps"]) >= {3, 4}
    assert 1 not in report["damaged_steps"]
    assert ckpt("restore", run, out / "good", "--step", str(good)).code == 0
    assert contents(open_checkpoint(out / "good")) == contents(open_checkpoint(whole / f"step{good}"))
    if name != "altered":  # which shows only where the bytes are read
        assert ckpt("append", run, whole / "step4", "--step", "9").code == 20
    assert ckpt("compact", run, "--keep", "4").code == 20
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert after == before


def test_a_damaged_header_of_a_pack_is_named_by_verify(whole: Path, tmp_path: Path) -> None:
    """The header is for other programs: ours knows from the index where everything is, and still reads the values."""
    run = shutil.copytree(whole / "run", tmp_path / "run")
    alter_header(run)
    done = ckpt("verify", run)
    assert done.code == 20
    assert "header of pack 0" in done.out
    assert f"{_THIRD}/{PACK}" in done.out
    assert contents(open_checkpoint(run)) == contents(open_checkpoint(whole / "step4"))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step"), [(PACK, 5003), (manifest.INDEX, 101), (manifest.NAME, 211)])
def test_flipped_bytes_of_a_delta_are_found(name: str, step: int, whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole / "run", tmp_path / "run")
    path = member(run, 3) / name
    size = path.stat().st_size
    for byte in {*range(0, 200, 29), *range(0, size, step), *range(size - 9, size)}:
        flip(path, byte)
        assert ckpt("verify", run).code == 20, byte
        flip(path, byte)
    assert contents(open_checkpoint(run)) == contents(open_checkpoint(whole / "step4"))


@pytest.mark.parametrize("byte", [0, 30, 60, 200, 900])
def test_a_damaged_list_is_refused_and_the_members_can_still_be_read(byte: int, whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole / "run", tmp_path / "run")
    flip(run / chain_file.NAME, byte)
    for arguments in (
        ("log", run),
        ("restore", run, tmp_path / "out"),
        ("append", run, whole / "step4"),
        ("compact", run),
    ):
        done = ckpt(*arguments)
        assert done.code == 20, done.err
        assert "chain.json" in done.err
    assert not (tmp_path / "out").exists()
    assert contents(open_checkpoint(member(run, 4))) == contents(open_checkpoint(whole / "step4"))


def edited(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Change a file with a checksum in its first line, and make the checksum fit again."""
    fields = json.loads(path.read_text())
    del fields["checksum"]
    edit(fields)
    path.write_bytes(sealed_json.dump(fields))


LARGEST = "embed.weight"
"""The parameter with the largest delta, which is the first one in the columns: two chunks of three states."""


def of_item(key: str, edit: Callable[[Any], object]) -> Change:
    """Change a field of the item that the delta of `LARGEST` refers to."""
    return lambda forged: edit(forged.fields["deltas"][forged.columns["delta.codec"][0]][key])


def config(**options: Any) -> Change:
    return of_item("codec", lambda codec: codec.update(options))


def add(column: str, row: int, value: int) -> Change:
    """Add to a number of a column."""
    return lambda forged: forged.columns[column].__setitem__(row, forged.columns[column][row] + np.int64(value))


def cut(column: str) -> Change:
    """The column without its last row."""
    return lambda forged: forged.columns.update({column: forged.columns[column][:-1]})


def of_delta(column: str, value: int) -> Change:
    """Set a number of each chunk of the delta of `LARGEST`. Those of deltas are behind those of states."""

    def change(forged: Forged) -> None:
        begin = int(chunks_of_states(forged))
        forged.columns[column][begin : begin + 2] = value

    return change


def chunks_of_states(forged: Forged) -> int:
    counts = Index(forged.columns, Tables()).chunk_counts
    return int(counts[forged.columns["state.storage"] == CODED].sum())


def divided_elsewhere(valid: bool) -> Change:
    """The delta of `LARGEST` in chunks of other lengths, with the checksums of these bytes, if `valid`."""

    def change(forged: Forged) -> None:
        begin, by = chunks_of_states(forged), 8
        lengths, stored = forged.columns["coded.nbytes"], forged.columns["coded.stored"]
        lengths[begin], lengths[begin + 1] = lengths[begin] + by, lengths[begin + 1] - by
        if valid:
            at, nbytes = int(forged.columns["delta.offset"][0]), int(forged.columns["delta.nbytes"][0])
            first = int(lengths[begin])
            for row, (start, stop) in enumerate([(at, at + first), (at + first, at + nbytes)]):
                stored[begin + row] = xxhash.xxh3_64_intdigest(PACK_BYTES[0][start:stop])

    return change


def item_of_another(forged: Forged) -> None:
    """The first delta has an item of other states.

    Its number is looked up: how many items there are depends on which form of the arithmetic fits each parameter.
    """
    items, codecs = forged.fields["deltas"], forged.columns["delta.codec"]
    states = items[codecs[0]]["states"]
    codecs[0] = next(number for number, item in enumerate(items) if item["states"] != states)


PACK_BYTES = [b""]
"""Of the member that is changed."""


def turned(forged: Forged) -> None:
    """One state of a delta has its rows as columns, which are as many chunks."""
    at = forged.dims(LARGEST, "exp_avg")
    forged.columns["state.dims"][at] = forged.columns["state.dims"][at][::-1].copy()


def as_coded_with_base_in_delta(forged: Forged) -> None:
    """A plain state of four bytes is stored as a coded one, which needs a state of the delta."""
    codec(LARGEST, "step", {"name": "zstd"}, "exp_avg")(forged)
    row = forged.row(LARGEST, "step")
    forged.columns["state.storage"][row], forged.columns["state.nbytes"][row] = CODED, 8
    for column, value in (("coded.nbytes", 4), ("coded.stored", 0)):
        old = forged.columns[column]
        forged.columns[column] = np.concatenate([np.array([value], old.dtype), old])


def renamed(state: str, other: str) -> Change:
    """A state has another name, in all tables."""

    def change(forged: Forged) -> None:
        tables = [forged.fields["states"], *(item[key] for item in forged.fields["deltas"] for key in STATES_OF_ITEM)]
        for table in tables:
            table[:] = [other if name == state else name for name in table]

    return change


STATES_OF_ITEM = ("states", "parent_states")


def other_name(forged: Forged) -> None:
    """The first parameter has another name, of the same length."""
    forged.columns["parameter.names"][0] ^= 1


HOSTILE: dict[str, tuple[Change, int, str]] = {
    # The parent
    "no parent": (drop("parent"), 20, "no parent is named"),
    "a parent that is a list": (put("parent", value=[]), 20, "parent is not an object"),
    "a parent at an absolute path": (put("parent", "path", value="/etc"), 20, "parent.path '/etc'"),
    "a parent without a path": (put("parent", "path", value=""), 20, "parent.path ''"),
    "a parent of an impossible id": (put("parent", "content", value="blake2b-256:xyz"), 20, "parent.content"),
    "another parent": (put("parent", "content", value="blake2b-256:" + 64 * "0"), 20, "parent"),
    "version 3": (put("version", value=3), 22, "reads versions 1 and 2"),
    # The table of deltas
    "a delta of no state": (of_item("states", lambda s: s.clear()), 20, "deltas"),
    "a delta of a state that is not there": (
        of_item("states", lambda s: s.append("none")),
        20,
        "`embed.weight`: its delta has other states",
    ),
    "a delta of a state twice": (of_item("states", lambda s: s.append(s[0])), 20, "states of an item"),
    "a delta without a state": (
        both(*(of_item(key, lambda s: s.pop()) for key in STATES_OF_ITEM)),
        20,
        "`embed.weight`: its delta has other states",
    ),
    "a delta of another state": (
        both(*(of_item(key, lambda s: s.__setitem__(0, "step")) for key in STATES_OF_ITEM)),
        20,
        "its delta has other states",
    ),
    "a delta against what is not in it": (
        of_item("parent_states", lambda s: s.append("none")),
        20,
        "states of an item",
    ),
    "a delta against a state twice": (of_item("parent_states", lambda s: s.append(s[0])), 20, "states of an item"),
    "a delta against too few states": (of_item("parent_states", lambda s: s.clear()), 20, "replay"),
    "a codec that nobody has": (config(name="none"), 22, "there is no codec 'none'"),
    "a codec without a name": (of_item("codec", lambda codec: codec.clear()), 20, "not a codec"),
    "a codec with options that it has not": (config(more=1), 22, "more"),
    "a codec with an option of text": (config(beta1="x"), 22, "beta1"),
    "a codec of an unknown optimizer": (config(optimizer="none"), 22, "there is no optimizer 'none'"),
    "no deltas in the table": (put("deltas", value=[]), 20, "delta.codec"),
    # The columns of deltas
    "a delta of no parameter": (number("delta.parameter", -1, 200), 20, "delta.parameter"),
    "two deltas of a parameter": (number("delta.parameter", 1, 0), 20, "order of their parameters"),
    "a delta of a parameter without one": (
        both(number("delta.parameter", 4, 5), cut("coded.nbytes"), cut("coded.stored")),
        20,
        "its delta has other states",
    ),
    "a delta of the last parameter": (
        both(number("delta.parameter", -1, 8), cut("coded.nbytes"), cut("coded.stored")),
        20,
        "its delta has other states",
    ),
    "an item that is not there": (number("delta.codec", 0, 200), 20, "delta.codec"),
    "the item of another": (item_of_another, 20, "`embed.weight`: its delta has other states"),
    "a delta in no pack": (number("delta.pack", 0, 7), 20, "the number of a pack"),
    "a delta elsewhere": (add("delta.offset", 0, 8), 20, "ranges of pack 0"),
    "a delta in the header": (number("delta.offset", 0, 0), 20, "ranges of pack 0"),
    "a delta where another is": (number("delta.offset", 1, 4096), 20, "ranges of pack 0"),
    "a delta at the end of 64 bits": (number("delta.offset", 0, 2**64 - 8), 20, "ranges of pack 0"),
    "a longer delta": (number("delta.nbytes", 0, 1 << 50), 20, "`embed.weight`: its bytes do not fit its chunks"),
    "a delta of all 64 bits": (number("delta.nbytes", 0, 2**64 - 1), 20, "`embed.weight`: its bytes do not fit"),
    "a longer delta in a longer pack": (
        both(add("delta.nbytes", -1, 8), lambda f: f.fields["packs"][0].__setitem__(0, f.fields["packs"][0][0] + 8)),
        20,
        "`head.bias`: its bytes do not fit its chunks",
    ),
    **{f"{name} is shorter": (cut(name), 20, name.partition(".")[0]) for name in TYPES if name.startswith("delta.")},
    # The chunks of deltas
    "a delta in no chunks": (both(cut("coded.nbytes"), cut("coded.stored")), 20, "the length of column coded.nbytes"),
    "a delta in chunks without checksums": (cut("coded.stored"), 20, "the length of column coded.stored"),
    "a delta in huge chunks": (of_delta("coded.nbytes", 2**32 - 1), 20, "`embed.weight`: its bytes do not fit"),
    "a huge delta in huge chunks": (
        both(of_delta("coded.nbytes", 2**32 - 4), number("delta.nbytes", 0, 2**33 - 8)),
        20,
        "an encoded chunk is too long",
    ),
    "a delta in empty chunks": (of_delta("coded.nbytes", 0), 20, "`embed.weight`: its bytes do not fit its chunks"),
    "a delta in other chunks": (divided_elsewhere(valid=False), 20, "do not fit their checksum"),
    "a delta in other chunks that are valid": (divided_elsewhere(valid=True), 20, "cannot be decoded with `replay`"),
    "another checksum of a chunk": (of_delta("coded.stored", 1), 20, "embed.weight/delta: chunk 0 of 2: its"),
    "other values": (
        lambda f: f.columns["chunk.values"][f.chunks(LARGEST, "param")].fill(7),
        20,
        "the values of `model` do not fit their checksum",
    ),
    # The states of deltas
    "a state in the delta and elsewhere": (number("state.nbytes", (LARGEST, "param"), 4), 20, "bytes without use"),
    "a state in the delta that has a codec": (
        number("state.codec", (LARGEST, "param"), 1),
        20,
        "`embed.weight` model: a codec without use",
    ),
    "a state that is not in the delta": (
        number("state.storage", (LARGEST, "param"), 0),
        20,
        "`embed.weight` model: its bytes do not fit its shape",
    ),
    "a state in a delta that is not there": (
        both(
            *(
                number(f"state.{c}", ("norm.num_batches_tracked", "param"), v)
                for c, v in (("storage", 3), ("offset", 0), ("nbytes", 0))
            )
        ),
        20,
        "`norm.num_batches_tracked`: its delta has other states",
    ),
    "a state that is coded with one of the delta": (as_coded_with_base_in_delta, 20, "`embed.weight` step: its base"),
    "a state of another shape": (turned, 20, "`embed.weight` exp_avg_sq: the states of its delta differ in shape"),
    "states of another type than the parent's": (put("dtypes", 0, value="int32"), 20, "another shape or type in the p"),
    "a state that the parent does not have": (renamed("exp_avg", "other"), 20, "'other' that the parent does not have"),
    "a parameter that the parent does not have": (other_name, 20, "that the parent does not have"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_delta_is_refused(name: str, whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole / "run", tmp_path / "run")
    change, code, words = HOSTILE[name]
    PACK_BYTES[0] = (member(run, 3) / PACK).read_bytes()
    forge(member(run, 3), change)
    done = ckpt("restore", member(run, 3), tmp_path / "out")
    assert done.code == code, done.err
    assert words in done.err
    assert not (tmp_path / "out").exists()
    verified = ckpt("verify", member(run, 3))
    assert verified.code in (20, 22)
    for output in (done.err, verified.out + verified.err):
        assert "Traceback" not in output
        assert "fault of ckpt" not in output


def test_a_delta_whose_chunks_need_too_much_memory_is_refused(tmp_path: Path) -> None:
    """40 states of 4 bytes are within the limit of a chunk, and 40 of 8 bytes are not, however few values there are."""
    values = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    states = {"master": values, **{f"moment {number}": values for number in range(39)}}
    for step in (1, 2):
        source = checkpoint([parameter("w", states)], origin=Origin("held", None, step))
        append(tmp_path / "run", source, None, DeltaPolicy("difference"), Execution(1))
    assert ckpt("verify", tmp_path / "run").code == 0
    forge(member(tmp_path / "run", 2), put("dtypes", value=["float64"]))
    done = ckpt("restore", tmp_path / "run", tmp_path / "out")
    assert done.code == 20
    assert "`w`: a chunk of its delta is too large" in done.err
    assert not (tmp_path / "out").exists()


def test_a_delta_that_is_its_own_ancestor(whole: Path, tmp_path: Path) -> None:
    own = shutil.copytree(member(whole / "run", 3), tmp_path / "own")
    content = manifest.load(own / manifest.NAME).content
    edited(own / manifest.NAME, lambda fields: fields["parent"].update(content=content, path="../own"))
    done = ckpt("inspect", own)
    assert done.code == 20
    assert "its own ancestor" in done.err


def segments(*spans: tuple[int, int | None], **fields: object) -> Callable[[dict[str, Any]], object]:
    """Segments of a log in the list, by their first and last steps; `fields` are of the last one."""
    rows: list[dict[str, Any]] = [
        {"folder": f"gradients-{first:010d}", "run": "r", "first": first, "step": step, "parent": None, "time": "now"}
        for first, step in spans
    ]
    rows[-1].update(fields)
    return lambda s: s.update(segments=rows)


HOSTILE_LISTS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no members": (lambda s: s.update(members=[]), "members: there are none"),
    "a first member that is a delta": (lambda s: s["members"].pop(0), "members: the first is not a base"),
    "a step back": (lambda s: s["members"][2].update(step=1), "members: step 1 after step 2"),
    "a step twice": (lambda s: s["members"][2].update(step=2), "members: step 2 after step 2"),
    "a member left out": (lambda s: s["members"].pop(1), "members: the parent of step-0000000003 is not"),
    "a folder outside": (lambda s: s["members"][1].update(folder="../step-0000000002"), "folder '../step"),
    "a folder further down": (lambda s: s["members"][1].update(folder="step-0000000002/../.."), "folder 'step"),
    "a folder twice": (lambda s: s["members"][1].update(folder=s["members"][0]["folder"]), "members: a folder twice"),
    "a step that is a text": (lambda s: s["members"][1].update(step="2"), "step is not a whole number"),
    "a kind that nobody knows": (lambda s: s["members"][1].update(kind="other"), "kind 'other'"),
    "another content": (
        lambda s: s["members"][1].update(content="blake2b-256:" + 64 * "0"),
        "members: the parent of step-0000000003 is not",
    ),
    "a version from the future": (lambda s: s.update(version=99), "chain version 99"),
    "a family that is none": (lambda s: s.update(version=3), "not a family of models"),
    "another format": (lambda s: s.update(format="ckpt-universal"), "not valid: format"),
    "a tip outside": (
        lambda s: s.update(
            tip={"folder": "../tip-0000000004", "content": s["members"][-1]["content"], "stored_nbytes": 1}
        ),
        "tip: folder '../tip",
    ),
    "a source that is no path": (
        lambda s: s.update(appended_from={"path": "a\0b", "content": s["members"][-1]["content"]}),
        "appended_from: path",
    ),
    "segments that overlap": (segments((0, 5), (4, 8)), "segments: gradients-0000000004 begins before"),
    "a segment after one that grows": (segments((0, None), (4, 8)), "segments: gradients-0000000004 begins before"),
    "a segment that ends before it begins": (segments((4, 3)), "segments: gradients-0000000004 ends too early"),
    "a segment twice": (segments((0, 0), (0, 5)), "segments: a folder twice"),
    "a segment outside": (segments((0, 5), folder="../gradients-0000000000"), "folder '../gradients"),
    "a segment of another state": (
        segments((2, 5), parent="blake2b-256:" + 64 * "0"),
        "segments: gradients-0000000002 does not begin at a member",
    ),
}


@pytest.mark.parametrize("name", HOSTILE_LISTS)
def test_a_hostile_list_is_refused(name: str, whole: Path, tmp_path: Path) -> None:
    run = shutil.copytree(whole / "run", tmp_path / "run")
    change, words = HOSTILE_LISTS[name]
    edited(run / chain_file.NAME, change)
    done = ckpt("restore", run, tmp_path / "out")
    assert done.code == (22 if words.startswith("chain version") else 20), done.err
    assert words in done.err
    assert "Traceback" not in done.err
    assert not (tmp_path / "out").exists()
