"""A reader of published chains, written from docs/format.md alone: it needs only the standard library and xxhash.

Another page specifies the bytes of a chunk, so the caller gives the function that decodes one:

    decode_delta(codec, data, shape, parent_values, dtypes) -> {state: bytes}
"""

import json
import math
import re
from itertools import product
from pathlib import Path

import xxhash

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "uint8": 1, "int64": 8}
CHUNK = 262_144
FIRST_LINE = re.compile(rb'\{"checksum":"xxh3-128:([0-9a-f]{32})",\n')


def digest(data):
    return xxhash.xxh3_128_hexdigest(data)


def read_sealed(data):
    line = FIRST_LINE.match(data)
    assert digest(data[line.end() :]) == line[1].decode()
    return json.loads(data)


class PublishedReader:
    """All steps of a published chain that its head leads to, one after another."""

    def __init__(self, folder, decode_delta):
        self.folder, self.decode_delta = Path(folder), decode_delta
        listed = read_sealed((self.folder / "chain.json").read_bytes())
        assert (listed["format"], listed["version"], listed["published"]) == ("ckpt-chain", 2, True)
        self.head = read_sealed((self.folder / "published/head.json").read_bytes())
        assert (self.head["format"], self.head["version"]) == ("ckpt-published-head", 1)

    def record(self, epoch, step, hashed=None, first=None):
        name = f"e{epoch:04d}-{step:010d}" if first is None else f"e{epoch:04d}-{first:010d}-{step:010d}"
        folder = "steps" if first is None else "folds"
        data = (self.folder / f"published/{folder}/{name}.json").read_bytes()
        assert hashed in (None, digest(data))
        record = read_sealed(data)
        assert (record["format"], record["version"]) == ("ckpt-published-step", 1)
        assert (record["epoch"], record["step"]) == (epoch, step)
        state = b"".join(bytes.fromhex(rank["state"]) for rank in record["ranks"])
        assert digest(state) == record["state"]
        return record

    def object(self, reference):
        hashed, nbytes, *_ = reference
        data = (self.folder / f"published/objects/{hashed}").read_bytes()
        assert (len(data), digest(data)) == (nbytes, hashed)
        return data

    def way_to(self, epoch, step, hashed, folds=()):
        """The records from the base to a step, by folds where there are any."""
        end = self.record(epoch, step, hashed)
        first = min((a for a, b in folds if b == step), default=None)
        record = end
        if first is not None:
            record = self.record(epoch, step, first=first)
            assert record["same_as"] == [epoch, step, hashed]
            assert record["state"] == end["state"]
        if record["parent"] is None:
            return [record]
        return [*self.way_to(*record["parent"], folds), record]

    def last(self, with_folds=False):
        folds = self.head["folds"] if with_folds else ()
        return self.way_to(self.head["epoch"], self.head["step"], self.head["record"], folds)

    def tensors(self, way):
        """The bytes of all tensors after the last record of a way, by name."""
        model = read_sealed(self.object(way[-1]["model"]))
        assert (model["format"], model["version"]) == ("ckpt-published-model", 1)
        chunks = {}
        for record in way:
            assert record["model"] == way[-1]["model"]
            for rank, share in enumerate(record["ranks"]):
                self._apply(model, rank, share, record["parent"] is None, chunks)
        whole = {name: bytearray(math.prod(shape) * ITEMSIZE[dtype]) for name, dtype, shape in model["tensors"]}
        for rank, pieces in enumerate(model["ranks"]):
            for number, (tensor, start, stop, *part) in enumerate(pieces):
                name, dtype, shape = model["tensors"][tensor]
                values = b"".join(chunks[key] for key in sorted(chunks) if key[:2] == (rank, number))
                places = flat_places(shape, start, stop)
                first, count = part or (0, len(places))
                for at, place in enumerate(places[first : first + count]):
                    size = ITEMSIZE[dtype]
                    whole[name][place * size : (place + 1) * size] = values[at * size : (at + 1) * size]
        return {name: bytes(data) for name, data in whole.items()}

    def _apply(self, model, rank, share, is_base, chunks):
        data = self.object(share["object"])
        assert data[:8] == b"CKPTSHR1"
        count = int.from_bytes(data[8:12], "little")
        sizes = [int.from_bytes(data[12 + 4 * i : 16 + 4 * i], "little") for i in range(count)]
        digests = data[12 + 4 * count : 12 + 20 * count]
        assert digest(digests) == share["state"]
        at, chunk = 12 + 20 * count, 0
        for number, (tensor, start, stop, *part) in enumerate(model["ranks"][rank]):
            _, dtype, _ = model["tensors"][tensor]
            size = part[1] if part else math.prod(b - a for a, b in zip(start, stop, strict=True))
            for index, first in enumerate(range(0, size, CHUNK)):
                key, n = (rank, number, index), min(CHUNK, size - first)
                coded, at = data[at : at + sizes[chunk]], at + sizes[chunk]
                if coded or is_base:
                    before = {} if is_base else {"param": chunks[key]}
                    decoded = self.decode_delta({"name": "difference"}, coded, (n,), before, {"param": dtype})
                    chunks[key] = decoded["param"]
                assert xxhash.xxh3_128_digest(chunks[key]) == digests[16 * chunk : 16 * chunk + 16]
                chunk += 1
        assert (at, chunk) == (len(data), count)


def flat_places(shape, start, stop):
    """Where the elements of a block lie in the whole tensor, in their order."""
    places = []
    for index in product(*(range(a, b) for a, b in zip(start, stop, strict=True))):
        place = 0
        for i, n in zip(index, shape, strict=True):
            place = place * n + i
        places.append(place)
    return places
