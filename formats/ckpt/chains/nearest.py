"""Find the model of a family that a new one is most like: by its values, not by its name.

One pass over all models compares a few blocks of values, evenly spread over the tensors that have the same name, shape
and type in both. A fine-tune keeps sign, exponent and some leading bits of most values; of an unrelated model, hardly
the sign is the same. Then some chunks are encoded against each of the nearest models, and without any: the new model is
stored in the way that takes the fewest bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ckpt.chains.estimate import sample_evenly, stored_nbytes
from ckpt.chains.write import DeltaPolicy
from ckpt.compare.fitting.renamings import Renaming, find_renamings, renamed
from ckpt.pipeline import Execution
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.chunking import Chunking
from ckpt_formats.core.errors import CkptError
from ckpt_formats.core.files import Reader
from ckpt_formats.core.short_repr import short_repr
from ckpt_formats.core.tensor import Array
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.universal.chain.chain_file import ChainIndex, Member
from ckpt_formats.universal.chain.members import open_members
from ckpt_formats.universal.encode_state import flat

_ESTIMATED = 3
"""How many models are estimated: the nearest ones."""
_BLOCK = 1 << 14
"""Elements of a block that is compared."""
_WORTH = 0.97
"""A deeper model, or any at all, must save at least this share of the bytes of the other way."""


@dataclass(frozen=True)
class Candidate:
    """A model of a family, as the parent of a new one."""

    member: Member
    depth: int
    """How many deltas are replayed to read it."""
    share: float
    """The share of the new model's bytes that lies in tensors of the same name, shape and type."""
    bits: float
    """The bits of a value from the first one that differs, as a share of all its bits: the mean of some blocks."""
    stored_nbytes: int | None = None
    """About how many bytes the new model would take against it; None: not estimated, because others are nearer."""

    __repr__ = short_repr

    @property
    def distance(self) -> float:
        """From 0, for equal values, to 1; tensors that the model lacks count as entirely different."""
        return 1 - self.share * (1 - self.bits)


@dataclass(frozen=True)
class Nearest:
    """What was compared, and the model that was chosen."""

    candidates: tuple[Candidate, ...]
    """The nearest first."""
    chosen: Candidate | None
    """None: the new model is better stored in full."""
    parent: Checkpoint | None
    """The chosen model, opened."""
    alone_nbytes: int
    """About how many bytes the new model takes in full."""
    unopened: Mapping[str, str]
    """By name: why a model could not be compared."""

    __repr__ = short_repr

    @property
    def reason(self) -> str:
        """Why this parent was chosen, or none, for people."""
        if self.chosen is not None:
            of_those = "" if len(self.candidates) < 2 else f", the nearest of {len(self.candidates)} models"
            return f"{_percent(self.chosen.bits)} of the bits of a value differ{of_those}"
        if not self.candidates:
            return "no model of the family has a tensor of the same name, shape and type"
        best = self.candidates[0]
        return f"{best.member.name} is nearest, and {_percent(best.bits)} of the bits of a value differ from it"


def find_nearest(
    run: Path, chain: ChainIndex, source: Checkpoint, policy: DeltaPolicy, resources: Execution
) -> Nearest:
    """The model of a family against which a new one takes the fewest bytes."""
    opened = open_members(run, chain)
    compared, unopened = list[tuple[Candidate, Checkpoint]](), dict[str, str]()
    for member in chain.members:
        try:
            checkpoint = opened.open(member)
            candidate = compare(source, checkpoint, member, len(chain.upto(member.step)) - 1, resources)
        except CkptError as error:
            unopened[member.label] = str(error)
            continue
        if candidate is not None:
            compared.append((candidate, checkpoint))
    compared.sort(key=lambda one: one[0].distance)
    alone = stored_nbytes(source, None, False, policy, resources)
    for number, (candidate, checkpoint) in enumerate(compared[:_ESTIMATED]):
        estimated = stored_nbytes(source, checkpoint, False, policy, resources)
        compared[number] = replace(candidate, stored_nbytes=estimated), checkpoint
    candidates = tuple(candidate for candidate, _ in compared)
    chosen = _choose(candidates, alone)
    parent = next((checkpoint for candidate, checkpoint in compared if candidate is chosen), None)
    return Nearest(candidates, chosen, parent, alone, unopened)


def compare(
    source: Checkpoint, model: Checkpoint, member: Member, depth: int, resources: Execution
) -> Candidate | None:
    """How near a model is to the new one; None if they have no tensor in common. Reads a few blocks of both."""
    own = [parameter for parameter in source.parameters.values() if parameter.role != "extra"]
    common = [parameter for parameter in own if _fits(parameter, model.parameters.get(parameter.name))]
    total = sum(parameter.nbytes for parameter in own)
    if not common or not total:
        return None
    with Reader(check=False, max_files=resources.files) as reader:
        transfer = Transfer(reader, resources.slab)
        differing, bits = 0, 0
        for parameter, at in sample_evenly(common):
            tensor, earlier = parameter.weight, model.parameters[parameter.name].weight
            chunking = Chunking.default(tensor.shape)
            box = chunking.box(at // chunking.chunk_size)
            new = transfer.fetch(flat(tensor), box, counted=False)[:_BLOCK]
            old = transfer.fetch(flat(earlier), box, "earlier", counted=False)[:_BLOCK]
            differing += _differing_bits(new, old)
            bits += 8 * new.nbytes
    return Candidate(member, depth, sum(parameter.nbytes for parameter in common) / total, differing / bits)


def naming_hint(source: Checkpoint, model: Checkpoint) -> str | None:
    """The renaming under which more names of a new model are those of a model of the family; None if there is none."""
    names, expected = (
        [parameter.name for parameter in one.parameters.values() if parameter.role != "extra"]
        for one in (source, model)
    )
    renamings = find_renamings(names, expected)
    if not renamings:
        return None
    before, after = set(names), _after(names, renamings)
    matching = len(after & set(expected)), len(before & set(expected))
    options = " ".join(f"--rename '{pattern}={new}'" for pattern, new in renamings)
    return (
        f"with `{options}` of `ckpt convert`, {matching[0]} of {len(names)} names would match instead of {matching[1]}"
    )


def _after(names: Sequence[str], renamings: Sequence[Renaming]) -> set[str]:
    current = list(names)
    for one in renamings:
        current = renamed(current, one)
    return set(current)


def _choose(candidates: Sequence[Candidate], alone: int) -> Candidate | None:
    """The parent with the fewest bytes; a deeper one only where it saves some, and none where that saves as much."""
    estimated = [one for one in candidates if one.stored_nbytes is not None]
    fewest = min((one.stored_nbytes or 0 for one in estimated), default=alone)
    if not estimated or fewest > _WORTH * alone:
        return None
    near = [one for one in estimated if (one.stored_nbytes or 0) * _WORTH <= fewest]
    return min(near, key=lambda one: (one.depth, one.stored_nbytes))


def _fits(parameter: Parameter, earlier: Parameter | None) -> bool:
    if earlier is None or not parameter.weight.size:
        return False
    return (parameter.weight.shape, parameter.weight.dtype) == (earlier.weight.shape, earlier.weight.dtype)


def _differing_bits(new: Array, old: Array) -> int:
    """Bits from the first one that differs, summed over all values: (n,) of any type of 1, 2, 4 or 8 bytes."""
    size = new.dtype.itemsize
    if size not in (1, 2, 4, 8):
        return 8 * int(np.count_nonzero(new.reshape(-1).view(np.uint8) != old.reshape(-1).view(np.uint8)))
    words = [np.ascontiguousarray(values).reshape(-1).view(f"u{size}") for values in (new, old)]
    differing = words[0] ^ words[1]
    if size == 8:  # float64 has 53 bits: the upper half is enough
        differing = (differing >> np.uint64(32)).astype(np.uint32)
        return 2 * int(np.frexp(differing.astype(np.float64))[1].sum())
    return int(np.frexp(differing.astype(np.float64))[1].sum())


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
