"""A reader of all states of a universal checkpoint, and of chains, written from docs/format.md alone.

The bytes of a chunk are specified by other pages, so the caller gives the functions that decode them:

    decode(codec, data, shape, dtype, base, base_dtype) -> bytes
        the values of a chunk of a coded state. `base`: the bytes of the same block of the base, or None
    decode_delta(codec, data, shape, parent_values, dtypes) -> {state: bytes}
        the values of a chunk of a delta. `parent_values`: {state: bytes}, `dtypes`: {state: text}
"""

import math
import re
import struct
from pathlib import Path

import xxhash

from universal_reader import CODED, DERIVED, ITEMSIZE, UniversalReader, chunk_form, read_sealed

MEMBER = re.compile(r"step-([0-9]{10,20})(\.[0-9]{1,6})?")
NAME = re.compile(r"(?!last$)(?=.*[A-Za-z_])[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")


class UniversalDecoder(UniversalReader):
    """A checked universal checkpoint: every state decodes to its values, and every checksum holds."""

    def __init__(self, folder, decode=None, decode_delta=None, members=None):
        """`members`: the folders of the chain's members by content id, among which a parent is found."""
        super().__init__(folder)
        self.decode, self.decode_delta, self.members = decode, decode_delta, members or {}
        self._of_deltas = {}
        self.parent = self._open_parent()
        for name, entry in self.entries.items():
            for state in entry["states"]:
                self.values(name, state)

    def _pack(self, number):
        """The file of a pack: in this folder, or in that of an earlier member of the chain, which is next to it."""
        folder, number = self.manifest["packs"][number][3:] or ("", number)
        return (self.folder.resolve().parent / folder if folder else self.folder) / f"packs/{number:05d}.safetensors"

    def _check_packs(self):
        packs, own = self.manifest["packs"], step_of(self.folder.resolve().name, math.inf)
        owners = [tuple(pack[3:]) for pack in packs if len(pack) != 3]
        assert (sorted(packs, key=len), len(set(owners))) == (packs, len(owners))
        assert all(-1 < step_of(folder, -1) < own and number >= 0 for folder, number in owners)
        super()._check_packs()

    def decoded(self, parameter, name):
        states = self.entries[parameter]["states"]
        state = states[name]
        if state["storage"] == DERIVED:
            types = states[state["base"]]["dtype"], state["dtype"]
            base = self.values(parameter, state["base"])
            return base if types[0] == types[1] else ROUND[types](base)
        if state["storage"] == CODED:
            return self._coded_values(parameter, state)
        if parameter not in self._of_deltas:
            self._of_deltas[parameter] = self._delta_values(parameter)
        return self._of_deltas[parameter][name]

    def _open_parent(self):
        if not any(entry.get("delta", {}).get("parent_states") for entry in self.entries.values()):
            return None
        stated = self.manifest["parent"]
        assert not stated["path"].startswith("/")
        path = self.members.get(stated["content"], self.folder / stated["path"])
        parent = UniversalDecoder(path, self.decode, self.decode_delta, self.members)
        assert parent.manifest["content"] == stated["content"]
        return parent

    def _coded_values(self, parameter, state):
        dtype, base, base_dtype = state["dtype"], None, None
        if state["base"] is not None:
            base = self.values(parameter, state["base"])
            base_dtype = self.entries[parameter]["states"][state["base"]]["dtype"]
        values = []
        for data, shape, start in self._chunks(state, state["shape"]):
            block = None if base is None else elements(base, base_dtype, shape, start)
            values.append(self.decode(state["codec"], data, shape, dtype, block, base_dtype))
        return b"".join(values)

    def _delta_values(self, parameter):
        """The values of all states of a delta: {state: bytes}."""
        states, delta = self.entries[parameter]["states"], self.entries[parameter]["delta"]
        dtypes = {name: states[name]["dtype"] for name in delta["states"]}
        parent_values = {}
        for name in delta["parent_states"]:
            whole, shape, numbers = self._elements_of_whole(parameter, name)
            dtype, there = self.parent.form(whole, name)
            assert (dtype, there) == (states[name]["dtype"], shape)
            values, size = self.parent.whole_values(whole, name), ITEMSIZE[dtype]
            parts = (values[at * size : (at + 1) * size] for at in numbers or ())
            parent_values[name] = values if numbers is None else b"".join(parts)
        values = {name: [] for name in dtypes}
        for data, shape, start in self._chunks(delta, states[delta["states"][0]]["shape"]):
            blocks = {name: elements(whole, dtypes[name], shape, start) for name, whole in parent_values.items()}
            for name, part in self.decode_delta(delta["codec"], data, shape, blocks, dtypes).items():
                values[name].append(part)
        return {name: b"".join(parts) for name, parts in values.items()}

    def form(self, parameter, name):
        """The type and the shape of a state of a parameter, also of one that is in boxes."""
        if self.wholes is None:
            state = self.entries[parameter]["states"][name]
            return state["dtype"], state["shape"]
        shape, boxes = self.wholes[parameter][name]
        return self.entries[boxes[0][0]]["states"][name]["dtype"], shape

    def _elements_of_whole(self, parameter, name):
        """The parameter that a row is of, the shape of its state, and its elements there; None: all of them."""
        if self.wholes is None:
            return parameter, self.entries[parameter]["states"][name]["shape"], None
        for whole, states in self.wholes.items():
            shape, boxes = states.get(name, ((), ()))
            if parameter in dict(boxes):
                return whole, shape, dict(boxes)[parameter]
        raise AssertionError(parameter)

    def _chunks(self, stored, shape):
        """The coded chunks of a state or a delta, checked, each with its shape and its first element."""
        data, (full, columns), at = self.stored_bytes(stored), chunk_form(shape), 0
        for index, (length, digest) in enumerate(stored["chunks"]):
            is_last = index + 1 == len(stored["chunks"])
            assert xxhash.xxh3_64_intdigest(data[at:] if is_last else data[at : at + length]) == digest
            start = index * full
            size = min(full, math.prod(shape) - start)
            yield data[at : at + length], [size] if columns is None else [size // columns, columns], start
            at += length
        assert data[at:] == bytes(-at % 8)


class ChainReader:
    """A checked chain: `members` of chain.json, and a `UniversalDecoder` for each step in `checkpoints`.

    In a family of models, steps are numbers of models, and each has a name.
    """

    def __init__(self, folder, decode=None, decode_delta=None):
        index = read_sealed(Path(folder) / "chain.json")
        is_family = index["version"] == 3
        assert (index["format"], index["version"]) in (("ckpt-chain", 1), ("ckpt-chain", 3))
        assert index.get("family", False) == is_family
        self.members = index["members"]
        self.checkpoints = {}
        folders = {member["content"]: Path(folder) / member["folder"] for member in self.members}
        assert self.members[0]["kind"] == "base"
        for member in self.members:
            assert "losses" not in member
            assert MEMBER.fullmatch(member["folder"])
            assert member["kind"] in ("base", "delta")
            earlier = [one["content"] for one in self.members if one["step"] < member["step"]]
            assert len(earlier) == len(self.checkpoints)
            allowed = [None] if member["kind"] == "base" else earlier if is_family else earlier[-1:]
            assert member["parent"] in allowed
            if is_family:
                assert member["content"] not in earlier
                assert NAME.fullmatch(member["name"])
            checkpoint = UniversalDecoder(Path(folder) / member["folder"], decode, decode_delta, folders)
            assert checkpoint.manifest["content"] == member["content"]
            self._check_shared(member, checkpoint.manifest["packs"])
            states = [state for entry in checkpoint.entries.values() for state in entry["states"].items()]
            assert {name for name, state in states if state["error"] is not None} == set(member["errors"])
            self.checkpoints[member["step"]] = checkpoint
        assert len({member["folder"] for member in self.members}) == len(self.members)
        assert not is_family or len({member["name"] for member in self.members}) == len(self.members)

    @staticmethod
    def _check_shared(member, packs):
        """The list names all packs of earlier members that the manifest names."""
        stated = {
            (one["folder"], n) for one in member.get("shared", ()) for a, k in one["packs"] for n in range(a, a + k)
        }
        assert stated == {tuple(pack[3:]) for pack in packs if len(pack) == 5}


def step_of(folder, default):
    """The step in the name of a member's folder; `default` for another name."""
    return int(match[1]) if (match := MEMBER.fullmatch(folder)) else default


def elements(values, dtype, shape, start):
    """The block of a state that a chunk has: as many elements as `shape` has, from `start` on."""
    begin = start * ITEMSIZE[dtype]
    return values[begin : begin + math.prod(shape) * ITEMSIZE[dtype]]


def round_to_bfloat16(data):
    words = struct.unpack(f"<{len(data) // 4}I", data)
    return struct.pack(f"<{len(words)}H", *((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 for bits in words))


def round_to_float16(data):
    # 65,520 is halfway between the largest finite value and the next step, and is the first that becomes infinite.
    numbers = struct.unpack(f"<{len(data) // 4}f", data)
    return struct.pack(f"<{len(numbers)}e", *(math.copysign(math.inf, x) if abs(x) >= 65520 else x for x in numbers))


ROUND = {("float32", "bfloat16"): round_to_bfloat16, ("float32", "float16"): round_to_float16}
