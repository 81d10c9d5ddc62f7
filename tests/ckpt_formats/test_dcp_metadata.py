"""`.metadata`, however it is spelled: forms make reading faster and never different; many chunks need little memory."""

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt_formats.containers.torchfile import CompactRecord, load_pickle
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.layout import Rule
from ckpt_formats.core.tensor import read
from ckpt_formats.core.values import Record
from ckpt_formats.engines.dcp.metadata import FORMS, ItemRange, MetadataReader, read_metadata
from ckpt_formats.registry.opening import open_checkpoint
from dcp_states import by_rank
from durations import slowness
from held import folder

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

_NUMBERS = st.one_of(st.integers(0, 300), st.sampled_from([65535, 65536, 1 << 31, (1 << 40) + 5, (1 << 61)]))
_NAMES = st.one_of(st.text(min_size=1, max_size=5), st.sampled_from(["a\x94b", "x" * 300, "ub", "é\x8c"]))


@st.composite
def metadatas(draw: st.DrawFn) -> Metadata:
    """Metadata whose objects are shared at random, so that a pickle refers to them in every way it can."""
    tensors: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    shared = draw(st.booleans())
    for name in draw(st.lists(_NAMES, unique=True, max_size=5)):
        axes = draw(st.integers(0, 5))
        chunks = []
        starts = draw(st.lists(st.tuples(*[_NUMBERS] * axes), unique=True, max_size=4))
        length = torch.Size((3,) * axes)
        for i, start in enumerate(starts):
            offsets = torch.Size(start)
            chunks.append(ChunkStorageMetadata(offsets, length if shared else torch.Size((3,) * axes)))
            index = MetadataIndex(name if shared else "".join([*name]), start, draw(st.one_of(st.none(), st.just(i))))
            places[index] = _StorageInfo(f"__{i}_0.distcp", draw(_NUMBERS), draw(_NUMBERS))
        tensors[name] = TensorStorageMetadata(TensorProperties(), torch.Size((1 << 61,) * axes), chunks)
    for name in draw(st.lists(st.sampled_from(["o1", "o2", "o3"]), unique=True)):
        tensors[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = _StorageInfo(
            "__0_0.distcp", draw(_NUMBERS), 7, draw(st.sampled_from([None, ["a/1"]]))
        )
    return Metadata(tensors, {name: (name,) for name in tensors}, places, StorageMeta(), "1.0.0")


@given(metadatas(), st.sampled_from([2, 4, 5]))
def test_metadata_reads_what_torch_pickled(expected: Metadata, protocol: int) -> None:
    with folder() as at:
        (at / ".metadata").write_bytes(pickle.dumps(expected, protocol))
        metadata = read_metadata(at / ".metadata")
    entries, places = expected.state_dict_metadata, expected.storage_data
    tensors = {name: entry for name, entry in entries.items() if not isinstance(entry, BytesStorageMetadata)}
    assert {name: (one.dtype.name, one.shape) for name, one in metadata.tensors.items()} == {
        name: (str(entry.properties.dtype)[6:], tuple(entry.size)) for name, entry in tensors.items()
    }
    for name, entry in tensors.items():
        theirs = [
            (tuple(c.offsets), tuple(c.sizes), place(places[MetadataIndex(name, c.offsets)])) for c in entry.chunks
        ]
        ours = [(box.start, box.shape, item and said_of(item)) for box, item in metadata.tensors[name].blocks]
        assert ours == theirs
    objects = {name: place(places[MetadataIndex(name)]) for name in entries if name not in tensors}
    assert {name: said_of(item) for name, item in metadata.objects.items()} == objects


def said_of(item: ItemRange) -> tuple[Any, ...]:
    return item.file, item.offset, item.nbytes, list(item.transforms)


def place(info: _StorageInfo) -> tuple[Any, ...]:
    return info.relative_path, info.offset, info.length, info.transform_descriptors or []


def test_a_form_takes_what_is_spelled_as_usual_and_nothing_else() -> None:
    chunks = [ChunkStorageMetadata(torch.Size((i, 0)), torch.Size((1, 300))) for i in range(5)]
    formed = load_pickle(pickle.dumps(chunks, 4), "x", FORMS)
    assert [type(one) for one in formed] == [Record, CompactRecord, CompactRecord, CompactRecord, CompactRecord]
    assert formed[3] == ("ChunkStorageMetadata", (3, 0), (1, 300))
    assert all(type(one) is Record for one in load_pickle(pickle.dumps(chunks, 2), "x", FORMS))
    for odd in (-1, 1 << 63, 2.5, True, None, "text"):
        chunks[3].__dict__["sizes"] = odd
        assert type(load_pickle(pickle.dumps(chunks, 4), "x", FORMS)[3]) is Record
    chunks[3].__dict__.update(sizes=torch.Size((1,)), more=1)
    assert type(load_pickle(pickle.dumps(chunks, 4), "x", FORMS)[3]) is Record


def test_texts_of_a_form_are_taken_whether_spelled_or_referred_to() -> None:
    """Also by a reference of four bytes, which follows many values."""
    many = list(map(float, range(300)))
    names = [f"name of {i}" for i in range(300)]
    indices = [MetadataIndex("".join([*names[-1]]), torch.Size((0,)), 0)]  # spelled
    indices += [MetadataIndex(names[-1], torch.Size((i,)), i) for i in range(3)]  # a long reference
    loaded = load_pickle(pickle.dumps([many, names, *indices], 4), "x", FORMS)[2:]
    assert [type(one) for one in loaded[1:]] == [CompactRecord] * 3
    assert [one[1] for one in loaded[1:]] == [names[-1]] * 3
    short = load_pickle(pickle.dumps([MetadataIndex(name, torch.Size((0,)), 0) for name in names[:3]], 4), "x", FORMS)
    assert [(type(one), one[1]) for one in short[1:]] == [(CompactRecord, name) for name in names[1:3]]


@pytest.mark.parametrize(("opcodes", "arguments"), [(b"\x85", b"K\x01K\x02"), (b"\x87", b"K\x01K\x02")])
def test_a_form_does_not_take_a_size_that_leaves_a_length_or_lacks_one(opcodes: bytes, arguments: bytes) -> None:
    """What the opcodes mean is another tuple, and a number beside it."""
    chunks = [ChunkStorageMetadata(torch.Size((i + 1, 2)), torch.Size((7, 7))) for i in range(3)]
    data = pickle.dumps(chunks, 4)
    at = data.rindex(b"K\x03K\x02\x86")
    assert type(load_pickle(data, "x", FORMS)[2]) is CompactRecord
    with pytest.raises(CkptError):
        load_pickle(data[:at] + b"K\x03K\x02" + opcodes + data[at + 5 :], "x", FORMS)


@pytest.mark.parametrize(
    ("shared", "kind"), [(torch.Size((1, 300)), CompactRecord), ((1, 300), Record), ("text", Record)]
)
def test_a_reference_is_taken_if_it_leads_to_what_is_meant(shared: Any, kind: type) -> None:
    chunks = [ChunkStorageMetadata(torch.Size((i, 0)), torch.Size((1, 300))) for i in range(3)]
    chunks[2].__dict__["sizes"] = shared
    loaded = load_pickle(pickle.dumps([shared, *chunks], 4), "x", FORMS)
    assert type(loaded[3]) is kind
    assert (loaded[3][2] if kind is CompactRecord else loaded[3].state["sizes"]) == shared


def test_a_reference_into_a_formed_object_is_understood() -> None:
    """No pickler makes one, unless two objects share their attributes."""
    chunks = [ChunkStorageMetadata(torch.Size((i,)), torch.Size((1,))) for i in range(5)]
    chunks[4].__dict__ = chunks[2].__dict__
    loaded = load_pickle(pickle.dumps(chunks, 4), "x", FORMS)
    assert all(type(one) is Record for one in loaded), "read again without forms"
    assert loaded[4].state == {"offsets": (2,), "sizes": (1,)}
    assert loaded[4].state is loaded[2].state


def test_a_memo_that_numbers_itself_is_understood() -> None:
    chunk = pickle.dumps(ChunkStorageMetadata(torch.Size((1,)), torch.Size((1,))), 4)
    assert load_pickle(b"\x80\x04K\x05q\x07h\x07\x86.", "x", FORMS) == (5, 5)
    assert load_pickle(chunk, "x", FORMS).state == {"offsets": (1,), "sizes": (1,)}
    with pytest.raises(CkptError):
        load_pickle(b"\x80\x04K\x05\x94g-1\n.", "x", FORMS)


def test_metadata_joins_those_of_each_rank(tmp_path: Path) -> None:
    same = {"model": {"w": torch.arange(6.0)}, "step": 3}
    saved = by_rank(tmp_path / "saved", *({**same, "mine": {"rank": rank, "seed": 5}} for rank in range(3)))
    assert not (saved / ".metadata").exists()
    checkpoint = open_checkpoint(saved)
    weight = checkpoint.parameters["w"].weight
    assert (read(weight).tolist(), len(weight.replicas)) == ([0, 1, 2, 3, 4, 5], 2)
    assert checkpoint.extras["mine"] == {"rank": 0, "seed": 5}
    assert checkpoint.extras["ranks"] == {"1": {"mine.rank": 1}, "2": {"mine.rank": 2}}
    assert checkpoint.origin.layout["world"] == 3
    (saved / "__1.metadata").unlink()
    with pytest.raises(CkptError, match=r"__1\.metadata is missing"):
        open_checkpoint(saved)


def test_metadata_refuses_replicas_that_differ_without_a_rule(tmp_path: Path) -> None:
    saved = by_rank(tmp_path / "saved", {"model": {"w": torch.zeros(4)}}, {"model": {"w": torch.ones(4)}})
    with pytest.raises(CkptError, match="replicas of one tensor differ"):
        read(open_checkpoint(saved).parameters["w"].weight)
    rules = (Rule("model.w", "first"),)
    assert read(open_checkpoint(saved, ReadOptions(rules)).parameters["w"].weight).tolist() == [0, 0, 0, 0]


_MANY = """
import re, sys, time
from pathlib import Path
from ckpt_formats.engines.dcp.metadata import read_metadata

began = time.process_time()
found = read_metadata(Path(sys.argv[1]))
seconds, peak = time.process_time() - began, re.search("VmHWM: *\\t* *([0-9]+)", Path("/proc/self/status").read_text())
print(sum(len(one.blocks) for one in found.tensors.values()), seconds, int(peak[1]) / 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("tensors", "ranks"), [(6250, 8), (200, 250)])
def test_fifty_thousand_chunks_take_little_time_and_memory(tensors: int, ranks: int, tmp_path: Path) -> None:
    entries: dict[str, Any] = {}
    places: dict[Any, Any] = {}
    for i in range(tensors):
        name = f"optim.state.layers.{i // 12}.attention.block_{i % 12}.weight.exp_avg"
        chunks = [ChunkStorageMetadata(torch.Size((64 * r, 0)), torch.Size((64, 4096))) for r in range(ranks)]
        entries[name] = TensorStorageMetadata(TensorProperties(), torch.Size((64 * ranks, 4096)), chunks)
        for r in range(ranks):
            index = MetadataIndex("".join([name[:3], name[3:]]), (64 * r, 0), r)
            places[index] = _StorageInfo(f"__{r}_0.distcp", i << 20, 1 << 20)
    metadata = Metadata(entries, {name: (name,) for name in entries}, places, StorageMeta(), "1.0.0")
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    done = subprocess.run(
        [sys.executable, "-c", _MANY, str(tmp_path / ".metadata")], capture_output=True, text=True, check=True
    )
    count, seconds, megabytes = map(float, done.stdout.split())
    assert count == tensors * ranks
    # Half of it on an idle machine; tests run beside others.
    assert seconds / slowness() < 2
    assert megabytes < 150


@pytest.mark.parametrize("names", ["zlib", {"a": 1}, ["a", 1], None, 3])
def test_transformations_of_an_item_are_a_list_of_names(names: Any) -> None:
    reader = MetadataReader(Path(".metadata"))
    with pytest.raises(CkptError, match="transformations are not a list of names"):
        reader._transforms(names)
    assert reader._transforms(["a", "b"]) == reader._transforms(("a", "b")) == ("a", "b")
