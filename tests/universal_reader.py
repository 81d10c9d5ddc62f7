"""A reader of the universal format, written from docs/format.md alone: it imports no part of ckpt, nor NumPy."""

import hashlib
import json
import math
import re
import struct
from pathlib import Path

import xxhash

ITEMSIZE = {
    **dict.fromkeys(("bool", "uint8", "int8"), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("uint16", "int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("uint32", "int32", "float32"), 4),
    **dict.fromkeys(("uint64", "int64", "float64", "complex64"), 8),
}
TAGS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0", "complex64": "C64",
}  # fmt: skip
FILE = re.compile(r"(parameters|extras)/[a-z0-9][a-z0-9._-]{0,110}\.safetensors")
FIRST_LINE = re.compile(rb'\{"checksum":"xxh3-128:([0-9a-f]{32})",\n')


class UniversalReader:
    """A folder of version 1, 2 or 3, by the rules of the page; every MUST is an assertion.

    What the bytes of a chunk mean is another page's: `decode` gives the values of one, of which it is told the
    codec, the shape, the type, and the base's values and type. `replay` gives those of a chunk of a delta, by state:
    it is told the codec, the shape, the parent's values by state, and the types by state.
    """

    def __init__(self, folder, decode=None, replay=None):
        self.folder = Path(folder)
        self.decode, self.replay = decode, replay
        raw = (self.folder / "manifest.json").read_bytes()
        first = FIRST_LINE.match(raw)
        assert first
        assert first.end() == 57
        assert xxhash.xxh3_128(raw[57:]).hexdigest().encode() == first[1]
        self.manifest = json.loads(raw.decode("utf-8"), object_pairs_hook=no_key_twice, parse_constant=refuse)
        states = [state for entry in self.manifest["parameters"] for state in entry["states"].values()]
        deltas = [entry["delta"] for entry in self.manifest["parameters"] if "delta" in entry]
        version = 3 if deltas else 2 if any("chunk" in state for state in states) else 1
        self.parent = None
        if any(delta["before"] for delta in deltas):
            said = self.manifest["parent"]
            assert not said["path"].startswith("/")
            self.parent = UniversalReader(self.folder / said["path"], decode, replay)
            assert self.parent.manifest["content"] == said["content"]
        assert (self.manifest["format"], self.manifest["version"]) == ("ckpt-universal", version)
        assert self.manifest["content"] == content_id(self.manifest)
        self.entries = {entry["name"]: entry for entry in self.manifest["parameters"]}
        assert len(self.entries) == len({entry["file"] for entry in self.entries.values()})
        assert len(self.entries) == len(self.manifest["parameters"])
        for entry in self.entries.values():
            self.check(entry)

    def check(self, entry):
        assert entry["role"] in ("parameter", "frozen", "buffer", "extra")
        assert entry["file"] == file_name(entry["name"], entry["role"])
        assert FILE.fullmatch(entry["file"])
        raw = (self.folder / entry["file"]).read_bytes()
        assert len(raw) == entry["nbytes"]
        stored = {name: state for name, state in entry["states"].items() if "offset" in state}
        states, inside = entry["states"], entry.get("delta", {}).get("states", [])
        if inside:
            assert "delta" not in states
            assert len({name: states[name]["shape"] == states[inside[0]]["shape"] for name in inside}) == len(inside)
            assert all(states[name]["codec"] is None and "offset" not in states[name] for name in inside)
            assert set(entry["delta"]["before"]) <= set(inside)
            stored = {"delta": entry["delta"], **stored}
        begin = min(state["offset"] for state in stored.values())
        assert digest(raw[:begin]) == entry["header"]
        (length,) = struct.unpack("<Q", raw[:8])
        assert 8 + length == begin
        assert begin % 64 == 0
        header = json.loads(raw[8:begin], object_pairs_hook=no_key_twice)
        version = 3 if inside else 2 if any("chunk" in state for state in stored.values()) else 1
        assert header.pop("__metadata__") == {"ckpt": f"universal {version}", "parameter": entry["name"]}
        assert list(header) == sorted(stored, key=lambda name: name == "param" and "fp32" in stored)
        end = begin
        for name, said in header.items():
            state = stored[name]
            size = state["nbytes"]
            if "chunk" in state:
                assert state["codec"]["name"]
                assert (said["dtype"], said["shape"]) == ("U8", [size])
            else:
                assert state["codec"] is None
                assert size == math.prod(state["shape"]) * ITEMSIZE[state["dtype"]]
                assert (said["dtype"], said["shape"]) == (TAGS[state["dtype"]], state["shape"])
                assert state["stored"] == state["values"]
            assert [begin + at for at in said["data_offsets"]] == [state["offset"], state["offset"] + size]
            assert (state["offset"], state["nbytes"]) == (end, size)
            assert digest(raw[end : end + size]) == state["stored"]
            end += size
        assert end == len(raw)
        for name, state in entry["states"].items():
            if "offset" not in state and name not in inside:
                assert state["codec"] == {"name": "rounded"}
            if "base" in state:
                assert state["base"] in stored or "offset" not in state
                assert states[state["base"]]["shape"] == state["shape"]
                assert "base" not in states[state["base"]]
            if "offset" not in state or "chunk" in state:
                assert digest(self.values(entry["name"], name)) == state["values"]

    def values(self, parameter, name):
        """The bytes of a state's values."""
        entry = self.entries[parameter]
        state = entry["states"][name]
        if name in entry.get("delta", {}).get("states", []):
            return self.replayed(entry)[name]
        if "offset" in state:
            with (self.folder / entry["file"]).open("rb") as file:
                file.seek(state["offset"])
                data = file.read(state["nbytes"])
            return self.coded(entry, state, data) if "chunk" in state else data
        base = self.values(parameter, state["base"])
        types = (entry["states"][state["base"]]["dtype"], state["dtype"])
        return base if types[0] == types[1] else ROUND[types](base)

    def replayed(self, entry):
        """The values of all states of a delta."""
        delta, states = entry["delta"], entry["states"]
        form = {name: states[name]["dtype"] for name in delta["states"]}
        size, each = sum(map(ITEMSIZE.get, form.values())), math.prod(delta["chunk"])
        elements = math.prod(states[delta["states"][0]]["shape"])
        assert 1 <= each <= 2**22
        assert each * size <= 2**26
        assert len(delta["chunk"]) == 1 or elements % delta["chunk"][1] == 0
        with (self.folder / entry["file"]).open("rb") as file:
            file.seek(delta["offset"])
            data = file.read(delta["nbytes"])
        before = {name: self.parent.values(entry["name"], name) for name in delta["before"]}
        for name in before:
            said = self.parent.entries[entry["name"]]["states"][name]
            assert (said["dtype"], said["shape"]) == (states[name]["dtype"], states[name]["shape"])
        ends = len(data) - 16 * -(-elements // each)
        values, at = dict.fromkeys(form, b""), 0
        for i, (length, check) in enumerate(struct.iter_unpack("<QQ", data[ends:])):
            taken = min(each, elements - i * each)
            shape = [taken] if len(delta["chunk"]) == 1 else [taken // delta["chunk"][1], delta["chunk"][1]]
            assert length <= taken * size + 1024
            known = {n: v[i * each * ITEMSIZE[form[n]] :][: taken * ITEMSIZE[form[n]]] for n, v in before.items()}
            made = self.replay(delta["codec"], data[at : at + length], shape, known, form)
            assert xxhash.xxh3_64(b"".join(made[name] for name in form)).intdigest() == check
            values, at = {name: values[name] + made[name] for name in form}, at + length
        assert data[at:ends] == bytes(-at % 8)
        return values

    def coded(self, entry, state, data):
        """The values of a state that is stored in chunks."""
        size, each = ITEMSIZE[state["dtype"]], math.prod(state["chunk"])
        elements = math.prod(state["shape"])
        assert 1 <= len(state["chunk"]) <= 2
        assert 1 <= each <= 2**22
        assert len(state["chunk"]) == 1 or elements % state["chunk"][1] == 0
        count = -(-elements // each)
        ends = len(data) - 16 * count
        base = self.values(entry["name"], state["base"]) if "base" in state else None
        known = entry["states"][state["base"]]["dtype"] if "base" in state else None
        values, at = b"", 0
        for i, (length, check) in enumerate(struct.iter_unpack("<QQ", data[ends:])):
            taken = min(each, elements - i * each)
            shape = [taken] if len(state["chunk"]) == 1 else [taken // state["chunk"][1], state["chunk"][1]]
            assert length <= taken * size + 1024
            below = None if base is None else base[i * each * ITEMSIZE[known] :][: taken * ITEMSIZE[known]]
            made = self.decode(state["codec"], data[at : at + length], shape, state["dtype"], below, known)
            assert len(made) == taken * size
            assert xxhash.xxh3_64(made).intdigest() == check
            values, at = values + made, at + length
        assert data[at:ends] == bytes(-at % 8)
        return values


def bfloat16(data):
    out = bytearray()
    for (bits,) in struct.iter_unpack("<I", data):
        if bits & 0x7FFFFFFF > 0x7F800000:
            out += struct.pack("<H", bits >> 31 << 15 | 0x7FC0)
        else:
            out += struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    return bytes(out)


def float16(data):
    out = bytearray()
    for (value,) in struct.iter_unpack("<f", data):
        # 65,520 lies between the largest finite value and what would come next, and is the first to be infinite.
        out += struct.pack("<e", math.copysign(math.inf, value) if abs(value) >= 65520 else value)
    return bytes(out)


ROUND = {("float32", "bfloat16"): bfloat16, ("float32", "float16"): float16}


def digest(data):
    return f"xxh3-128:{xxhash.xxh3_128(data).hexdigest()}"


def content_id(manifest):
    parameters = [
        [
            entry["name"],
            entry["role"],
            sorted([name, s["dtype"], s["shape"], s["values"]] for name, s in entry["states"].items()),
            entry["values"],
        ]
        for entry in manifest["parameters"]
    ]
    said = {
        "aliases": manifest["aliases"],
        "extras": manifest["extras"],
        "groups": [{"options": g["options"], "parameters": g["parameters"]} for g in manifest["groups"]],
        "parameters": sorted(parameters),
    }
    text = json.dumps(said, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return f"blake2b-256:{hashlib.blake2b(text.encode(), digest_size=32).hexdigest()}"


def file_name(name, role):
    slug = re.sub("[^a-z0-9._-]+", "_", name.lower())[:80].strip("._-") or "tensor"
    mark = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()
    return f"{'extras' if role == 'extra' else 'parameters'}/{slug}-{mark}.safetensors"


def no_key_twice(pairs):
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def refuse(word):
    raise AssertionError(f"{word} as a bare word")
