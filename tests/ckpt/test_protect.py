"""Files that are lost, torn, flipped or exchanged are repaired by parity, bit for bit, or named."""

import errno
import fcntl
import itertools
import json
import math
import os
import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from pyeclib.ec_iface import ECDriver
from safetensors.numpy import save_file

import ckpt
from ckpt.pipeline import Resources
from ckpt.protection.parity_folders import give_name
from ckpt.protection.work_files import locked
from ckpt_formats.core import publish
from ckpt_formats.core.errors import LockedError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.folder_place import FolderPlace
from ckpt_formats.core.tensor import read
from ckpt_formats.parity import manifest
from ckpt_formats.parity.blocks import BlockPlace, StripeBuffers, combine
from ckpt_formats.parity.code import multiply, parity_matrix
from damage import BROKEN, NOT_FOUND, SAMPLES
from damage import ckpt as command
from effort import TIMES
from killing import killed, points
from protect_campaign import DamagedFolders, Kills, codes, contents_of, fill, patterns

ZERO1 = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
TWO = Resources(workers=2)
_HEADER_NBYTES = 80
"""What liberasurecode writes before the bytes of each fragment."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A DeepSpeed run with parity for two files."""
    shutil.copytree(ZERO1, tmp_path / "run")
    ckpt.protect(tmp_path / "run", 2, resources=TWO)
    return tmp_path / "run"


@pytest.mark.parametrize(("data", "parities"), [(1, 1), (4, 2), (8, 2), (8, 4), (20, 3), (28, 4)])
def test_parity_has_the_bytes_of_isa_l_and_each_repairs_what_the_other_encoded(data: int, parities: int) -> None:
    blocks = np.random.default_rng(data).integers(0, 256, (data, 512), np.uint8)
    parity = multiply(parity_matrix(data, parities), blocks)
    isa_l = ECDriver(k=data, m=parities, ec_type="isa_l_rs_cauchy")
    fragments = isa_l.encode(blocks.tobytes())
    assert [one[_HEADER_NBYTES:] for one in fragments] == [row.tobytes() for row in (*blocks, *parity)]

    own = [one[:_HEADER_NBYTES] + row.tobytes() for one, row in zip(fragments, (*blocks, *parity), strict=True)]
    assert isa_l.decode(own[parities:] if data >= parities else own[-data:]) == blocks.tobytes()


@pytest.mark.slow
def test_all_sets_of_blocks_that_small_codes_replace_are_computed() -> None:
    sets = sum(math.comb(k + m, lost) for k, m in codes() for lost in range(1, m + 1))
    assert sum(itertools.starmap(patterns, codes())) == sets


@pytest.mark.slow
def test_damaged_folders_are_repaired_or_named(tmp_path: Path) -> None:
    """A sample of `run.py parity_damage`."""
    folders, seen = DamagedFolders(tmp_path, random.randrange(1 << 32) if TIMES > 1 else 3), []
    for _ in range(60 * TIMES):
        seen += folders.round()
    assert {"repaired", "lost and named"} <= set(seen)


@pytest.mark.slow
def test_kills_leave_parity_absent_or_whole_and_files_damaged_or_whole(tmp_path: Path) -> None:
    """A sample of `run.py parity_kills`."""
    for name in ("protect", "repair"):
        (tmp_path / name).mkdir()
        kills = Kills(tmp_path / name, 5)
        for _ in range(3 * TIMES):
            assert getattr(kills, name)()


def test_parity_is_as_large_as_stated_and_the_manifest_has_the_hash_of_each_block(tmp_path: Path) -> None:
    root, large = tmp_path / "run", (1 << 20) + 5
    fill(root, {f"rank-{rank}": os.urandom(large) for rank in range(4)})
    done = ckpt.protect(root, 2, resources=TWO)
    assert (done.nbytes, done.parity_nbytes, done.domains) == (4 * large, 2 * large, 4)
    parity = [root / ".ckpt-parity" / str(j) / "group-000" for j in range(2)]
    assert [path.stat().st_size for path in parity] == [large, large]

    # The specification of the file in docs/protect.md, read by other code.
    data = (root / ".ckpt-parity" / "manifest").read_bytes()
    assert data[:8] == b"ckptpar1"
    assert data[-16:] == xxhash.xxh3_128_digest(data[:-16])
    (length,) = struct.unpack("<Q", data[8:16])
    header, hashes = json.loads(data[16 : 16 + length]), data[16 + length : -16]
    ((*domains,),) = header["groups"]
    files = [root / name for _, ((name, _),) in domains] + parity
    blocks = [file.read_bytes()[at : at + (1 << 20)] for file in files for at in (0, 1 << 20)]
    assert hashes == b"".join(map(xxhash.xxh3_128_digest, blocks))
    assert done.manifest_nbytes == 3 * len(data)


def test_a_block_of_a_file_that_was_cut_short_meanwhile_is_an_error_of_this_block(tmp_path: Path) -> None:
    fill(tmp_path / "run", {"cut": bytes(10), "whole": bytes(20)})
    places = [BlockPlace(tmp_path / "run" / name, 0, 20) for name in ("cut", "whole")]
    with Reader(check=False) as reader:
        (cut, whole), _ = combine(reader, places, np.zeros((0, 2), np.uint8), 20, StripeBuffers(0))
    assert isinstance(cut, ckpt.CorruptError)
    assert whole == xxhash.xxh3_128_digest(bytes(20))


@pytest.mark.slow
def test_lost_files_of_a_run_are_repaired_and_the_run_verifies(run: Path) -> None:
    whole = contents_of(run)
    lost = [next(run.rglob("*rank_0_*optim*")), next(run.rglob("mp_rank*"))]
    for path in lost:
        path.unlink()
    tried = command("repair", run, "--dry-run")
    assert tried.code == 0
    assert "2 of 2 files" in tried.out
    assert not lost[0].exists()
    assert command("repair", run).code == 0
    assert contents_of(run) == whole
    assert command("verify", run).code == 0


def test_damage_beyond_parity_is_named_and_taken_from_another_copy(run: Path) -> None:
    whole = contents_of(run)
    for path in [*run.rglob("*.pt")]:
        path.write_bytes(path.read_bytes()[:-100] + bytes(100))
    done = command("repair", run, "--json")
    assert done.code == BROKEN
    assert len(json.loads(done.out)["unrepairable"]) == 3
    assert "LOST: 3 files" in command("repair", run).out
    assert command("repair", run, "--from", ZERO1).code == 0
    assert contents_of(run) == whole


def test_tensors_of_lost_ranges_are_named(tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "transformers-5.23-trainer", tmp_path / "hf")
    ckpt.protect(tmp_path / "hf", 1, resources=TWO)
    model = tmp_path / "hf" / "model.safetensors"
    model.write_bytes(model.read_bytes()[:-3] + b"abc")
    (tmp_path / "hf" / "generation_config.json").unlink()
    result = ckpt.repair(tmp_path / "hf", resources=TWO)
    assert len(result.unrepairable) == 2
    assert result.lost_tensors

    file = tmp_path / "alone.safetensors"
    save_file({name: np.zeros((3, 1 << 20), np.uint8) for name in "abc"}, file)
    ckpt.protect(file, 1, resources=TWO)
    for mebibyte in (4, 5):  # the middle of b
        flip(file, mebibyte << 20)
    assert ckpt.repair(file, resources=TWO).lost_tensors == ("b",)


def test_files_of_a_node_are_one_domain(tmp_path: Path) -> None:
    contents = {f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt": os.urandom(900) for rank in range(6)}
    fill(tmp_path / "run", {**contents, "mp_rank_00_model_states.pt": b"model", "latest": b"step"})
    done = ckpt.protect(tmp_path / "run", 1, by="node:2", resources=TWO)
    assert done.domains == 3
    whole = contents_of(tmp_path / "run")
    for rank in (2, 3):
        (tmp_path / "run" / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").unlink()
    assert not ckpt.repair(tmp_path / "run", resources=TWO).unrepairable
    assert contents_of(tmp_path / "run") == whole


def test_a_host_takes_one_domain_of_each_group_with_it_if_ranks_jump(tmp_path: Path) -> None:
    root = tmp_path / "run"
    contents = {f"__{rank}_{part}.distcp": os.urandom(700 + rank) for rank in range(12) for part in range(2)}
    fill(root, {**contents, ".metadata": b"index"})
    done = command("protect", root, "--lose", 1, "--by", "node:1", "--jump", 4, "--json")
    assert [json.loads(done.out)[name] for name in ("domains", "groups")] == [12, 4]
    whole = contents_of(root)
    for rank in range(4, 8):
        for part in range(2):
            (root / f"__{rank}_{part}.distcp").unlink()
    assert not ckpt.repair(root, resources=TWO).unrepairable
    assert contents_of(root) == whole
    for rank in (1, 9):  # of the same group
        (root / f"__{rank}_0.distcp").unlink()
    assert len(ckpt.repair(root, resources=TWO).unrepairable) == 2


def test_a_table_states_domains_and_a_file_that_it_leaves_out_is_named(tmp_path: Path) -> None:
    fill(tmp_path / "run", {"a0": b"1", "a1": b"2", "b0": b"3"})
    (tmp_path / "table").write_text("# hosts\nfirst a*\n")
    refused = command("protect", tmp_path / "run", "--domains", tmp_path / "table")
    assert (refused.code, "b0" in refused.err) == (2, True)
    (tmp_path / "table").write_text("first a*\nsecond *\n")
    assert ckpt.protect(tmp_path / "run", 1, domains=tmp_path / "table").domains == 2


def test_parity_elsewhere_repairs_a_folder_that_is_lost_as_a_whole_but_for_one_file(tmp_path: Path) -> None:
    root, places = tmp_path / "run", [tmp_path / "a", tmp_path / "b"]
    fill(root, {f"rank-{rank}": os.urandom(5000 + rank) for rank in range(3)})
    ckpt.protect(root, 2, into=places, resources=TWO)
    whole = contents_of(root)
    fill(root, {"rank-1": whole["rank-1"]})
    places = [path.rename(path.with_name(f"moved-{path.name}")) for path in places]
    assert command("repair", root, "--parity", places[0], "--parity", places[1]).code == 0
    assert contents_of(root) == whole


def test_parity_elsewhere_is_replaced_where_it_is_and_other_folders_are_refused(tmp_path: Path) -> None:
    root, places = tmp_path / "run", [tmp_path / "a", tmp_path / "b"]
    fill(root, {name: os.urandom(99) for name in "xyz"})
    ckpt.protect(root, 2, into=places, resources=TWO)
    (root / "x").write_bytes(b"longer" * 50)
    ckpt.protect(root, 2, into=places, overwrite=True, resources=TWO)
    for name in "xy":
        (root / name).unlink()
    assert not ckpt.repair(root, parity=places, resources=TWO).unrepairable
    assert (root / "x").read_bytes() == b"longer" * 50
    shutil.copytree(root, tmp_path / "other", ignore=shutil.ignore_patterns(".ckpt-parity"))
    with pytest.raises(ckpt.CkptError, match="exists already"):
        ckpt.protect(tmp_path / "other", 1, into=places, overwrite=True, resources=TWO)
    assert not ckpt.repair(root, parity=places, resources=TWO).damaged
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "other", "run"]


def test_parity_of_an_older_state_does_not_outvote_the_manifest_of_the_checkpoint(tmp_path: Path) -> None:
    root, old, new = (tmp_path / name for name in ("run", "old", "new"))
    fill(root, {name: os.urandom(99) for name in "xyz"})
    ckpt.protect(root, 2, into=[old], resources=TWO)
    (root / "x").write_bytes(b"later" * 50)
    ckpt.protect(root, 2, into=[new], overwrite=True, resources=TWO)
    before = contents_of(root)
    for more in ((), ("--parity", new)):
        refused = command("repair", root, "--parity", old, *more)
        assert (refused.code, "the parity of another state" in refused.err, contents_of(root)) == (BROKEN, True, before)
    (root / "x").unlink()
    assert command("repair", root, "--parity", new).code == 0
    assert (root / "x").read_bytes() == b"later" * 50


def test_the_new_state_counts_if_parity_elsewhere_was_replaced_and_the_manifest_of_the_checkpoint_was_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, a, b = (tmp_path / name for name in ("run", "a", "b"))
    fill(root, {name: os.urandom(99) for name in "xyz"})
    ckpt.protect(root, 2, into=[a, b], resources=TWO)
    (root / "x").write_bytes(b"later" * 50)
    whole = {name: (root / name).read_bytes() for name in "xyz"}

    def fail(folder: Path, base: Path, is_replaced: bool) -> None:
        if base == b:
            raise OSError(errno.EIO, "the disk is gone")
        give_name(folder, base, is_replaced)

    with monkeypatch.context() as patch:
        patch.setattr("ckpt.protection.parity_draft.give_name", fail)
        with pytest.raises(ckpt.errors.OutputError, match="the disk is gone"):
            ckpt.protect(root, 2, into=[a, b], overwrite=True, resources=TWO)
    for places in ([a], [a, b]):
        (root / "y").unlink()
        result = ckpt.repair(root, parity=places, resources=TWO)
        assert not result.unrepairable
        assert {name: (root / name).read_bytes() for name in "xyz"} == whole
    assert not ckpt.repair(root, parity=[a, b], resources=TWO).damaged


@pytest.mark.slow
def test_parity_elsewhere_repairs_files_wherever_its_replacement_was_killed(tmp_path: Path) -> None:
    """At the last changes, from those on when the new parity is elsewhere and the old manifest with the files."""

    def protected(name: str) -> tuple[Path, list[Path]]:
        root, places = tmp_path / name / "run", [tmp_path / name / "a", tmp_path / name / "b"]
        fill(root, {one: os.urandom(99) for one in "xyz"})
        ckpt.protect(root, 2, into=places, resources=TWO)
        (root / "x").write_bytes(b"later" * 50)
        return root, places

    def replace(root: Path, places: list[Path]) -> Callable[[], object]:
        return lambda: ckpt.protect(root, 2, into=places, overwrite=True, resources=TWO)

    counted, places = protected("counted")
    count = points(replace(counted, places), counted.parent)
    for point in range(count - 7, count):
        root, places = protected(str(point))
        assert killed(replace(root, places), root.parent, point)
        (root / "y").unlink()
        assert not ckpt.repair(root, parity=places, resources=TWO).unrepairable, point
        assert (root / "x").read_bytes() == b"later" * 50
        replace(root, places)()
        assert os.listdir(root / ".ckpt-parity") == ["manifest"]


def test_places_of_parity_are_named_in_any_order_and_new_ones_take_what_is_lost(tmp_path: Path) -> None:
    root, a, b, c = (tmp_path / name for name in ("run", "a", "b", "c"))
    fill(root, {name: os.urandom(99) for name in "xyz"})
    ckpt.protect(root, 2, into=[a, b], resources=TWO)
    whole, parity = contents_of(root), contents_of(a)
    (root / "x").unlink()
    (root / "y").unlink()
    assert "LOST: 2 files cannot be repaired: parity was not read" in command("repair", root).out
    assert not ckpt.repair(root, parity=[b, a], resources=TWO).unrepairable
    assert (contents_of(root), contents_of(a)) == (whole, parity)
    shutil.rmtree(a)
    lost = ("0/group-000", "manifest", "0/manifest")
    assert [one.path for one in ckpt.repair(root, parity=[b, c], resources=TWO).damaged] == [c / one for one in lost]
    assert contents_of(c) == parity
    ckpt.protect(root, 2, into=[a], overwrite=True, resources=TWO)
    assert not ckpt.repair(root, parity=[a], resources=TWO).damaged


def test_repair_reads_and_writes_no_place_that_only_the_manifest_names(tmp_path: Path) -> None:
    root, place = tmp_path / "run", tmp_path / "place"
    fill(root, {name: os.urandom(99) for name in "xyz"})
    ckpt.protect(root, 1, into=[place], resources=TWO)
    shutil.rmtree(place / "0")
    whole, elsewhere = contents_of(root), contents_of(place)
    done = ckpt.repair(root, resources=TWO)
    assert (done.damaged, done.unnamed_parity) == ((), (str(place),))
    (root / "x").unlink()
    lost = command("repair", root)
    assert (lost.code, f"--parity {place}" in lost.err) == (BROKEN, True)
    assert command("convert", f"parity://{root}", tmp_path / "out").code != 0
    assert contents_of(place) == elsewhere
    (root / "x").write_bytes(whole["x"])
    assert command("repair", root, "--parity", place).code == 0
    assert (place / "0" / "group-000").stat().st_size == 99
    # Nor through a link in place of the parity's own folder.
    shutil.rmtree(root / ".ckpt-parity")
    (root / ".ckpt-parity").symlink_to(place)
    (place / "0" / "manifest").unlink()
    assert command("repair", root).code == 21
    assert not (place / "0" / "manifest").exists()


@pytest.mark.slow
def test_domains_beyond_a_code_are_in_groups_of_which_each_may_lose_some(tmp_path: Path) -> None:
    fill(tmp_path / "run", {f"rank-{rank:03}": bytes([rank % 251]) * 40 for rank in range(300)})
    assert ckpt.protect(tmp_path / "run", 1, resources=TWO).groups == 2
    whole = contents_of(tmp_path / "run")
    for rank in (10, 11):  # neighbours, so of different groups
        (tmp_path / "run" / f"rank-{rank:03}").unlink()
    assert not ckpt.repair(tmp_path / "run", resources=TWO).unrepairable
    assert contents_of(tmp_path / "run") == whole


@pytest.mark.slow
def test_parts_of_a_single_file_are_repaired_and_read_through_parity(tmp_path: Path) -> None:
    file, whole = tmp_path / "model.safetensors", np.zeros((1, 13 * (1 << 18)), np.uint32)
    whole[0] = np.random.default_rng(0).integers(0, 1 << 32, whole.size, np.uint32)
    save_file({"w": whole}, file)
    data = file.read_bytes()
    done = ckpt.protect(file, 2, resources=TWO)
    assert (done.files, done.domains, done.parity_nbytes) == (1, 14, 2 << 20)
    for start, stop in ((5 << 20, 7 << 20), (12 << 20, len(data))):  # two blocks of zeros; a file that is cut short
        changed = data[:start] + bytes(stop - start) + data[stop:]
        file.write_bytes(changed if stop < len(data) else data[:start])
        assert json.loads(command("verify", file, "--json").out)["ok"] is False
        assert np.array_equal(read(ckpt.open(f"parity://{file}")["w"].weight), whole)
        assert not ckpt.repair(file, resources=TWO).unrepairable
        assert file.read_bytes() == data
    file.rename(tmp_path / "copy")
    (unrepairable,) = ckpt.repair(file, resources=TWO).unrepairable
    assert unrepairable.lost_ranges == ((0, len(data)),)
    assert command("repair", file, "--from", tmp_path / "copy").code == 0
    assert file.read_bytes() == data
    assert command("verify", file).code == 0
    assert ckpt.protect(tmp_path, 1).files == 2  # without the parity of the file


def test_protect_refuses_parity_that_is_there_and_replaces_it_if_asked(run: Path) -> None:
    refused = command("protect", run)
    assert refused.code == 30
    assert "--overwrite" in refused.err
    (run / "more").write_bytes(b"more")
    assert command("protect", run, "--lose", 1, "--overwrite").code == 0
    assert sorted(path.name for path in run.iterdir()) == sorted(
        [*(one.name for one in ZERO1.iterdir()), "more", ".ckpt-parity"]
    )
    (run / "more").unlink()
    assert not ckpt.repair(run, resources=TWO).unrepairable
    assert (run / "more").read_bytes() == b"more"


def test_parity_is_replaced_where_a_file_system_cannot_exchange_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root, place = tmp_path / "run", tmp_path / "place"
    fill(root, {name: os.urandom(99) for name in "xyz"})
    ckpt.protect(root, 1, into=[place], resources=TWO)
    monkeypatch.setattr(publish, "renameat2", lambda source, target, flag=0: errno.EINVAL)
    (root / "x").write_bytes(b"newer")
    ckpt.protect(root, 1, into=[place], overwrite=True, resources=TWO)
    assert not ckpt.repair(root, parity=[place], resources=TWO).damaged
    assert sorted(os.listdir(root)) == [".ckpt-parity", "x", "y", "z"]
    assert sorted(os.listdir(tmp_path)) == ["place", "run"]


def test_protect_and_repair_refuse_what_they_cannot_do(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for arguments, code, text in [
        (("protect", tmp_path / "empty"), NOT_FOUND, "no file with content"),
        (("protect", tmp_path / "file", "--by", "folder"), 2, "parts of its own"),
        (("protect", ZERO1, "--by", "rack"), 2, "node:N"),
        (("protect", ZERO1, "--into", ZERO1), 2, "--into"),
        (("protect", ZERO1, "--into", "hf://organisation/model"), 22, "does not write to the Hugging Face Hub"),
        (("protect", ZERO1, "--jump", 99), 2, "jump=99"),
        (("repair", ZERO1), NOT_FOUND, "ckpt protect"),
        (("repair", run, "--parity", "hf://organisation/model"), 22, "does not write to the Hugging Face Hub"),
    ]:
        done = command(*arguments)
        assert (done.code, text in done.err) == (code, True), done.err
    with locked(run / ".ckpt-parity"), pytest.raises(LockedError):
        ckpt.repair(run, resources=TWO)


def test_parity_of_a_file_says_nothing_of_other_files(tmp_path: Path) -> None:
    fill(tmp_path, {"a": b"first", "b": b"second"})
    ckpt.protect(tmp_path / "a", 1, resources=TWO)
    (tmp_path / ".a.ckpt-parity").rename(tmp_path / ".b.ckpt-parity")
    (tmp_path / "a").unlink()
    with pytest.raises(ckpt.CorruptError, match="is the parity of a"):
        ckpt.repair(tmp_path / "b", resources=TWO)
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_hostile_manifests_are_refused_before_anything_is_written(run: Path) -> None:
    path = run / ".ckpt-parity" / "manifest"
    for copy in (run / ".ckpt-parity").glob("?/manifest"):
        copy.unlink()
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[8:16])
    header, hashes = json.loads(data[16 : 16 + length]), data[16 + length : -16]

    def forged(change: object) -> bytes:
        text = json.dumps({**header, **change}).encode() if isinstance(change, dict) else bytes(change)  # type: ignore[arg-type]
        body = b"ckptpar1" + struct.pack("<Q", len(text)) + text + hashes
        return body + xxhash.xxh3_128_digest(body)

    def groups(name: object, nbytes: object) -> dict[str, object]:
        return {"groups": [[["domain", [[name, nbytes]]]]]}

    for change in [
        b"", b"[]", b"{}", {"version": 2}, {"block": 1 << 10}, {"parities": 0}, {"parities": 255}, {"parities": "2"},
        {"groups": []}, {"groups": [[]]}, {"groups": None}, groups("../x", 5), groups("/etc/x", 5),
        groups("a/../../x", 5), groups(".ckpt-parity/x", 5), groups("", 5), groups("a\0b", 5), groups("x", 1 << 61),
        {"groups": [[["domain", [["x", 5, 5]]]]]}, {"groups": [[["domain", [["x", 5], ["x", 5, 5]]]]]},
        {"groups": [[["domain", [["x", 5, 1 << 20], ["x", 1 << 20]]]]]}, {"parities": 33}, groups("\ud800", 5),
        {"elsewhere": ["/a\0b"]}, {"elsewhere": ["a"]}, {"elsewhere": ["/\ud800"]}, {"elsewhere": [5]},
        {"by": "\x1b[2J"}, {"by": None},
        groups("x", -1), groups("x", "5"), groups("x" * 5000, 5), groups(7, 5),
    ]:  # fmt: skip
        path.write_bytes(forged(change))
        done = command("repair", run)
        assert done.code in (BROKEN, 21, 22), (change, done.out, done.err)
    for cut in (0, 7, 20, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(ckpt.CkptError):
            manifest.read(path)
    path.write_bytes(data)
    assert command("repair", run).code == 0


def flip(path: Path, at: int = -3) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def ranges_of(result: ckpt.types.Repair) -> dict[str, tuple[tuple[int, int], ...]]:
    return {file.path.name: file.lost_ranges for file in result.damaged if file.lost_ranges}


@pytest.mark.slow
@pytest.mark.parametrize("is_leftover", [False, True])
def test_repair_removes_no_only_copy_of_a_block_of_a_file_that_it_cannot_repair(
    tmp_path: Path, is_leftover: bool
) -> None:
    root, block = tmp_path / "run", 1 << 20
    fill(root, {name: os.urandom(block + 9) for name in "abc"})
    ckpt.protect(root, 1, resources=TWO)
    whole = contents_of(root)
    if is_leftover:  # of a repair that was killed
        (root / ".b.ckpt-repaired").write_bytes(whole["b"][:block])
        for name in "bc":
            (root / name).unlink()
    else:  # b and a have each other's names, and b is damaged besides
        (root / "a").write_bytes(whole["b"])
        (root / "b").write_bytes(whole["a"])
        flip(root / "a")
        flip(root / "c", 5)
        flip(root / "c")
    lost = dict.fromkeys("bc", ((block, block + 9),))
    assert ranges_of(ckpt.repair(root, resources=TWO)) == lost
    assert ranges_of(ckpt.repair(root, resources=TWO)) == lost
    fill(tmp_path / "copy", {"c": whole["c"]})
    assert not ckpt.repair(root, others=[tmp_path / "copy"], resources=TWO).unrepairable
    assert contents_of(root) == whole


def test_repair_leaves_no_block_beside_a_file_that_parity_computes(tmp_path: Path) -> None:
    root, block = tmp_path / "run", 1 << 20
    fill(root, {"a": os.urandom(9), "b": os.urandom(block + 9), "c": os.urandom(block + 9)})
    ckpt.protect(root, 2, resources=TWO)
    whole = contents_of(root)
    for name in "abc":  # too many of the first stripe, not of the second one
        (root / name).unlink()
    (root / ".b.ckpt-repaired").write_bytes(bytes(block) + whole["b"][block:])  # of a repair that was killed
    lost = {"a": ((0, 9),), "b": ((0, block),), "c": ((0, block),)}
    assert ranges_of(ckpt.repair(root, resources=TWO)) == lost
    assert contents_of(root).keys() == whole.keys() - {*"abc"}

    (root / ".b.ckpt-repaired").write_bytes(whole["b"])  # with which parity computes the others
    (tmp_path / "outside").write_bytes(b"no block")
    (root / ".a.ckpt-repaired").symlink_to(tmp_path / "outside")
    assert not ckpt.repair(root, resources=TWO).unrepairable
    assert contents_of(root) == whole
    assert (tmp_path / "outside").read_bytes() == b"no block"


def test_repair_replaces_no_file_that_is_written_meanwhile(tmp_path: Path) -> None:
    root = tmp_path / "run"
    fill(root, {name: os.urandom(99) for name in "abc"})
    ckpt.protect(root, 2, resources=TWO)
    flip(root / "a")
    (root / "b").unlink()
    for name, content in (("a", b"newer"), ("b", b"new")):

        def write(done: int, total: int, name: str = name, content: bytes = content) -> None:
            (root / name).write_bytes(content)

        with pytest.raises(ckpt.CkptError):
            ckpt.repair(root, resources=TWO, progress=write)
        assert (root / name).read_bytes() == content


def test_parity_is_of_whole_logs(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    fill(root, {"log.ckg": os.urandom(99), "other": os.urandom(99)})

    def record(done: int, total: int) -> None:
        with (root / "log.ckg").open("ab") as log:
            log.write(b"a later step")

    with pytest.raises(ckpt.CkptError, match="changed"):
        ckpt.protect(root, 1, resources=TWO, progress=record)
    with (root / "log.ckg").open("rb") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        with pytest.raises(LockedError, match="recording"):
            ckpt.protect(root, 1, resources=TWO)
    ckpt.protect(root, 1, resources=TWO)
    flip(root / "log.ckg")
    with pytest.raises(ckpt.CkptError, match="changed"):
        ckpt.repair(root, resources=TWO, progress=record)
    assert (root / "log.ckg").read_bytes().endswith(b"a later step")


def test_repair_replaces_no_file_that_is_written_while_others_are_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "run"
    fill(root, {name: os.urandom(99) for name in "ab"})
    ckpt.protect(root, 2, resources=TWO)
    for name in "ab":
        flip(root / name)
    replace_from = FolderPlace.replace_from

    def replace(*given: Any) -> None:
        replace_from(*given)
        (root / "b").write_bytes(b"newer")

    monkeypatch.setattr(FolderPlace, "replace_from", replace)
    with pytest.raises(ckpt.CorruptError, match="was written during the repair"):
        ckpt.repair(root, resources=TWO)
    assert (root / "b").read_bytes() == b"newer"


def test_parity_is_not_written_over_a_link(run: Path, tmp_path: Path) -> None:
    (run / ".ckpt-parity").rename(tmp_path / "disk")
    (run / ".ckpt-parity").symlink_to(tmp_path / "disk")
    whole = contents_of(tmp_path / "disk")
    assert "--into" in command("protect", run, "--overwrite").err
    assert not ckpt.repair(run, dry_run=True, resources=TWO).damaged
    assert contents_of(tmp_path / "disk") == whole


def test_no_file_is_written_through_a_link_to_a_folder(run: Path, tmp_path: Path) -> None:
    (step,) = run.glob("global_step*")
    outside = step.rename(tmp_path / "outside")
    lost = next(outside.glob("mp_rank*"))
    lost.unlink()
    step.symlink_to(outside)
    done = command("repair", run)
    assert done.code == 21
    assert not lost.exists()


@pytest.mark.slow
def test_verify_finds_by_parity_what_a_format_without_checksums_cannot(tmp_path: Path) -> None:
    shutil.copytree(SAMPLES / "transformers-5.23-trainer", tmp_path / "hf")
    ckpt.protect(tmp_path / "hf", 1, resources=TWO)
    whole = command("verify", tmp_path / "hf", "--json")
    assert (whole.code, json.loads(whole.out)["parity"]["ok"]) == (0, True)
    flip(tmp_path / "hf" / "model.safetensors")
    damaged = command("verify", tmp_path / "hf", "--json")
    assert damaged.code == BROKEN
    (one,) = json.loads(damaged.out)["parity"]["damaged"]
    assert (Path(one["file"]).name, one["blocks"], one["repairable"]) == ("model.safetensors", 1, True)
    assert "all can be repaired: ckpt repair" in command("verify", tmp_path / "hf").out

    (tmp_path / "hf" / "model.safetensors").unlink()  # nothing says any more what the folder is
    assert command("verify", tmp_path / "hf").code == BROKEN
    assert command("repair", tmp_path / "hf").code == 0
    assert command("verify", tmp_path / "hf").code == 0


@pytest.mark.slow
def test_a_damaged_checkpoint_is_read_through_its_parity(run: Path, tmp_path: Path) -> None:
    flip(next(run.rglob("mp_rank*")), 20_000)
    next(run.rglob("*rank_1_*optim*")).unlink()
    damaged = contents_of(run)
    assert command("convert", run, tmp_path / "x").code == BROKEN
    assert command("convert", f"parity://{run}", tmp_path / "u").code == 0
    assert command("diff", tmp_path / "u", ZERO1).code == 0
    assert contents_of(run) == damaged
    next(run.rglob("*rank_0_*optim*")).unlink()
    done = command("convert", f"parity://{run}", tmp_path / "y")
    assert (done.code, (tmp_path / "y").exists()) == (BROKEN, False)


def test_copies_take_parity_along_unless_files_that_it_protects_stay_behind(run: Path, tmp_path: Path) -> None:
    assert command("copy", run, tmp_path / "partly").code == 0
    assert not (tmp_path / "partly" / ".ckpt-parity").exists()  # truth.safetensors is no part of the checkpoint
    (run / "truth.safetensors").unlink()
    assert command("protect", run, "--overwrite").code == 0
    assert command("copy", run, tmp_path / "copy").code == 0
    assert not ckpt.repair(tmp_path / "copy", dry_run=True, resources=TWO).damaged


@pytest.mark.slow
def test_commands_protect_what_they_write(tmp_path: Path) -> None:
    done = command("convert", ZERO1, tmp_path / "u", "--protect", 1, "--json")
    assert json.loads(done.out)["parity"]["lose"] == 1
    assert command("copy", tmp_path / "u", tmp_path / "copy", "--protect", 2).code == 0
    assert ckpt.protect(tmp_path / "copy", 2, overwrite=True).domains == 3  # the parity of the source is not among them
    shutil.rmtree(tmp_path / "u" / ".ckpt-parity")
    assert command("append", tmp_path / "run.chain", tmp_path / "u", "--protect", 1).code == 0
    assert command("copy", tmp_path / "run.chain", tmp_path / "copy.chain", "--protect", 1).code == 0
    whole = contents_of(tmp_path / "copy.chain")
    next((tmp_path / "copy.chain").glob("*.json")).unlink()
    assert command("repair", tmp_path / "copy.chain").code == 0
    assert contents_of(tmp_path / "copy.chain") == whole
    flip(tmp_path / "run.chain" / ".ckpt-parity" / "0" / "group-000")
    verified = command("verify", tmp_path / "run.chain")
    assert (verified.code, "1 file of" in verified.out) == (BROKEN, True)
    assert "ckpt repair" in verified.out
    report = json.loads(command("verify", tmp_path / "copy.chain", "--json").out)
    assert report["parity"]["nbytes"] > 0
    assert command("convert", ZERO1, tmp_path / "one.safetensors", "--protect", 1).code == 0
    flip(tmp_path / "one.safetensors")
    assert command("repair", tmp_path / "one.safetensors").code == 0


MANIFESTS = ("manifest", "0/manifest", "1/manifest")


def sealed(path: Path, byte: int) -> None:
    """Flip a bit of a manifest before it gets its checksum."""
    data = bytearray(path.read_bytes()[:-16])
    data[byte] ^= 1
    path.write_bytes(bytes(data) + xxhash.xxh3_128_digest(data))


def two_files(root: Path, lose: int) -> dict[str, bytes]:
    fill(root, {name: os.urandom(3000) for name in "xy"})
    ckpt.protect(root, lose, resources=TWO)
    return contents_of(root)


@pytest.mark.parametrize("lose", [1, 2])
def test_damaged_copies_of_the_manifest_are_named_and_give_it_together(tmp_path: Path, lose: int) -> None:
    root = tmp_path / "run"
    whole = two_files(root, lose)
    (root / "x").unlink()
    for at, name in enumerate(MANIFESTS[: lose + 1]):
        flip(root / ".ckpt-parity" / name, -20 - at)
    damaged = ckpt.repair(root, dry_run=True, resources=TWO).damaged
    assert [one.path.name for one in damaged] == ["x", *["manifest"] * (lose + 1)]
    assert not ckpt.repair(root, resources=TWO).unrepairable
    assert contents_of(root) == whole
    for name in MANIFESTS[: lose + 1]:
        flip(root / ".ckpt-parity" / name, -20)
    with pytest.raises(ckpt.CorruptError, match="checksum"):
        ckpt.repair(root, resources=TWO)


def test_a_manifest_with_most_copies_counts_and_others_are_named(tmp_path: Path) -> None:
    root = tmp_path / "run"
    two_files(root, 2)
    first = (root / ".ckpt-parity" / "manifest").read_bytes()
    (root / "x").write_bytes(b"other")
    ckpt.protect(root, 2, overwrite=True, resources=TWO)
    whole = contents_of(root)
    (root / ".ckpt-parity" / "manifest").write_bytes(first)  # as a restored backup has it
    (root / ".ckpt-parity" / "1" / "manifest").unlink()
    (root / ".ckpt-parity" / "0" / "manifest").write_bytes(whole[".ckpt-parity/manifest"])
    (root / ".ckpt-parity" / "2").mkdir()
    (root / ".ckpt-parity" / "2" / "manifest").write_bytes(whole[".ckpt-parity/manifest"])
    verified = json.loads(command("repair", root, "--dry-run", "--json").out)
    assert [one["what"] for one in verified["damaged"]] == ["another manifest than most copies", "missing"]
    assert command("repair", root).code == 0
    assert {name: data for name, data in contents_of(root).items() if "2/" not in name} == whole


def test_a_wrong_hash_in_all_copies_hides_no_other_damage_and_is_corrected(tmp_path: Path) -> None:
    root = tmp_path / "run"
    whole = two_files(root, 1)  # the hashes are those of x, of y and of the parity
    for name in MANIFESTS[:2]:
        sealed(root / ".ckpt-parity" / name, -3 * 16)
    (root / "y").unlink()
    repaired = ckpt.repair(root, resources=TWO)
    assert [one.path.name for one in repaired.damaged] == ["y", "manifest", "manifest"]
    assert repaired.damaged[0].what == "missing"
    assert not repaired.unrepairable
    assert contents_of(root) == whole


def test_a_lost_block_with_a_wrong_hash_is_named_and_others_are_repaired(tmp_path: Path) -> None:
    root = tmp_path / "run"
    whole = two_files(root, 2)
    for name in MANIFESTS:
        sealed(root / ".ckpt-parity" / name, -4 * 16)
    (root / "x").unlink()
    (root / "y").unlink()
    repaired = ckpt.repair(root, resources=TWO)
    assert [one.path.name for one in repaired.unrepairable] == ["x"]
    assert (root / "y").read_bytes() == whole["y"]
    assert sorted(path.name for path in root.iterdir()) == [".ckpt-parity", "y"]


def test_files_with_the_longest_names_are_repaired(tmp_path: Path) -> None:
    root, name = tmp_path / "run", "é" * 127
    fill(root, {name: os.urandom(3000), "y": b"y"})
    ckpt.protect(root, 1, resources=TWO)
    ckpt.protect(root / name, 1, resources=TWO)
    whole = contents_of(root)
    for damage in ((root / name).unlink, lambda: (root / name).write_bytes(whole[name][:-3] + b"end")):
        damage()
        assert command("repair", root).code == 0
        assert contents_of(root) == whole
    (root / name).write_bytes(whole[name][:-3] + b"end")
    assert command("repair", root / name).code == 0
    assert contents_of(root) == whole
