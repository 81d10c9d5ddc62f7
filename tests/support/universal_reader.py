"""A reader of the universal format, written from docs/format.md alone: it imports neither ckpt nor NumPy.

It checks all that the page asks of a reader, and gives the values of plain states. `universal_decoder.py` adds others.
"""

import hashlib
import json
import math
import re
import struct
from itertools import accumulate, groupby, islice, pairwise, product
from pathlib import Path

import xxhash

TAGS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "int64": "I64", "uint64": "U64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ", "float8_e8m0fnu": "F8_E8M0", "complex64": "C64",
}  # fmt: skip
ITEMSIZE = {name: int(re.search(r"\d+|$", name)[0] or 8) // 8 for name in TAGS}
ROLES = ("parameter", "frozen", "buffer", "extra")
PLAIN, CODED, DERIVED, IN_DELTA = range(4)
COLUMNS = {
    "U8": "parameter.names parameter.role state.dtype state.storage state.rank chunk.values", "U16": "state.name",
    "U32": "parameter.values state.parameter state.codec state.error state.pack "
           "delta.parameter delta.codec delta.pack coded.nbytes",
    "U64": "parameter.ends state.offset state.nbytes state.dims delta.offset delta.nbytes coded.stored",
}  # fmt: skip
OF_BOXES = {"U8": "whole.names box.rank", "U32": "box.whole", "U64": "whole.ends box.first box.dims box.start box.stop"}
LETTERS = {"U8": "B", "U16": "H", "U32": "I", "U64": "Q"}


class UniversalReader:
    """A checked universal checkpoint: every checksum of JSON, index and headers holds; those of values when read.

    `entries`: {parameter: {"role", "values", "states": {name: row}, "delta": row, if there is one}}. A row has what the
    columns state, and the items of tables in the place of their numbers. In version 2, these are boxes, and `wholes`
    has the parameters: {parameter: {state: (shape, [(box, [its elements in the whole, in C order])])}}.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.manifest = tables = read_sealed(self.folder / "manifest.json")
        assert tables["format"] == "ckpt-universal"
        assert tables["version"] in (1, 2)
        assert not {"saved_as", "parameters"} & tables.keys()
        assert [tables[key][0] for key in ("codecs", "values", "errors")] == [{"codec": None, "base": None}, {}, None]
        assert all(item["codec"]["name"] for item in tables["codecs"][1:] + tables["deltas"])
        self.columns = read_columns(self.folder / "index.safetensors", tables["index"], tables["version"])
        self.entries, self.wholes = self._read_index(self.columns), None
        if tables["version"] == 2:
            self.wholes = self._read_boxes(self.columns)
        for entry in self.entries.values():
            check_states(entry["states"], entry.get("delta", {"states": [], "parent_states": []}))
        self._check_names()
        self._check_packs()
        if (tables.get("original") or {}).get("form") is not None:
            parse_json(read_checked(self.folder / "original.json", tables["original"]["form"]))
        assert tables["content"] == self._content_id()

    def values(self, parameter, name):
        """The bytes of the values of a state, checked: little-endian, in C order."""
        state = self.entries[parameter]["states"][name]
        values = self.stored_bytes(state) if state["storage"] == PLAIN else self.decoded(parameter, name)
        size = ITEMSIZE[state["dtype"]] * chunk_form(state["shape"])[0]
        assert len(values) == math.prod(state["shape"]) * ITEMSIZE[state["dtype"]]
        assert [xxhash.xxh3_128_digest(values[at : at + size]) for at in range(0, len(values), size)] == state["hashes"]
        return values

    def whole_values(self, parameter, name):
        """The bytes of a state of a parameter, also of one that is in boxes."""
        if self.wholes is None:
            return self.values(parameter, name)
        shape, boxes = self.wholes[parameter][name]
        size = ITEMSIZE[self.entries[boxes[0][0]]["states"][name]["dtype"]]
        whole = bytearray(math.prod(shape) * size)
        for box, elements in boxes:
            values = self.values(box, name)
            for number, element in enumerate(elements):
                whole[element * size : (element + 1) * size] = values[number * size : (number + 1) * size]
        return bytes(whole)

    def decoded(self, parameter, name):
        raise NotImplementedError(f"{parameter}/{name}: {self.entries[parameter]['states'][name]['codec']}")

    def stored_bytes(self, row):
        return self._pack(row["pack"]).read_bytes()[row["offset"] : row["offset"] + row["nbytes"]]

    def _pack(self, number):
        assert len(self.manifest["packs"][number]) == 3  # `universal_decoder.py` reads those of chains
        return self.folder / f"packs/{number:05d}.safetensors"

    def _read_index(self, columns):
        names, tables = names_of(columns["parameter.names"], columns["parameter.ends"]), self.manifest
        rows = rows_of(columns, "parameter", "role values ends")
        entries = [{"role": ROLES[r["role"]], "values": tables["values"][r["values"]], "states": {}} for r in rows]
        assert [number for number, _ in groupby(columns["state.parameter"])] == list(range(len(entries)))
        dims, hashes = iter(columns["state.dims"]), iter(columns["chunk.values"])
        coded = zip(columns["coded.nbytes"], columns["coded.stored"], strict=True)
        for row in rows_of(columns, "state", "parameter name dtype storage codec error pack offset nbytes rank"):
            assert row["rank"] <= 64
            shape, dtype = list(islice(dims, row["rank"])), tables["dtypes"][row["dtype"]]
            assert math.prod(size or 1 for size in shape) < 2**62
            name, states = tables["states"][row["name"]], entries[row["parameter"]]["states"]
            assert name not in states
            assert (row["storage"] in (PLAIN, IN_DELTA)) == (row["codec"] == 0)
            fields = {"shape": shape, "dtype": dtype, "error": tables["errors"][row["error"]]}
            states[name] = row | tables["codecs"][row["codec"]] | fields
            states[name]["hashes"] = [bytes(islice(hashes, 16)) for _ in range(chunk_count(shape))]
            if row["storage"] == CODED:
                states[name]["chunks"] = take_chunks(coded, row, shape, ITEMSIZE[dtype])
            elif row["storage"] == PLAIN:
                assert row["nbytes"] == math.prod(shape) * ITEMSIZE[dtype]
            else:
                assert (row["pack"], row["offset"], row["nbytes"]) == (0, 0, 0)
        assert all(a < b for a, b in pairwise(columns["delta.parameter"]))
        for row in rows_of(columns, "delta", "parameter codec pack offset nbytes"):
            entries[row["parameter"]]["delta"] = delta = row | tables["deltas"][row["codec"]]
            states = [entries[row["parameter"]]["states"][name] for name in delta["states"]]
            itemsize = sum(ITEMSIZE[state["dtype"]] for state in states)
            assert len(tables["packs"][row["pack"]]) == 3
            delta["chunks"] = take_chunks(coded, row, states[0]["shape"], itemsize)
            assert chunk_form(states[0]["shape"])[0] * itemsize <= 2**26
        assert [*dims, *hashes, *coded] == []
        return dict(zip(names, entries, strict=True))

    def _read_boxes(self, columns):
        names = names_of(columns["whole.names"], columns["whole.ends"])
        assert [number for number, _ in groupby(columns["box.whole"])] == list(range(len(names)))
        axes = iter(zip(*(columns[f"box.{key}"] for key in ("dims", "start", "stop")), strict=True))
        wholes, same = {}, {}
        for row, (box, entry) in zip(rows_of(columns, "box", "whole rank first"), self.entries.items(), strict=True):
            assert row["rank"] <= 64
            dims, start, stop = zip(*islice(axes, row["rank"]), strict=True) if row["rank"] else ((), (), ())
            assert all(low <= high <= size for size, low, high in zip(dims, start, stop, strict=True))
            assert math.prod(size or 1 for size in dims) < 2**62
            name, block = names[row["whole"]], [high - low for low, high in zip(start, stop, strict=True)]
            assert same.setdefault(name, (entry["role"], entry["values"])) == (entry["role"], entry["values"])
            for state, stored in entry["states"].items():
                count = math.prod(stored["shape"])
                is_block = (stored["shape"], row["first"]) == (block, 0)
                assert is_block or (len(stored["shape"]) == 1 and row["first"] + count <= math.prod(block))
                first = wholes.setdefault(name, {}).setdefault(state, (list(dims), []))
                assert first[0] == list(dims)
                first[1].append((box, stored["dtype"], (start, stop, row["first"], count)))
        assert list(axes) == []
        return {name: {s: self._placed(*one) for s, one in states.items()} for name, states in wholes.items()}

    @staticmethod
    def _placed(shape, boxes):
        assert len({dtype for _, dtype, _ in boxes}) == 1
        assert sum(place[3] for *_, place in boxes) == math.prod(shape)  # so no list below is longer than the tensor
        placed = [(box, elements_of(shape, *place)) for box, _, place in boxes]
        assert sorted(element for _, elements in placed for element in elements) == list(range(math.prod(shape)))
        return shape, placed

    def _check_names(self):
        roles = {name: entry["role"] for name, entry in self.entries.items()}
        if self.wholes is not None:
            roles = {name: roles[next(iter(states.values()))[1][0][0]] for name, states in self.wholes.items()}
        for text in re.findall(r'\{"\$tensor":("(?:[^"\\]|\\.)*")\}', canonical(self.manifest["extras"])):
            assert roles[json.loads(text)] == "extra"
        for alias, name in self.manifest["aliases"].items():
            assert (alias in roles, name in roles) == (False, True)
        for runs in (group["parameters"] for group in self.manifest["groups"]):
            assert all(0 <= first < first + count <= len(roles) for first, count in runs)
            assert sum(count for _, count in runs) <= len(roles)

    def _check_packs(self):
        """The ranges of each own pack follow one another; the headers of all describe the same as the index."""
        slots, used = [[] for _ in self.manifest["packs"]], set()
        for name, entry in self.entries.items():
            stored = [(key, row) for key, row in entry["states"].items() if row["storage"] in (PLAIN, CODED)]
            for key, row in [*stored, *([("delta", entry["delta"])] if "delta" in entry else [])]:
                text = f"{name}/{key}".encode("utf-8", "backslashreplace").decode()
                while text in used:
                    text += "_"
                used.add(text)
                form = ("U8", [row["nbytes"]]) if "chunks" in row else (TAGS[row["dtype"]], row["shape"])
                slots[row["pack"]].append((row["offset"], row["nbytes"], text, *form))
        for number, (nbytes, begin, digest, *owner) in enumerate(self.manifest["packs"]):
            path, expected, at = self._pack(number), {}, begin
            assert 8 < begin <= nbytes == path.stat().st_size
            raw = path.read_bytes()[:begin]
            assert (checksum(raw), struct.unpack("<Q", raw[:8])) == (digest, (begin - 8,))
            for offset, length, text, tag, shape in sorted(slots[number]):
                assert offset >= at if owner else offset == at
                at = offset + length
                expected[text] = {"dtype": tag, "shape": shape, "data_offsets": [offset - begin, at - begin]}
            actual, wanted = parse_json(raw[8:]), {"__metadata__": {"ckpt": "universal 1"}, **expected}
            assert (expected and at <= nbytes) if owner else (at, actual) == (nbytes, wanted)
            assert all(slot in actual.values() for slot in wanted.values())  # an owner has others, too, by other names

    def _content_id(self):
        order, names = sorted(self.entries), list(self.entries)
        entries = [self.entries[name] for name in order]
        in_groups = names if self.wholes is None else list(self.wholes)
        place = {name: number for number, name in enumerate(sorted(in_groups))}
        states = [(name, row) for entry in entries for name, row in sorted(entry["states"].items())]
        state_names, dtypes = sorted({name for name, _ in states}), sorted({row["dtype"] for _, row in states})
        values = sorted({canonical(entry["values"]) for entry in entries})
        head = {key: self.manifest[key] for key in ("aliases", "extras")} | {"dtypes": dtypes, "states": state_names}
        head |= {"parameters": len(order), "values": list(map(json.loads, values)), "groups": []}
        for group in self.manifest["groups"]:
            places = [place[name] for first, count in group["parameters"] for name in in_groups[first : first + count]]
            head["groups"].append({"options": group["options"], "parameters": places})
        encoded = [name.encode("utf-8", "surrogatepass") for name in order]
        columns = [
            ("I", list(map(len, encoded))), ("B", b"".join(encoded)), ("B", [ROLES.index(e["role"]) for e in entries]),
            ("I", [values.index(canonical(entry["values"])) for entry in entries]),
            ("I", [len(e["states"]) for e in entries]), ("H", [state_names.index(name) for name, _ in states]),
            ("B", [dtypes.index(row["dtype"]) for _, row in states]), ("B", [row["rank"] for _, row in states]),
            ("Q", [size for _, row in states for size in row["shape"]]),
            ("B", b"".join(digest for _, row in states for digest in row["hashes"])),
        ]  # fmt: skip
        columns += self._box_columns(order) if self.wholes is not None else []
        content = hashlib.blake2b(canonical(head).encode(), digest_size=32)
        for letter, column in columns:
            content.update(struct.pack(f"<{len(column)}{letter}", *column))
        return f"blake2b-256:{content.hexdigest()}"

    def _box_columns(self, order):
        names, columns, boxes = sorted(self.wholes), self.columns, list(self.entries)
        encoded, rows = [name.encode("utf-8", "surrogatepass") for name in names], [boxes.index(name) for name in order]
        ends = [0, *accumulate(columns["box.rank"])]
        owners = [names.index(list(self.wholes)[columns["box.whole"][row]]) for row in rows]
        return [
            ("I", list(map(len, encoded))), ("B", b"".join(encoded)), ("I", owners),
            ("B", [columns["box.rank"][row] for row in rows]), ("Q", [columns["box.first"][row] for row in rows]),
            *(
                ("Q", [n for row in rows for n in columns[f"box.{key}"][ends[row] : ends[row + 1]]])
                for key in ("dims", "start", "stop")
            ),
        ]  # fmt: skip


def names_of(blob, ends):
    blob, ends = bytes(blob), [0, *ends]
    assert (ends, ends[-1]) == (sorted(ends), len(blob))
    names = [blob[a:b].decode("utf-8", "surrogatepass") for a, b in pairwise(ends)]
    assert len(set(names)) == len(names)
    return names


def elements_of(shape, start, stop, first, count):
    """The numbers of `count` elements of a block in C order, from the first on, counted in the full tensor."""
    numbers = []
    for index in islice(product(*map(range, start, stop)), first, first + count):
        number = 0
        for size, at in zip(shape, index, strict=True):
            number = number * size + at
        numbers.append(number)
    return numbers


def check_states(states, delta):
    assert sorted(delta["states"]) == sorted(name for name, state in states.items() if state["storage"] == IN_DELTA)
    assert set(delta["parent_states"]) <= set(delta["states"])
    assert all(states[name]["shape"] == states[delta["states"][0]]["shape"] for name in delta["states"])
    for state in states.values():
        assert (state["storage"] == DERIVED) == (state["codec"] is not None and state["codec"]["name"] == "rounded")
        assert state["storage"] != DERIVED or state["base"] is not None
        if state["base"] is not None:
            base = states[state["base"]]
            assert (base["shape"], base["base"]) == (state["shape"], None)
            assert state["storage"] == DERIVED or base["storage"] in (PLAIN, CODED)


def chunk_form(shape):
    """The elements of a full chunk, and its columns; None for a chunk that is a vector."""
    widths = [math.prod(shape[axis:]) for axis in range(1, len(shape))]
    fitting = [width for width in widths if 2 <= width <= 16_384] or [w for w in widths[-1:] if 2 <= w <= 262_144]
    return (262_144 // fitting[0] * fitting[0], fitting[0]) if fitting else (262_144, None)


def chunk_count(shape):
    return -(-math.prod(shape) // chunk_form(shape)[0])


def take_chunks(coded, row, shape, itemsize):
    chunks = list(islice(coded, chunk_count(shape)))
    total, elements = sum(length for length, _ in chunks), min(chunk_form(shape)[0], math.prod(shape))
    assert row["nbytes"] == total + -total % 8
    assert all(length <= elements * itemsize + 1024 for length, _ in chunks)
    return chunks


def rows_of(columns, kind, names):
    rows = zip(*(columns[f"{kind}.{name}"] for name in names.split()), strict=True)
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


def read_checked(path, stated):
    raw = path.read_bytes()
    assert (len(raw), checksum(raw)) == (stated["nbytes"], stated["checksum"])
    return raw


def read_columns(path, stated, version):
    raw, columns = read_checked(path, stated), {}
    begin = at = 8 + struct.unpack("<Q", raw[:8])[0]
    header = parse_json(raw[8:begin])
    known = COLUMNS if version == 1 else {tag: f"{text} {OF_BOXES.get(tag, '')}" for tag, text in COLUMNS.items()}
    assert header.pop("__metadata__", None) == {"ckpt": "universal 1: the index"}
    for name, slot in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        assert name in known[slot["dtype"]].split()
        assert slot["shape"][1:] == ([16] if name == "chunk.values" else [])
        assert begin + slot["data_offsets"][0] == at
        at = begin + slot["data_offsets"][1]
        numbers = f"<{math.prod(slot['shape'])}{LETTERS[slot['dtype']]}"
        columns[name] = struct.unpack(numbers, raw[begin + slot["data_offsets"][0] : at])
    assert at == len(raw)
    assert columns.keys() == set(" ".join(known.values()).split())
    return columns


def read_sealed(path):
    raw = path.read_bytes()
    assert raw.startswith(b'{"checksum":"%s",\n' % checksum(raw[57:]).encode())
    return parse_json(raw)


def parse_json(raw):
    """JSON without duplicate keys, and without `NaN` and `Infinity`, which are in no empty list."""
    once = lambda pairs: dict(pairs) if len(dict(pairs)) == len(pairs) else [].index(pairs)  # noqa: E731
    return json.loads(raw.decode("utf-8"), object_pairs_hook=once, parse_constant=[].index)


def checksum(data):
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"


def canonical(value):
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
