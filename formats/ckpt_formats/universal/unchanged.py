"""States that did not change since an earlier member of the chain: a later one names its packs, and stores nothing.

A state is unchanged if it has the same type, shape and values. Its values are compared with the checksums in the index
of the earlier member, then with the values there, read and decoded: so no pack is named that was damaged meanwhile.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ckpt_formats.core.checkpoint import MASTER, MODEL, Checkpoint, Parameter
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.transfer import Transfer, as_bytes
from ckpt_formats.universal.check_index import Owner, Pack
from ckpt_formats.universal.chunked import is_digest
from ckpt_formats.universal.encode_state import flat
from ckpt_formats.universal.entry import Extent, ParameterEntry, StateEntry
from ckpt_formats.universal.manifest import Manifest
from ckpt_formats.universal.model_copy import ModelCopy
from ckpt_formats.universal.shared_packs import FIRST, manifest_of

MIN_NBYTES = 1 << 16
"""Bytes of a pack that a new pack must share with it. For fewer, a reader would have to open one more file, and
`compact` to keep one, for nothing much."""

SharedStates = Mapping[str, Mapping[str, StateEntry]]
"""Entries of states that are not stored again: by parameter and state."""


@dataclass(frozen=True, eq=False)
class EarlierMember:
    """A member of a chain whose packs a later one may name: `checkpoint` as it was read, with its manifest."""

    checkpoint: Checkpoint
    only_shared: bool = False
    """Only what it shares itself: its own packs will be removed, because it is written again."""

    @cached_property
    def stated(self) -> Manifest:
        """Its manifest, as it was read with the checkpoint."""
        stated = manifest_of(self.checkpoint)
        assert stated is not None
        return stated

    @cached_property
    def packs(self) -> tuple[Pack, ...]:
        """Its packs as a later member names them: where the bytes are, also of states that it shares itself."""
        folder = self.checkpoint.path.name
        return tuple(
            replace(pack, owner=pack.owner or Owner(folder, number)) for number, pack in enumerate(self.stated.packs)
        )

    @property
    def identity(self) -> object:
        """Plain data that differs from that of another member."""
        return self.checkpoint.path.name, self.only_shared, self.stated.content, [repr(pack) for pack in self.packs]

    def shared(
        self, parameters: Sequence[Parameter], whole: frozenset[str], check: bool, transfer: Transfer
    ) -> SharedStates:
        """The states of a new pack that need not be stored, with the number of the pack counted from `FIRST`.

        Of the parameters in `whole`, either all states are shared or none: the others would be in a delta. Without
        `check`, equal checksums of values are enough.
        """
        if self.stated.boxes is not None:
            return {}  # its packs have boxes, not whole states
        usable: dict[str, dict[str, StateEntry]] = {}
        for parameter in parameters:
            entry = self._entry(parameter.name)
            own = None if entry is None else self.checkpoint.parameters.get(parameter.name)
            if entry is not None and own is not None:
                first = len(self.stated.own_packs) if self.only_shared else 0
                states = {n: s for n, s in entry.states.items() if s.extent is None or s.extent.pack >= first}
                equal = _equal_states(parameter, states, own, parameter.name in whole, check, transfer)
                usable[parameter.name] = _usable(equal, parameter, parameter.name in whole)
        nbytes = _nbytes_of_packs(state for states in usable.values() for state in states.values())
        large = {number for number, shared in nbytes.items() if shared >= MIN_NBYTES}
        result = dict[str, Mapping[str, StateEntry]]()
        for parameter in parameters:
            some = {
                name: state
                for name, state in usable.get(parameter.name, {}).items()
                if state.extent is None or state.extent.pack in large
            }
            states = _usable(some, parameter, parameter.name in whole)
            if states:
                result[parameter.name] = {name: _named(state) for name, state in states.items()}
        return result

    def _entry(self, name: str) -> ParameterEntry | None:
        index = self.stated.entries
        number = index.numbers.get(name)
        return None if number is None else index[number]


def _equal_states(
    parameter: Parameter,
    entries: Mapping[str, StateEntry],
    earlier: Parameter,
    whole: bool,
    check: bool,
    transfer: Transfer,
) -> dict[str, StateEntry]:
    equal = dict[str, StateEntry]()
    for name, tensor in parameter.states.items():
        stated = entries.get(name)
        if stated is None or not _may_be_shared(tensor, stated):
            if whole:
                return {}
            continue
        if _is_equal(tensor, stated, earlier.states[name], check, transfer):
            equal[name] = stated
        elif whole:
            return {}
    return equal


def _may_be_shared(tensor: Tensor, stated: StateEntry) -> bool:
    in_delta = stated.extent is None and stated.codec is None
    return not in_delta and stated.error is None and (tensor.dtype.name, tensor.shape) == (stated.dtype, stated.shape)


def _is_equal(tensor: Tensor, stated: StateEntry, earlier: Tensor, check: bool, transfer: Transfer) -> bool:
    """Whether a tensor has the values of a stored state. What is damaged there is not equal."""
    values, there, chunking = flat(tensor), flat(earlier), Chunking.default(tensor.shape)
    for index in range(chunking.count):
        box = chunking.box(index)
        block = transfer.fetch(values, box, counted=False)
        if not is_digest(block, stated.digests, index):
            return False
        if check:
            try:
                with transfer.reader.without_checksums():  # those of the chunks are enough
                    stored = transfer.fetch(there, box, "earlier", counted=False)
            except CkptError:
                return False
            if not np.array_equal(as_bytes(block), as_bytes(stored)):
                return False
    return True


def _usable(equal: Mapping[str, StateEntry], parameter: Parameter, whole: bool) -> dict[str, StateEntry]:
    """Those of some equal states that can be shared: with the base that they are decoded with."""
    usable = {name: state for name, state in equal.items() if state.base is None or _is_stored(equal.get(state.base))}
    # A copy that the old master was rounded to may be that of the new one, too: that is found while this is written.
    if (MASTER in usable) != (MODEL in usable) and ModelCopy.of(parameter) is not None:
        usable = {
            name: s for name, s in usable.items() if name not in (MASTER, MODEL) and s.base not in (MASTER, MODEL)
        }
    if whole and usable.keys() != parameter.states.keys():
        return {}
    return usable


def _is_stored(base: StateEntry | None) -> bool:
    return base is not None and base.extent is not None and base.base is None


def _nbytes_of_packs(states: Iterable[StateEntry]) -> dict[int, int]:
    """How many bytes of each pack are shared, by its number in the earlier member's manifest."""
    result: dict[int, int] = {}
    for state in states:
        if state.extent is not None:
            result[state.extent.pack] = result.get(state.extent.pack, 0) + state.extent.nbytes
    return result


def _named(state: StateEntry) -> StateEntry:
    extent = state.extent
    if extent is None:
        return state
    return replace(state, extent=Extent(FIRST + extent.pack, extent.offset, extent.nbytes))
