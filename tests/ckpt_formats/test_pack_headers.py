"""`verify` compares the header of each pack with the index: other readers of safetensors see the header."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash

from ckpt.chains.append import append
from ckpt.chains.verify import verify_chain
from ckpt.chains.write import DeltaPolicy
from ckpt.findings import find_problems
from ckpt.job import save
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Origin
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal
from damage import SAMPLES
from forged import Forged, forge
from held import checkpoint, everything, parameter

TWO = Execution(workers=2)
Entries = dict[str, Any]


def rewrite(folder: Path, change: Callable[[Entries], object]) -> None:
    """Change the header of the first pack, with all checksums right, as a faulty writer would."""
    pack = folder / "packs/00000.safetensors"
    raw = bytearray(pack.read_bytes())
    length = int.from_bytes(raw[:8], "little")
    entries = json.loads(raw[8 : 8 + length])
    change(entries)
    raw[8 : 8 + length] = json.dumps(entries).encode().ljust(length)
    assert len(raw) == pack.stat().st_size
    pack.write_bytes(raw)

    def stated(forged: Forged) -> None:
        forged.fields["packs"][0][2] = f"xxh3-128:{xxhash.xxh3_128_hexdigest(bytes(raw[: 8 + length]))}"

    forge(folder, stated)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    values = np.arange(6, dtype=np.float32)
    source = checkpoint([parameter("v", {"master": values}), parameter("w", {"master": values + 1, "exp_avg": values})])
    save(source, tmp_path / "saved", Universal(), resources=TWO)
    return tmp_path / "saved"


def swapped(entries: Entries) -> None:
    entries["v/fp32"], entries["w/fp32"] = entries["w/fp32"], entries["v/fp32"]


@pytest.mark.parametrize(
    ("change", "message", "tensors"),
    [
        (swapped, r"entry `v/fp32` of the header is .*, in the index", ("v",)),
        (lambda entries: entries.pop("w/exp_avg"), r"`w/exp_avg` of the header is missing", ("w",)),
        (lambda entries: entries["w/fp32"].update(dtype="I32"), r"`w/fp32` of the header is .*I32", ("w",)),
        (lambda entries: entries["w/fp32"].update(shape=[2, 3]), r"`w/fp32` of the header is ", ("w",)),
        (lambda entries: entries.update({"u/fp32": entries["v/fp32"]}), r"entry `u/fp32`, which the index does", ()),
        (lambda entries: entries.update({"ckpt.x": entries["v/fp32"]}), r"entry `ckpt.x`, which the index does", ()),
        (lambda entries: entries.update({"v/fp32": None}), r"`v/fp32` of the header is None", ("v",)),
    ],
)
def test_a_header_that_disagrees_is_named(
    saved: Path, change: Callable[[Entries], object], message: str, tensors: tuple[str, ...]
) -> None:
    assert find_problems(open_checkpoint(saved), TWO) == []
    rewrite(saved, change)
    (finding,) = find_problems(open_checkpoint(saved), TWO)
    assert (finding.kind, finding.tensors) == ("header", tensors)
    assert finding.where == str(saved / "packs/00000.safetensors")
    assert re.search(message, finding.what)


def test_header_of_a_shared_pack_is_compared_with_each_member_that_names_it(tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((200, 200)).astype(np.float32)
    for step in (1, 2):
        source = checkpoint([parameter("v", {"master": values})], origin=Origin("held", None, step))
        append(tmp_path / "run", source, None, DeltaPolicy(base_every=1), TWO)
    base, user = (tmp_path / "run" / f"step-{step:010d}" for step in (1, 2))
    assert verify_chain(tmp_path / "run", TWO).findings == ()
    rewrite(base, lambda entries: entries["v/fp32"].update(shape=[7]))
    header = json.loads((base / "manifest.json").read_bytes())["packs"][0][2]

    def follow(forged: Forged) -> None:
        forged.fields["packs"][1][2] = header

    forge(user, follow)
    (finding,) = find_problems(open_checkpoint(user), TWO)
    assert (finding.kind, finding.tensors, finding.where) == ("header", ("v",), str(base / "packs/00000.safetensors"))
    assert verify_chain(tmp_path / "run", TWO).bad_steps == (1, 2)


@pytest.mark.parametrize("target", ["folder", "file.ucp"])
@pytest.mark.parametrize("codec", [None, "auto"])
def test_headers_of_everything_agree(tmp_path: Path, target: str, codec: str | None) -> None:
    save(everything(), tmp_path / target, Universal(codec=codec, pack_nbytes=1 << 10), resources=TWO)
    assert [one for one in find_problems(open_checkpoint(tmp_path / target), TWO) if one.kind == "header"] == []


def test_headers_of_samples_agree() -> None:
    for path in sorted(SAMPLES.glob("universal-1*")):
        if path.is_dir() or path.suffix == ".ucp":
            assert [one for one in find_problems(open_checkpoint(path), TWO) if one.kind == "header"] == []
