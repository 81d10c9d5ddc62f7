"""The records of random number generators: all states in full, or what changed since the record before.

A step changes few words of a generator's state, mostly its position; a Mersenne Twister also computes new words after
every 624 draws, from the old ones. So a record of changes has the generators that changed: how often each computed new
words, and then the exclusive or of its bytes with those that follow from the record before. All bytes of a record are
one chunk, a frame of zstd.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.chunk.zstd import compress, decompress
from ckpt_codecs.errors import CodecError
from ckpt_formats.containers.safetensors import is_natural
from ckpt_formats.containers.typed_json import decode
from ckpt_formats.core.errors import CorruptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.values import Value
from ckpt_formats.universal.gradients.record import MAX_CHUNK_OVERHEAD, Kind, LogRecord, hash_values

MAX_CHANGES = 100
"""The maximum number of records of changes after one of full states, and of new words in them: a restore needs all."""
MAX_TWISTS = 64
"""How often a generator may compute new words in a record; after more, the record has the new words themselves."""
MAX_NEEDED = 1 << 14
"""The maximum number of records of changes that a reader accepts after one of full states."""
_MAX_NBYTES = 1 << 20
"""The maximum number of bytes of all states of a rank."""
_ARRAYS = {"python": "words", "numpy": "keys"}
"""The field for the array of a generator whose state has other fields."""
_DEVICE = "cuda:"
_KEY_WORDS = 624
_MANY_WORDS = 64
"""More words than this differ only after the generator computed new ones."""


@dataclass(frozen=True)
class GeneratorState:
    """The state of one generator."""

    fields: Mapping[str, Any]
    """Typed JSON that is not decoded; null stands for the array."""
    words: Array
    """The bytes of the array, (n,) uint8."""


class RandomStateEncoder:
    """Encodes states as changes of the last ones."""

    def __init__(self) -> None:
        self._last: dict[str, GeneratorState] = {}
        self._changes = 0
        """The number of records of changes since the last one of full states, and of new words in them."""

    def record(self, states: Mapping[str, GeneratorState]) -> tuple[dict[str, Any], list[bytes], list[int]]:
        """The text of a record, its chunk, and the hash of the states in it. `states`: those that changed, by name."""
        last = self._last
        self._last = {**last, **states}
        fits = all(name in last and last[name].words.size == one.words.size for name, one in states.items())
        if not fits or self._changes >= MAX_CHANGES:
            self._changes = 0
            rows = [[name, one.words.size] for name, one in self._last.items()]
            fields = {name: dict(one.fields) for name, one in self._last.items()}
            return _record({"full": rows, "fields": fields}, [one.words for one in self._last.values()])
        twists = {name: count for name, one in states.items() if (count := _count_twists(name, last[name], one))}
        self._changes += 1 + max(twists.values(), default=0)
        changed = {}
        for name, one in states.items():
            before = last[name].fields
            if own := {key: value for key, value in one.fields.items() if key not in before or before[key] != value}:
                changed[name] = own
        meta = {"changed": list(states)} | ({"twists": twists} if twists else {})
        words = [one.words ^ _twisted(name, last[name].words, twists.get(name, 0)) for name, one in states.items()]
        meta, chunks, _ = _record(meta | ({"fields": changed} if changed else {}), words)
        return meta, chunks, [_hash_of(states)]


def _record(meta: dict[str, Any], words: list[Array]) -> tuple[dict[str, Any], list[bytes], list[int]]:
    joined = np.concatenate(words)
    return meta, [compress(joined, 3)], [hash_values(joined)]


def _hash_of(states: Mapping[str, GeneratorState]) -> int:
    return hash_values(np.concatenate([one.words for one in states.values()]))


def random_states_at(records: Iterable[LogRecord], step: int, path: Path, reader: Reader) -> dict[str, Value]:
    """The states of a rank's generators at a step, by generator: arrays of bytes or words.

    `records`: those of `path` in order. Raises `CorruptError`.
    """
    needed: list[LogRecord] = []
    stop = 0
    for record in records:
        if record.kind is Kind.RANDOM:
            counts = record.step <= step  # one of the next step may come before, if an error has interrupted that
            if counts and "full" in record.meta:
                needed.clear()
            needed.append(record)
            stop = len(needed) if counts else stop
            if stop > MAX_NEEDED:
                raise _damaged_error(record, path)
    states: dict[str, GeneratorState] = {}
    at_step: dict[str, GeneratorState] = {}
    for record in needed[:stop]:
        changed = _decode(record, states, path, reader)
        states |= changed
        if record.step <= step:
            at_step |= changed
    return as_values(at_step, path)


def as_values(states: Mapping[str, GeneratorState], where: Path) -> dict[str, Value]:
    """Return states as a checkpoint has them: arrays of bytes or words, by generator. Raises `CorruptError`."""
    values: dict[str, Value] = {}
    for name, one in states.items():
        fields = decode(dict(one.fields), where)
        if name not in _ARRAYS:
            values[name] = one.words
        elif not isinstance(fields, dict) or one.words.size % 4:
            raise CorruptError(f"the state of the generator {name!r:.40} is damaged", where=where)
        else:
            array = one.words.view("<u4")
            values[name] = {key: array if key == _ARRAYS[name] else value for key, value in fields.items()}
    devices = [name for name in values if name.startswith(_DEVICE)]
    return values | {"cuda": [values.pop(name) for name in devices]} if devices else values


def without_old_random_states(records: list[LogRecord]) -> list[LogRecord]:
    """The records of a rank without those of generators that come before the last full states."""
    last = max((n for n, one in enumerate(records) if one.kind is Kind.RANDOM and "full" in one.meta), default=0)
    return [one for number, one in enumerate(records) if number >= last or one.kind is not Kind.RANDOM]


def _decode(
    record: LogRecord, before: Mapping[str, GeneratorState], path: Path, reader: Reader
) -> dict[str, GeneratorState]:
    """The states in a record, by generator. Raises `CorruptError`."""
    meta = record.read_meta(path, reader)
    fields, twists, is_full = meta.get("fields", {}), meta.get("twists", {}), "full" in meta
    rows = _sizes(meta["full"]) if is_full else _changed(meta.get("changed"), before)
    if not rows or not isinstance(fields, dict) or not isinstance(twists, dict) or record.count != 1:
        raise _damaged_error(record, path)
    total = sum(rows.values())
    data, digest = record.read_chunk(path, 0, _MAX_NBYTES + MAX_CHUNK_OVERHEAD, reader)
    try:
        content = np.frombuffer(decompress(data, total), np.uint8)
    except CodecError:
        raise _damaged_error(record, path) from None
    states: dict[str, GeneratorState] = {}
    at = 0
    for name, nbytes in rows.items():
        words, own = content[at : at + nbytes].copy(), fields.get(name, {})
        at += nbytes
        count = twists.get(name, 0)
        if not isinstance(own, dict) or not is_natural(count) or count > MAX_TWISTS:
            raise _damaged_error(record, path)
        if is_full:
            states[name] = GeneratorState(own, words)
        else:
            words ^= _twisted(name, before[name].words, count)
            states[name] = replace(before[name], fields={**before[name].fields, **own}, words=words)
    if _hash_of(states) != digest:
        raise _damaged_error(record, path)
    return states


def _sizes(rows: Any) -> dict[str, int]:
    """The sizes of generators by name; none if these rows are damaged."""
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 2 for row in rows):
        return {}
    if not all(isinstance(name, str) and is_natural(nbytes) for name, nbytes in rows):
        return {}
    sizes: dict[str, int] = dict(rows)
    return sizes if len(sizes) == len(rows) and sum(sizes.values()) <= _MAX_NBYTES else {}


def _changed(names: Any, before: Mapping[str, GeneratorState]) -> dict[str, int]:
    """The sizes of the generators that changed, by name; none if these names are damaged."""
    if not isinstance(names, list) or not all(isinstance(name, str) and name in before for name in names):
        return {}
    return {name: before[name].words.size for name in names}


def _count_twists(name: str, before: GeneratorState, after: GeneratorState) -> int:
    """How often a generator computed new words; 0 if it did not, or more often than `MAX_TWISTS`."""
    wanted = _key(name, after.words)
    key = _key(name, before.words)
    if key is None or wanted is None or np.count_nonzero(key != wanted) <= _MANY_WORDS:
        return 0
    for count in range(1, MAX_TWISTS + 1):
        key = _twist(key)
        if np.array_equal(key, wanted):
            return count
    return 0


def _twisted(name: str, words: Array, count: int) -> Array:
    """The bytes of a generator after it computed new words `count` times: (n,) uint8."""
    words = words.copy()
    key = _key(name, words)
    if key is not None and count:
        new = key
        for _ in range(count):
            new = _twist(new)
        key[:] = new
    return words


def _key(name: str, words: Array) -> Array | None:
    """A view of the words of a Mersenne Twister: (624,) uint32, or uint64 in torch; None if it is none."""
    if name == "torch" and words.size == 5056:
        return words[24 : 24 + 8 * _KEY_WORDS].view("<u8")
    if name in _ARRAYS and words.size >= 4 * _KEY_WORDS:
        return words[: 4 * _KEY_WORDS].view("<u4")
    return None


def _twist(key: Array) -> Array:
    """The next words of a Mersenne Twister. `key`: (624,) uint32 or uint64."""
    new = key.copy()
    upper, lower = key[:-1] & 0x80000000, key[1:] & 0x7FFFFFFF
    y = upper | lower
    mixed = (y >> 1) ^ ((y & 1) * 0x9908B0DF)
    new[:227] = key[397:] ^ mixed[:227]
    new[227:454] = new[:227] ^ mixed[227:454]
    new[454:623] = new[227:396] ^ mixed[454:]
    last = (int(key[623]) & 0x80000000) | (int(new[0]) & 0x7FFFFFFF)
    new[623] = int(new[396]) ^ (last >> 1) ^ ((last & 1) * 0x9908B0DF)
    return new


def _damaged_error(record: LogRecord, path: Path) -> CorruptError:
    return CorruptError(f"step {record.step}: the states of its random number generators are damaged", where=path)
