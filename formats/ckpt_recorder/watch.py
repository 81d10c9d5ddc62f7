"""The watch over tensors between two steps: whatever changes them there is no step of the optimizer."""

import time
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
import xxhash

SMALL_NBYTES = 4 << 20
"""If all tensors cost no more than this to hash, all are hashed after each step, and again before the next one."""
PIECE_NBYTES = 1 << 20
"""The maximum size of a piece of a tensor that is hashed at once."""
_CALL_NBYTES = 40_000
"""What a call costs to hash a piece, as bytes that could be hashed in the same time."""
_NBYTES_A_SECOND = 8e9
_SHARE = 0.001
"""The share of a step's time in which pieces of large models are hashed; once after it, and once before the next."""

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class _KnownHash:
    """The hash of a piece of a tensor."""

    place: tuple[int, int]
    hash: int
    moment: int
    """The look at which the piece had this hash."""


class StateWatch(Generic[Key]):
    """Finds the tensors that changed since `refresh`.

    It compares addresses and version counters of all tensors, and hashes, because a change through `tensor.data` or
    NumPy counts as no version. Of large models, other pieces are hashed after each step. A tensor that changed without
    a version, or whose counter rose although its values stayed, is hashed from then on, and all tensors are at the next
    refresh: others may change in the same way.

    Attributes:
        is_complete: Were all values hashed at the last `refresh`, so that no change escapes?
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.is_complete = True
        self._clock = clock
        self._refreshed_at: float | None = None
        self._step_seconds = 0.0
        self._places: dict[Key, tuple[int, int]] = {}
        self._hashes: dict[tuple[Key, int], int] = {}
        self._marks: dict[Key, tuple[tuple[int, int], tuple[int, ...]]] = {}
        self._known: dict[tuple[Key, int], _KnownHash] = {}
        """The last hashes of tensors that nothing should change without a version, of all turns."""
        self._suspects: dict[Key, None] = {}
        self._has_new_suspects = False
        self._turn = 0

    def refresh(
        self, tensors: Mapping[Key, torch.Tensor], *, complete: bool = False, always: Collection[Key] = ()
    ) -> None:
        """Take the values that all tensors have now as those that they should have at the next look.

        `complete`: hash all of them, whatever that costs. `always`: tensors that are hashed in any case.
        """
        now = self._clock()
        if self._refreshed_at is not None:
            self._step_seconds = now - self._refreshed_at
        self._refreshed_at = now
        self._places = {key: _place_of(tensor) for key, tensor in tensors.items()}
        self._marks.clear()
        complete, self._has_new_suspects = complete or self._has_new_suspects, False
        window = self._window(tensors, complete, always)
        self._hashes = {piece: _hash(tensors[piece[0]], piece[1]) for piece in window}

    def changed_earlier(self, tensors: Mapping[Key, torch.Tensor], moment: int) -> dict[Key, int]:
        """Tensors that changed without a version before the last refresh, and were not seen then.

        Args:
            tensors: Those that nothing changes without a version, of those at the last refresh.
            moment: The number of this look.

        Returns:
            For each tensor that changed the last look at which it had the values that were known.
        """
        earlier = self._compare_known(
            tensors, {piece: one for piece, one in self._hashes.items() if piece[0] in tensors}
        )
        if earlier:  # others may have changed in the same way
            pieces = [(key, index) for key, tensor in tensors.items() for index in range(_count(tensor))]
            earlier |= self._compare_known(tensors, {piece: _hash(tensors[piece[0]], piece[1]) for piece in pieces})
            self._suspect(earlier)
        for (key, index), old in self._hashes.items():
            if key in tensors:
                self._known[key, index] = _KnownHash(self._places[key], old, moment)
        return earlier

    def _compare_known(
        self, tensors: Mapping[Key, torch.Tensor], hashes: Mapping[tuple[Key, int], int]
    ) -> dict[Key, int]:
        earlier: dict[Key, int] = {}
        for piece, new in hashes.items():
            known = self._known.get(piece)
            if known is not None and known.place == _place_of(tensors[piece[0]]) and known.hash != new:
                earlier[piece[0]] = min(known.moment, earlier.get(piece[0], known.moment))
        for piece in [piece for piece in self._known if piece[0] in earlier]:
            del self._known[piece]
        return earlier

    def _suspect(self, keys: Collection[Key]) -> None:
        """Hash tensors from now on."""
        self._has_new_suspects |= any(key not in self._suspects for key in keys)
        self._suspects |= dict.fromkeys(keys)

    def refresh_some(self, tensors: Mapping[Key, torch.Tensor]) -> None:
        """The same for some of the tensors."""
        for key, tensor in tensors.items():
            self._places[key] = _place_of(tensor)
            self._marks.pop(key, None)
            for index in range(_count(tensor)):
                self._known.pop((key, index), None)
                if (key, index) in self._hashes:
                    self._hashes[key, index] = _hash(tensor, index)

    def changed(self, tensors: Mapping[Key, torch.Tensor]) -> list[Key]:
        """The keys of the tensors that changed, or that are new."""
        places = self._places
        risen = {key for key, tensor in tensors.items() if places.get(key) != _place_of(tensor)}
        differing = {key for (key, index), old in self._hashes.items() if _differs(tensors, key, index, old)}
        unknown = {key for key in risen - differing if not self._is_hashed(key, tensors[key])}
        self._suspect(differing - risen)
        self._suspects |= dict.fromkeys(unknown)
        return [key for key in tensors if key in differing or key in unknown]

    def mark(self, tensors: Mapping[Key, torch.Tensor]) -> None:
        """Remember the values of those of the tensors whose version differs from that at the last look."""
        for key, tensor in tensors.items():
            place = _place_of(tensor)
            if place == self._places.get(key):
                self._marks.pop(key, None)
            elif key not in self._marks or self._marks[key][0] != place:
                self._marks[key] = place, _hashes(tensor)

    def is_as_marked(self, key: Key, tensor: torch.Tensor) -> bool:
        """Has a tensor the values that it had when it was marked? False if it was not."""
        return key in self._marks and self._marks[key][1] == _hashes(tensor)

    def removed(self, tensors: Mapping[Key, torch.Tensor]) -> list[Key]:
        """The keys of tensors that do not exist any more."""
        return [key for key in self._places if key not in tensors]

    def _is_hashed(self, key: Key, tensor: torch.Tensor) -> bool:
        return key in self._places and all((key, index) in self._hashes for index in range(_count(tensor)))

    def _window(
        self, tensors: Mapping[Key, torch.Tensor], complete: bool, always: Collection[Key]
    ) -> Iterator[tuple[Key, int]]:
        """The pieces of this turn."""
        pieces = [(key, index) for key, tensor in tensors.items() for index in range(_count(tensor))]
        total = sum(map(_cost, tensors.values()))
        self.is_complete = complete or total <= SMALL_NBYTES
        if self.is_complete:
            yield from pieces
            return
        hashed = self._suspects.keys() | always
        yield from (piece for piece in pieces if piece[0] in hashed)
        budget = int(_SHARE * self._step_seconds * _NBYTES_A_SECOND)
        start = self._turn = self._turn % len(pieces)
        for at in range(start, start + len(pieces)):
            key, index = pieces[at % len(pieces)]
            budget -= min(PIECE_NBYTES, tensors[key].nbytes) + _CALL_NBYTES
            if budget < 0 and at > start:
                break
            self._turn = at + 1
            if key not in hashed:
                yield key, index


def _differs(tensors: Mapping[Key, torch.Tensor], key: Key, index: int, old: int) -> bool:
    tensor = tensors.get(key)
    return tensor is not None and (index >= _count(tensor) or _hash(tensor, index) != old)


def _place_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor is, and how often torch has changed it there."""
    try:
        return tensor.data_ptr(), tensor._version
    except RuntimeError:  # tensors of inference mode have no version
        return tensor.data_ptr(), 0


def _cost(tensor: torch.Tensor) -> int:
    return tensor.nbytes + _count(tensor) * _CALL_NBYTES


def _count(tensor: torch.Tensor) -> int:
    return -(-tensor.nbytes // PIECE_NBYTES)


def _hashes(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(_hash(tensor, index) for index in range(_count(tensor)))


def _hash(tensor: torch.Tensor, index: int) -> int:
    """The hash of a piece of a tensor: of its bytes, in C order."""
    each = PIECE_NBYTES // tensor.element_size()
    piece = tensor.detach().reshape(-1)[index * each : (index + 1) * each]
    return xxhash.xxh3_64_intdigest(piece.contiguous().view(torch.uint8).cpu().numpy().data)
