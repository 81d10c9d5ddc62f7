"""Plain tensors in a pickle of torch.save, each matched by one regular expression.

`torch.save` writes a tensor with about forty opcodes, always the same ones; only numbers differ:

    GET torch._utils._rebuild_tensor_v2 | MARK
        MARK GET 'storage', GET class, key PUT, GET location, numel, TUPLE PUT | BINPERSID
        offset, shape PUT, strides PUT, requires_grad, GET OrderedDict, EMPTY_TUPLE, REDUCE PUT
        TUPLE PUT | REDUCE PUT

The expression begins after the first bar. Whatever it does not match, or what is not as torch writes it, is read by the
interpreter, opcode by opcode: this module makes reading faster, but does not change the result, nor what is refused.
The parts of the tensor are not made; `SKIPPED` stands for them in the memo. A pickle that refers to one is read again
without this module.

Each PUT has an index of four bytes, one more than the one before. The expression compares the upper three bytes; so
the one tensor in 36 whose indices cross a multiple of 256 is read by the interpreter.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

from ckpt_formats.containers.torchfile.record_forms import SKIPPED
from ckpt_formats.containers.torchfile.storages import Storage, TensorRef, tensor_ref
from ckpt_formats.core.claims import MAX_AXES
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.tensor import is_c_order
from ckpt_formats.core.values import Global, Value

FUNCTION = ("torch._utils", "_rebuild_tensor_v2")
OPCODES = 40
"""About how many opcodes one match stands for."""

_HOOKS = Global("collections", "OrderedDict")
_GET = rb"(?:h.|j.{4})"
_INT = rb"(?:K.|M..|J.{4})"
_FIRST_PUT = rb"r(.)(?P<high>...)"
_PUT = rb"r(.)(?P=high)"
_LENGTHS = rb"(%s\x85|%s{2}\x86|%s{3}\x87|\(%s{4,64}t)" % (_INT, _INT, _INT, _INT)
_TENSOR = re.compile(
    rb"\(\((%s)(%s)X(.)\0\0\0([0-9]{1,18})" % (_GET, _GET)
    + _FIRST_PUT
    + rb"(%s)(%s)t%sQ(%s)" % (_GET, _INT, _PUT, _INT)
    + rb"(?:\)\)|%s%s%s%s)" % (_LENGTHS, _PUT, _LENGTHS, _PUT)
    + rb"([\x88\x89])(%s)\)R%st%sR" % (_GET, _PUT, _PUT)
    + _PUT,
    re.DOTALL,
).match

_WITH_AXES = {bytes(range(first, first + 7)) for first in range(250)}
"""The last bytes of the indices of a tensor's PUTs."""
_WITHOUT_AXES = {bytes(range(first, first + 5)) for first in range(252)}
_TRUE = b"\x88"


@dataclass(frozen=True, slots=True)
class _Geometry:
    """A shape and strides, in elements. `last`: the number of the last element that they reach."""

    shape: Shape
    strides: Shape
    size: int
    last: int


_NO_AXES = _Geometry((), (), 1, 0)


class _Numbers(dict[bytes, int]):
    """The number that an opcode has as its argument: an index of the memo, or an integer."""

    def __missing__(self, opcode: bytes) -> int:
        number = self[opcode] = int.from_bytes(opcode[1:], "little", signed=opcode[:1] == b"J")
        return number


@dataclass
class TensorCalls:
    """Matches the tensors of one pickle. `resolve` gives the storage of a persistent id; `where` is for messages."""

    resolve: Callable[[Value], Value]
    where: str
    count: int = 0
    """Tensors that were matched."""
    _numbers: _Numbers = field(default_factory=_Numbers)
    _geometries: dict[bytes, _Geometry | None] = field(default_factory=dict)
    """By the opcodes of shape and strides; None if the interpreter must read them."""
    _hooks: Value = None
    """The class of the hooks, once it is known to be the right one."""

    def match(self, data: bytes, at: int, size: int, memo: dict[int, Value]) -> tuple[TensorRef, int] | None:
        """The tensor whose opcodes begin at `at`, and the position after them; None if the interpreter must read it.

        Adds all indices that the opcodes put to the memo. Raises as the interpreter would.
        """
        match = _TENSOR(data, at)
        if match is None or (end := match.end()) > size:
            return None
        groups = match.groups()
        word_get, cls_get, length, key, first, high, location_get, numel, second, offset = groups[:10]
        shape, third, strides, fourth, grad, hooks_get, fifth, sixth, seventh = groups[10:]
        if shape is None:
            known: _Geometry | None = _NO_AXES
            indices, consecutive = first + second + fifth + sixth + seventh, _WITHOUT_AXES
        else:
            known = self._geometry(shape, strides)
            indices, consecutive = first + second + third + fourth + fifth + sixth + seventh, _WITH_AXES
        if known is None or indices not in consecutive or length[0] != len(key):
            return None
        numbers = self._numbers
        word, cls, location, hooks = (
            memo.get(numbers[word_get], SKIPPED),
            memo.get(numbers[cls_get], SKIPPED),
            memo.get(numbers[location_get], SKIPPED),
            memo.get(numbers[hooks_get], SKIPPED),
        )
        if hooks is not self._hooks:
            if type(hooks) is not Global or hooks != _HOOKS:
                return None
            self._hooks = hooks
        elements, begin = numbers[numel], numbers[offset]
        if word is SKIPPED or cls is SKIPPED or location is SKIPPED or begin < 0:
            return None
        storage = self.resolve((word, cls, key.decode("ascii"), location, elements))
        if type(storage) is not Storage or storage.dtype is None:
            return None
        requires_grad = grad == _TRUE
        if known.size > elements or begin + known.last >= elements:  # refused, expanded, or empty
            tensor = tensor_ref(storage, storage.dtype, begin, known.shape, known.strides, requires_grad, self.where)
        else:
            tensor = TensorRef(storage, storage.dtype, begin, known.shape, known.strides, requires_grad)
        index = int.from_bytes(first + high, "little")
        memo[index] = memo[index + 1] = memo[index + 2] = memo[index + 3] = SKIPPED
        if shape is not None:
            index += 2
            memo[index + 2] = memo[index + 3] = SKIPPED
        memo[index + 4] = tensor
        self.count += 1
        return tensor, end

    def _geometry(self, shape: bytes, strides: bytes) -> _Geometry | None:
        """The geometry that these opcodes describe; None if it is impossible, which the interpreter reports."""
        opcodes = shape + strides
        if opcodes not in self._geometries:
            self._geometries[opcodes] = _geometry(_integers(shape), _integers(strides))
        return self._geometries[opcodes]


def _integers(opcodes: bytes) -> Shape:
    """The integers of a tuple."""
    at, values = int(opcodes[:1] == b"("), []
    while width := _WIDTHS.get(opcodes[at : at + 1], 0):
        values.append(int.from_bytes(opcodes[at + 1 : at + 1 + width], "little", signed=width == 4))
        at += 1 + width
    return tuple(values)


_WIDTHS = {b"K": 1, b"M": 2, b"J": 4}


def _geometry(shape: Shape, strides: Shape) -> _Geometry | None:
    if len(shape) != len(strides) or len(shape) > MAX_AXES or min(*shape, *strides) < 0:
        return None
    size, reach = prod(shape), sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
    return _Geometry(shape, strides, size, size - 1 if is_c_order(shape, strides, 1) else reach)
