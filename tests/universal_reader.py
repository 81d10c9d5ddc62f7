"""A reader of the universal format, written from docs/format.md alone: it imports neither ckpt nor NumPy.

Every MUST of the page for a reader or a writer is an assertion here. The bytes of a chunk are specified by other pages,
so the caller gives the functions that decode them:

    decode(codec, data, shape, dtype, base, base_dtype) -> bytes
        the values of a chunk of a coded state. `base`: the bytes of the same block of the base, or None
    decode_delta(codec, data, shape, parent_values, dtypes) -> {state: bytes}
        the values of a chunk of a delta. `parent_values`: {state: bytes}, `dtypes`: {state: text}
"""

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
ROLES = ("parameter", "frozen", "buffer", "extra")
FILE = re.compile(r"(parameters|extras)/[a-z0-9][a-z0-9._-]{0,110}\.safetensors")
FIRST_LINE = re.compile(rb'\{"checksum":"xxh3-128:([0-9a-f]{32})",\n')
CONTENT = re.compile(r"blake2b-256:[0-9a-f]{64}")
MEMBER_FOLDER = re.compile(r"step-[0-9]{10,}(\.[0-9]+)?")
MAX_CHUNK_ELEMENTS = 2**22
MAX_DELTA_CHUNK_NBYTES = 2**26
MAX_CHUNK_OVERHEAD = 1024


class UniversalReader:
    """A checked universal checkpoint: every checksum holds, and every state decodes to its values."""

    def __init__(self, folder, decode=None, decode_delta=None):
        self.folder = Path(folder)
        self.decode, self.decode_delta = decode, decode_delta
        self._decoded_deltas = {}
        self.manifest = read_sealed(self.folder / "manifest.json")
        assert (self.manifest["format"], self.manifest["version"]) == ("ckpt-universal", 1)
        assert "saved_as" not in self.manifest
        assert self.manifest["content"] == content_id(self.manifest)
        listed = self.manifest["parameters"]
        self.entries = {entry["name"]: entry for entry in listed}
        assert len(self.entries) == len(listed) == len({entry["file"] for entry in listed})
        self._check_names()
        self.parent = self._open_parent()
        for entry in listed:
            self._check_entry(entry)

    def values(self, parameter, name):
        """The bytes of the values of a state: little-endian, in C order."""
        entry = self.entries[parameter]
        state = entry["states"][name]
        if name in entry.get("delta", {}).get("states", ()):
            if parameter not in self._decoded_deltas:
                self._decoded_deltas[parameter] = self._delta_values(entry)
            return self._decoded_deltas[parameter][name]
        if "chunk" in state:
            return self._coded_values(entry, state)
        if "offset" in state:
            return self._stored_bytes(entry, state)
        base = entry["states"][state["base"]]
        base_values = self.values(parameter, state["base"])
        if base["dtype"] == state["dtype"]:
            return base_values
        return ROUND[base["dtype"], state["dtype"]](base_values)

    def _check_names(self):
        extras = {name for name, entry in self.entries.items() if entry["role"] == "extra"}
        assert set(tensor_names(self.manifest["extras"])) <= extras
        for alias, name in self.manifest["aliases"].items():
            assert alias not in self.entries
            assert name in self.entries
        for group in self.manifest["groups"]:
            assert set(group["parameters"]) <= set(self.entries)

    def _open_parent(self):
        if not any(entry.get("delta", {}).get("parent_states") for entry in self.entries.values()):
            return None
        stated = self.manifest["parent"]
        assert not stated["path"].startswith("/")
        parent = UniversalReader(self.folder / stated["path"], self.decode, self.decode_delta)
        assert parent.manifest["content"] == stated["content"]
        return parent

    def _check_entry(self, entry):
        assert entry["role"] in ROLES
        assert entry["file"] == file_name(entry["name"], entry["role"])
        assert FILE.fullmatch(entry["file"])
        assert entry["states"]
        if "delta" in entry:
            self._check_delta(entry)
        self._check_file(entry)
        for name, state in entry["states"].items():
            self._check_state(entry, name, state)
            assert checksum(self.values(entry["name"], name)) == state["values"]

    def _check_delta(self, entry):
        delta, states = entry["delta"], entry["states"]
        in_delta = [states[name] for name in delta["states"]]
        assert "delta" not in states
        assert len(set(delta["states"])) == len(in_delta) > 0
        assert set(delta["parent_states"]) <= set(delta["states"])
        assert all(state["shape"] == in_delta[0]["shape"] for state in in_delta)
        assert all(state["codec"] is None and "base" not in state and "offset" not in state for state in in_delta)
        for name in delta["parent_states"]:
            parent_entry = self.parent.entries[entry["name"]]
            parent_state = parent_entry["states"][name]
            assert (parent_state["dtype"], parent_state["shape"]) == (states[name]["dtype"], states[name]["shape"])
            if name in parent_entry.get("delta", {}).get("states", ()):
                assert parent_entry["delta"]["chunk"] == delta["chunk"]

    def _check_file(self, entry):
        raw = (self.folder / entry["file"]).read_bytes()
        assert len(raw) == entry["nbytes"]
        stored = {name: state for name, state in entry["states"].items() if "offset" in state}
        order = sorted(stored, key=lambda name: name == "param" and "fp32" in entry["states"])
        if "delta" in entry:
            stored, order = {**stored, "delta": entry["delta"]}, ["delta", *order]
        data_start = min(item["offset"] for item in stored.values())
        assert data_start % 64 == 0
        assert struct.unpack("<Q", raw[:8]) == (data_start - 8,)
        assert checksum(raw[:data_start]) == entry["header"]
        header = json.loads(raw[8:data_start], object_pairs_hook=without_duplicates)
        label = entry["name"].encode("utf-8", "backslashreplace").decode()
        assert header.pop("__metadata__") == {"ckpt": "universal 1", "parameter": label}
        assert list(header) == order
        end = data_start
        for name, slot in header.items():
            item = stored[name]
            assert item["offset"] == end
            end += item["nbytes"]
            assert slot["data_offsets"] == [item["offset"] - data_start, end - data_start]
            is_plain = item["codec"] is None
            expected = (TAGS[item["dtype"]], item["shape"]) if is_plain else ("U8", [item["nbytes"]])
            assert (slot["dtype"], slot["shape"]) == expected
            assert checksum(raw[item["offset"] : end]) == item["stored"]
        assert end == len(raw)

    def _check_state(self, entry, name, state):
        assert "loss" not in state
        in_delta = entry.get("delta", {}).get("states", ())
        if name in in_delta:
            return
        if "base" in state:
            base = entry["states"][state["base"]]
            assert "base" not in base
            assert base["shape"] == state["shape"]
            assert "offset" in base or state["base"] in in_delta
        if "offset" not in state:
            assert state["codec"] == {"name": "rounded"}
            assert "base" in state
        elif state["codec"] is None:
            assert "chunk" not in state
            assert state["nbytes"] == math.prod(state["shape"]) * ITEMSIZE[state["dtype"]]
            assert state["stored"] == state["values"]
        else:
            assert state["codec"]["name"]
            assert "chunk" in state
            assert state.get("base") not in in_delta

    def _stored_bytes(self, entry, item):
        with (self.folder / entry["file"]).open("rb") as file:
            file.seek(item["offset"])
            return file.read(item["nbytes"])

    def _coded_values(self, entry, state):
        dtype, base, base_dtype = state["dtype"], None, None
        if "base" in state:
            base_dtype = entry["states"][state["base"]]["dtype"]
            base = self.values(entry["name"], state["base"])
        values = []
        for chunk in chunks(self._stored_bytes(entry, state), state["shape"], state["chunk"], ITEMSIZE[dtype]):
            block = None if base is None else chunk.block(base, base_dtype)
            decoded = self.decode(state["codec"], chunk.data, chunk.shape, dtype, block, base_dtype)
            chunk.check([decoded])
            values.append(decoded)
        return b"".join(values)

    def _delta_values(self, entry):
        """The values of all states of a delta: {state: bytes}."""
        delta, name = entry["delta"], entry["name"]
        dtypes = {state: entry["states"][state]["dtype"] for state in delta["states"]}
        parent_values = {state: self.parent.values(name, state) for state in delta["parent_states"]}
        itemsize = sum(ITEMSIZE[dtype] for dtype in dtypes.values())
        assert math.prod(delta["chunk"]) * itemsize <= MAX_DELTA_CHUNK_NBYTES
        shape = entry["states"][delta["states"][0]]["shape"]
        values = {state: [] for state in dtypes}
        for chunk in chunks(self._stored_bytes(entry, delta), shape, delta["chunk"], itemsize):
            blocks = {state: chunk.block(data, dtypes[state]) for state, data in parent_values.items()}
            decoded = self.decode_delta(delta["codec"], chunk.data, chunk.shape, blocks, dtypes)
            chunk.check([decoded[state] for state in dtypes])
            for state in dtypes:
                values[state].append(decoded[state])
        return {state: b"".join(parts) for state, parts in values.items()}


class ChainReader:
    """A checked chain: `members` of chain.json, and a `UniversalReader` for each step in `checkpoints`."""

    def __init__(self, folder, decode=None, decode_delta=None):
        index = read_sealed(Path(folder) / "chain.json")
        assert (index["format"], index["version"]) == ("ckpt-chain", 1)
        self.members = index["members"]
        self.checkpoints = {}
        assert self.members[0]["kind"] == "base"
        previous = None
        for member in self.members:
            assert "losses" not in member
            assert MEMBER_FOLDER.fullmatch(member["folder"])
            assert member["kind"] in ("base", "delta")
            assert member["parent"] == (None if member["kind"] == "base" else previous["content"])
            assert previous is None or previous["step"] < member["step"]
            checkpoint = UniversalReader(Path(folder) / member["folder"], decode, decode_delta)
            assert checkpoint.manifest["content"] == member["content"]
            states = [state for entry in checkpoint.entries.values() for state in entry["states"].items()]
            assert {name for name, state in states if "error" in state} == set(member["errors"])
            self.checkpoints[member["step"]] = checkpoint
            previous = member
        assert len({member["folder"] for member in self.members}) == len(self.members)


class Chunk:
    """The bytes of one chunk, its shape, and the hash that its values must have."""

    def __init__(self, data, shape, start, digest):
        self.data, self.shape, self._start, self._digest = data, shape, start, digest

    def block(self, values, dtype):
        """The same elements of another state of the parameter."""
        begin = self._start * ITEMSIZE[dtype]
        return values[begin : begin + math.prod(self.shape) * ITEMSIZE[dtype]]

    def check(self, decoded):
        assert xxhash.xxh3_64(b"".join(decoded)).intdigest() == self._digest


def chunks(data, shape, chunk, itemsize):
    """The chunks in the stored bytes of a coded state or a delta: chunks, filling, directory."""
    count, size = math.prod(shape), math.prod(chunk)
    assert len(chunk) in (1, 2)
    assert 1 <= size <= MAX_CHUNK_ELEMENTS
    assert len(chunk) == 1 or count % chunk[1] == 0
    chunk_count = -(-count // size)
    directory = len(data) - 16 * chunk_count
    assert directory >= 0
    offset = 0
    for index, (length, digest) in enumerate(struct.iter_unpack("<QQ", data[directory:])):
        start = index * size
        elements = min(size, count - start)
        assert length <= elements * itemsize + MAX_CHUNK_OVERHEAD
        chunk_shape = [elements] if len(chunk) == 1 else [elements // chunk[1], chunk[1]]
        yield Chunk(data[offset : offset + length], chunk_shape, start, digest)
        offset += length
    assert data[offset:directory] == bytes(-offset % 8)


def read_sealed(path):
    """The JSON object in a file whose first line is the checksum of all bytes after it."""
    raw = path.read_bytes()
    first_line = FIRST_LINE.match(raw)
    assert first_line
    assert first_line.end() == 57
    assert xxhash.xxh3_128(raw[57:]).hexdigest().encode() == first_line[1]
    return json.loads(raw.decode("utf-8"), object_pairs_hook=without_duplicates, parse_constant=refuse_constant)


def round_to_bfloat16(data):
    result = bytearray()
    for (bits,) in struct.iter_unpack("<I", data):
        if bits & 0x7FFFFFFF > 0x7F800000:
            result += struct.pack("<H", bits >> 31 << 15 | 0x7FC0)
        else:
            result += struct.pack("<H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    return bytes(result)


def round_to_float16(data):
    result = bytearray()
    for (value,) in struct.iter_unpack("<f", data):
        # 65,520 is halfway between the largest finite value and the next step, and is the first that becomes infinite.
        result += struct.pack("<e", math.copysign(math.inf, value) if abs(value) >= 65520 else value)
    return bytes(result)


ROUND = {("float32", "bfloat16"): round_to_bfloat16, ("float32", "float16"): round_to_float16}


def checksum(data):
    return f"xxh3-128:{xxhash.xxh3_128(data).hexdigest()}"


def content_id(manifest):
    parameters = []
    for entry in manifest["parameters"]:
        states = [[name, s["dtype"], s["shape"], s["values"]] for name, s in entry["states"].items()]
        parameters.append([entry["name"], entry["role"], sorted(states), entry["values"]])
    identified = {
        "aliases": manifest["aliases"],
        "extras": manifest["extras"],
        "groups": [{"options": g["options"], "parameters": g["parameters"]} for g in manifest["groups"]],
        "parameters": sorted(parameters),
    }
    text = json.dumps(identified, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return f"blake2b-256:{hashlib.blake2b(text.encode(), digest_size=32).hexdigest()}"


def file_name(name, role):
    slug = re.sub("[^a-z0-9._-]+", "_", name.lower())[:80].strip("._-") or "tensor"
    digest = hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=10).hexdigest()
    return f"{'extras' if role == 'extra' else 'parameters'}/{slug}-{digest}.safetensors"


def tensor_names(value):
    """The names in every `$tensor` of a typed JSON value."""
    if isinstance(value, list):
        for item in value:
            yield from tensor_names(item)
    elif isinstance(value, dict):
        if list(value) == ["$tensor"]:
            yield value["$tensor"]
        else:
            yield from tensor_names(list(value.values()))


def without_duplicates(pairs):
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


def refuse_constant(word):
    raise AssertionError(f"{word} as a bare word")
