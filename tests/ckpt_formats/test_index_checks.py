"""What docs/format.md asks of an index and of its tables, where test_universal.py does not: each test is one rule."""

from math import inf, nan
from pathlib import Path

import numpy as np
import pytest

from ckpt.job import save
from ckpt.pipeline import plan
from ckpt_formats.containers.typed_json import encode
from ckpt_formats.core.errors import CorruptError, UnsupportedError
from ckpt_formats.core.tensor import Array
from ckpt_formats.registry.opening import open_checkpoint
from ckpt_formats.universal import Universal
from ckpt_formats.universal.check_index import check
from ckpt_formats.universal.content import content_id
from ckpt_formats.universal.index import TYPES, Index
from ckpt_formats.universal.tables import Tables
from forged import Change, Forged, both, codec, forge, number, put
from held import checkpoint, parameter


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """`w` with a derived copy, and `large` with two chunks of each state; all states are coded where that helps."""
    random = np.random.default_rng(0)
    small = {"master": np.array([0.5, -1.25], np.float32), "exp_avg": np.zeros(2, np.float32)}
    small["model"] = small["master"].astype(np.float16)
    values = random.standard_normal((700, 400)).astype(np.float32)
    large = {"master": values, "exp_avg_sq": values**2}
    source = checkpoint([parameter("w", small), parameter("large", large)])
    save(source, tmp_path / "saved", Universal(codec="auto"))
    return tmp_path / "saved"


def dtype(parameter: str, state: str, name: str) -> Change:
    """Give a state another element type."""

    def change(forged: Forged) -> None:
        forged.fields["dtypes"].append(name)
        forged.columns["state.dtype"][forged.row(parameter, state)] = len(forged.fields["dtypes"]) - 1

    return change


def longer_chunk(forged: Forged) -> None:
    """The first of two chunks gets 1,025 bytes more than its 655 rows of values have."""
    rows = forged.coded("large", "fp32")
    forged.columns["coded.nbytes"][rows.start] = 655 * 400 * 4 + 1025
    total = int(forged.columns["coded.nbytes"][rows].sum())
    forged.columns["state.nbytes"][forged.row("large", "fp32")] = total + -total % 8


HOSTILE: dict[str, tuple[Change, str]] = {
    "a codec with an option that is no number": (codec("w", "param", {"name": "zstd", "level": nan}), "not valid JSON"),
    "an extra that is infinite": (put("extras", "seed", value=inf), "not valid JSON"),
    "an element type that safetensors does not have": (dtype("w", "fp32", "complex128"), "unknown element type"),
    "a copy that another codec derives": (codec("w", "param", {"name": "zstd"}, "fp32"), "cannot be derived"),
    "a copy of integers": (dtype("w", "param", "int16"), "cannot be derived"),
    "a copy of complex numbers": (dtype("w", "param", "complex64"), "cannot be derived"),
    "a copy of scales": (dtype("w", "param", "float8_e8m0fnu"), "cannot be derived"),
    "a rounded copy with bytes": (codec("large", "fp32", {"name": "rounded"}), "a rounded copy has no bytes"),
    "an offset without bytes": (number("state.offset", ("w", "param"), 8), "bytes without use"),
    "a pack without bytes": (number("state.pack", ("w", "param"), 1), "bytes without use"),
    "a chunk that is longer than its values": (longer_chunk, "an encoded chunk is too long"),
    "bytes beyond 2^62": (
        both(number("state.rank", ("w", "exp_avg"), 1), lambda f: f.columns["state.dims"].__setitem__(1, 2**61)),
        "its shape is too large",
    ),
}


@pytest.mark.parametrize("change", HOSTILE)
def test_a_hostile_index_is_refused_before_anything_is_read(change: str, saved: Path) -> None:
    make, words = HOSTILE[change]
    forge(saved, make)
    with pytest.raises(CorruptError, match=words):
        [parameter.states for parameter in open_checkpoint(saved).parameters.values()]


def test_a_sum_of_chunks_beyond_2_to_the_64_does_not_begin_again_at_zero() -> None:
    """2^20 states of 2^44 chunks each: as integers of 64 bits, their sum is zero, and no hash is there."""
    names, count = 16, 1 << 20
    columns: dict[str, Array] = {name: np.zeros(0, dtype) for name, dtype in TYPES.items()}
    columns |= {name: np.zeros(count, TYPES[name]) for name in TYPES if name.startswith("state.")}
    columns["parameter.names"] = np.arange(names, dtype="u1")
    columns["parameter.ends"] = np.arange(1, names + 1, dtype="<u8")
    columns |= {name: np.zeros(names, TYPES[name]) for name in ("parameter.role", "parameter.values")}
    columns["state.parameter"] = np.repeat(np.arange(names, dtype="<u4"), count // names)
    columns["state.name"] = np.tile(np.arange(count // names, dtype="<u2"), names)
    columns["state.rank"][:] = 1
    columns["state.dims"] = np.full(count, 2**62 - 1024, "<u8")
    columns["state.nbytes"] = columns["state.dims"].copy()
    columns["chunk.values"] = np.zeros((0, 16), "u1")
    tables = Tables(tuple(map(str, range(count // names))), ("uint8",))
    assert int(Index(columns, tables).chunk_counts.sum()) == 0
    with pytest.raises(CorruptError, match=r"the length of column chunk\.values"):
        check(Index(columns, tables), (), Path("manifest.json"))


def index_of(names: list[bytes], shapes: list[list[int]]) -> Index:
    """Parameters with one state each, of zeros whose hashes are zeros."""
    count, hashes = len(names), sum(0 in shape or 16 for shape in shapes)
    columns: dict[str, Array] = {name: np.zeros(0, dtype) for name, dtype in TYPES.items()}
    columns |= {name: np.zeros(count, TYPES[name]) for name in TYPES if name.startswith("state.")}
    columns |= {
        "parameter.names": np.frombuffer(b"".join(names), "u1"),
        "parameter.ends": np.cumsum(list(map(len, names))).astype("<u8"),
        "parameter.role": np.zeros(count, "u1"),
        "parameter.values": np.zeros(count, "<u4"),
        "state.parameter": np.arange(count, dtype="<u4"),
        "state.rank": np.array(list(map(len, shapes)), "u1"),
        "state.dims": np.array([size for shape in shapes for size in shape], "<u8"),
        "chunk.values": np.zeros((hashes // 16, 16), "u1"),
    }
    return Index(columns, Tables(("model",), ("uint8",)))


def columns_of_id(index: Index) -> bytes:
    """The columns of the content id of such an index, whose rows are in the order of names already."""
    columns, lengths = index.columns, np.diff(index.columns["parameter.ends"], prepend=np.uint64(0))
    first = [lengths.astype("<u4"), columns["parameter.names"], columns["parameter.role"], columns["parameter.values"]]
    states = [columns[f"state.{name}"] for name in ("name", "dtype", "rank", "dims")]
    return b"".join(part.tobytes() for part in (*first, np.ones(len(index), "<u4"), *states, columns["chunk.values"]))


def test_two_contents_whose_columns_have_the_same_bytes_have_different_ids() -> None:
    """The lengths and names of two parameters could be read as those of one. The id has the number of parameters."""
    one = index_of([b"\x0f\0\0\0\0\0\0\0"], [[2, 0, 1 + 2**32, 0, 0, 0, 0, 0]])
    names = columns_of_id(one)[8:31]
    two = index_of([names[:8], names[8:]], [[], []])
    assert columns_of_id(one) == columns_of_id(two)
    assert one.names != two.names
    assert content_id(one, (), {}, {}) != content_id(two, (), {}, {})


def test_index_refuses_more_names_of_states_than_can_be_numbered(tmp_path: Path) -> None:
    states = {str(i): np.zeros(1, np.int8) for i in range(65_537)}
    halves = [dict(list(states.items())[:40_000]), dict(list(states.items())[40_000:])]
    parameters = [parameter(str(i), half) for i, half in enumerate(halves)]
    with pytest.raises(UnsupportedError, match="65,536 names of states"):
        plan(checkpoint(parameters), tmp_path / "out", Universal())
    halves[1].popitem()
    parameters[1] = parameter("1", halves[1])
    plan(checkpoint(parameters), tmp_path / "out", Universal())


def test_equal_sets_are_equal_as_json() -> None:
    """Their order is that of the JSON of their items, so any program can write it, and the content id is the same."""
    assert encode({"b", "a", 10, 9}) == {"$set": ["a", "b", 10, 9]}
    assert encode(frozenset({"é", "z", (2, 1)})) == {"$frozenset": ["\u00e9", "z", {"$tuple": [2, 1]}]}
