"""Partial recovery: lost blocks from a checkpoint that was saved earlier, all else as it is in a live one.

After SCAR (Qiao et al., arXiv 1810.07354): training that lost some blocks of its state goes on from older values of
these blocks alone, which is a smaller perturbation than to set back everything. The result is of no single step, on
purpose; its `errors` state how many elements are older, and how old.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ckpt.partial.lost_blocks import LostBlocks, RankSet, lost_by_name, lost_by_rank, lost_files, surviving
from ckpt_formats.core.arguments import checked
from ckpt_formats.core.checkpoint import MASTER, MODEL, OLDER, OLDEST_STEP, Checkpoint, Edit, ErrorFigures
from ckpt_formats.core.edits import edited
from ckpt_formats.core.errors import IncompleteError, NoMatchError, UnsupportedError
from ckpt_formats.core.fingerprint import fingerprint
from ckpt_formats.core.geometry import Box
from ckpt_formats.core.identity import joined
from ckpt_formats.core.joined_seals import JoinedSeals
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Fragment, Tensor
from ckpt_formats.core.text import printable


@dataclass(frozen=True)
class PartialRecovery(Edit):
    """Blocks of another checkpoint in the place of those that are lost."""

    saved: Path
    saved_history: tuple[Edit, ...]
    blocks: str
    """A fingerprint of the blocks."""

    def inputs(self) -> tuple[Path, ...]:
        return (self.saved,)


@checked
def recover(
    live: Checkpoint,
    saved: Checkpoint,
    lost_names: Sequence[str] = (),
    lost_ranks: Sequence[RankSet] = (),
) -> Checkpoint:
    """The live checkpoint, with its lost blocks as they were in a saved one. No tensor data is read.

    Lost are all parameters whose names match one of `lost_names`, what only files of `lost_ranks` have, and what no
    file of the live checkpoint has (`ReadOptions.missing_files`). Step counts, groups and extras are the live ones.
    A block is taken in all states of the weight's shape: master, copy and moments are of one step.

    Raises `NoMatchError` if nothing is lost, `IncompleteError` if the saved checkpoint lacks a block,
    `UnsupportedError` if it has another shape or type, or is of a later step.
    """
    files = lost_files(live, lost_ranks) | {file.path for file in live.files if not file.path.exists()}
    named, of_ranks = lost_by_name(live, lost_names), lost_by_rank(live, lost_ranks)
    blocks = {**of_ranks, **named}  # a parameter that is lost by name is lost as a whole
    if not blocks:
        raise NoMatchError(
            "nothing is lost: all blocks of the live checkpoint are in its files",
            where=live.path,
            hint="State what is lost: names (--lost) or ranks (--lost-ranks).",
        )
    return take_blocks(live, saved, blocks, files)


def take_blocks(
    live: Checkpoint, saved: Checkpoint, blocks: LostBlocks, files: frozenset[Path] = frozenset()
) -> Checkpoint:
    """The live checkpoint, with some blocks of a saved one. Of `files`, nothing is read.

    Raises `IncompleteError` and `UnsupportedError` as `recover` does.
    """
    _check_steps(live, saved)
    _check_saved(live, saved, blocks)
    same_step = live.step is not None and live.step == saved.step
    parameters = dict(live.parameters)
    errors, digests = dict(live.errors), dict(live.digests)
    for name in dict.fromkeys(name for name, _ in blocks):
        parameter = live.parameters[name]
        states = dict(parameter.states)
        for state, tensor in parameter.states.items():
            key = name, state
            if key not in blocks:
                continue
            other = _saved_state(saved, name, live, state)
            assert other is not None
            is_whole = sum(box.size for box in blocks[key]) == tensor.size
            states[state] = other if is_whole else _mixed(tensor, other, blocks[key], files)
            known = [figures for figures in (saved.errors.get(key), live.errors.get(key)) if figures is not None]
            figures = _worst(known[:1] if is_whole else known)
            errors.pop(key, None)
            digests.pop(key, None)
            if is_whole and key in saved.digests:
                digests[key] = saved.digests[key]
            if not same_step:
                figures |= _age(tensor, blocks[key], saved, figures)
            if figures:
                errors[key] = figures
        parameters[name] = replace(parameter, states=states)
    rest = _without_files(live, files)
    return edited(
        live,
        PartialRecovery(saved.path, saved.history, _fingerprint(blocks)),
        parameters=parameters,
        files=tuple({file.path: file for file in (*rest.files, *saved.files)}.values()),
        seals=JoinedSeals((JoinedSeals((live.seals,), files), saved.seals)),
        notices=(*live.notices, *_notices(live, saved, blocks)),
        suspicions=tuple(dict.fromkeys([*live.suspicions, *saved.suspicions])),
        digests=digests,
        errors=errors,
        identities=joined(saved.identities, rest.identities),
    )


def is_mixed(checkpoint: Checkpoint) -> bool:
    """Whether it has blocks of another checkpoint: then a content id or a step of its path is not its own."""
    return any(isinstance(edit, PartialRecovery) for edit in checkpoint.history)


def _mixed(tensor: Tensor, other: Tensor, boxes: Sequence[Box], files: frozenset[Path]) -> Tensor:
    taken = (Fragment(box, other.crop(box)) for box in boxes)
    return Tensor(tensor.shape, tensor.dtype, (*surviving(tensor, boxes, files), *taken))


def _worst(errors: list[ErrorFigures]) -> dict[str, object]:
    if not errors:
        return {}
    from ckpt_formats.universal.error_figures import worst  # it imports codecs, which exact states need not

    return dict(worst(errors))


def _age(tensor: Tensor, boxes: Sequence[Box], saved: Checkpoint, known: Mapping[str, object]) -> dict[str, int]:
    """How many elements are of earlier steps, and of which; added to what is known of those that were so already."""
    older, oldest = known.get(OLDER, 0), known.get(OLDEST_STEP, saved.step)
    elements = sum(box.size for box in boxes) + (older if isinstance(older, int) else 0)
    steps = [step for step in (saved.step, oldest) if isinstance(step, int)]
    age = {OLDER: min(elements, tensor.size), "elements": tensor.size}
    return {**age, OLDEST_STEP: min(steps)} if steps else age


def _check_steps(live: Checkpoint, saved: Checkpoint) -> None:
    if live.step is not None and saved.step is not None and saved.step > live.step:
        raise UnsupportedError(
            f"the saved state is of step {saved.step}, which is later than step {live.step} of the live checkpoint",
            where=saved.path,
            hint="Choose an earlier one: --step.",
        )


def _check_saved(live: Checkpoint, saved: Checkpoint, blocks: LostBlocks) -> None:
    absent = [key for key in blocks if _saved_state(saved, key[0], live, key[1]) is None]
    if absent:
        raise IncompleteError(
            f"it lacks {len(absent)} of {len(blocks)} tensors that are lost, such as {printable('/'.join(absent[0]))}",
            where=saved.path,
        )
    for name, state in blocks:
        own, other = live.parameters[name].states[state], _saved_state(saved, name, live, state)
        assert other is not None
        if (own.shape, own.dtype) != (other.shape, other.dtype):
            raise UnsupportedError(
                f"`{printable(name)}` {printable(state)} is {other.dtype.name} {list(other.shape)}, but "
                f"{own.dtype.name} {list(own.shape)} in {printable(str(live.path))}",
                where=saved.path,
            )


def _saved_state(saved: Checkpoint, name: str, live: Checkpoint, state: str) -> Tensor | None:
    """A state of the saved checkpoint; None if it has none. Without a master, its weights are that, if of its type."""
    states = saved.parameters[name].states if name in saved.parameters else {}
    if state in states or state not in (MASTER, MODEL):
        return states.get(state)
    other = states.get(MODEL if state == MASTER else MASTER)
    return other if other is not None and other.dtype == live.parameters[name].states[state].dtype else None


def _fingerprint(blocks: LostBlocks) -> str:
    return fingerprint([(name, state, [(b.start, b.stop) for b in boxes]) for (name, state), boxes in blocks.items()])


def _without_files(live: Checkpoint, files: frozenset[Path]) -> Checkpoint:
    if not files:
        return live
    return replace(
        live,
        files=tuple(file for file in live.files if file.path not in files),
        identities={path: identity for path, identity in live.identities.items() if path not in files},
    )


def _notices(live: Checkpoint, saved: Checkpoint, blocks: LostBlocks) -> Iterator[Notice]:
    names = tuple(dict.fromkeys(name for name, _ in blocks))
    if live.step is not None and live.step == saved.step:
        text = (
            f"{len(blocks)} states have blocks of {printable(str(saved.path))}, which is of the same step {live.step}"
        )
        yield Notice(text, names)
        return
    steps = (f"step {step}" if step is not None else "an unknown step" for step in (saved.step, live.step))
    first, second = steps
    text = f"approximate: {len(blocks)} states have blocks of {first}, in a state of {second}"
    yield Notice(text, names, Weight.LOST)
