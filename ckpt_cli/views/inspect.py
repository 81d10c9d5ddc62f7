"""Show a checkpoint's index, as text and as JSON."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import numpy as np

from ckpt_cli import notes
from ckpt_cli.views import columns
from ckpt_cli.views.file_ranges import FileRanges, SourceFiles
from ckpt_cli.views.report import conclude, data
from ckpt_formats.core.checkpoint import Checkpoint, opened_path
from ckpt_formats.core.format import FilePlan
from ckpt_formats.core.geometry import Box, Shape
from ckpt_formats.core.seals import SealTable
from ckpt_formats.core.state_table import PLAIN, ROLES, StateTable
from ckpt_formats.core.text import folded, format_count, format_nbytes, printable
from ckpt_formats.core.values import Value, brief
from ckpt_formats.registry.location import format_name

if TYPE_CHECKING:
    from ckpt_formats.core.quantised.overview import QuantisedOverview
    from ckpt_formats.universal.chain.chain_file import SharedPacks

_COLUMNS = 48
_MAX_FILES = 40
_MAX_VALUE = 70
_MAX_FAILURES = 3
_MAX_KINDS = 40
_NUMBER = re.compile(r"\d+")
_PLURALS = {"parameter": "parameters", "frozen": "frozen", "buffer": "buffers", "extra": "extras"}


def note_lack_of_index(checkpoint: Checkpoint) -> None:
    """Note that torch does not reshard a checkpoint of ranks that saved their metadata on their own."""
    if checkpoint.format != "dcp":
        return
    from ckpt_formats.engines.dcp.folder import not_joined

    if not_joined(one.path for one in checkpoint.files if one.role == "metadata"):
        path = printable(str(checkpoint.path))
        notes.note(f"each rank saved on its own: torch reshards the files after `ckpt index {path}`")


def print_json(checkpoint: Checkpoint, place: str | Path) -> None:
    """Print the full index as one JSON object on stdout. `place`: where it was looked for."""
    from ckpt import sizes
    from ckpt_cli.views.checkpoints import facts_of, row_of
    from ckpt_formats.containers.typed_json import encode

    row = row_of(place, place if isinstance(place, str) else place.name, checkpoint)
    details = {
        "format": row.format,
        "origin": _origin(checkpoint),
        "parameters": _parameters(sizes.table(checkpoint)),
        "aliases": dict(checkpoint.aliases),
        "groups": [{"options": encode(g.options), "parameters": list(g.names)} for g in checkpoint.groups],
        "extras": encode(checkpoint.extras),
        "files": [
            {"file": str(s.path), "nbytes": s.nbytes, "role": s.role, "rank": dict(s.rank)} for s in checkpoint.files
        ],
        **_quantised_data(checkpoint),
        "shared": [asdict(one) for one in _shared(checkpoint)],
    }
    data(facts_of("checkpoint", [row], checkpoint.path, details=details))


def _step(checkpoint: Checkpoint) -> str:
    """The step that a checkpoint states. A chain has one for each state, also for those that state none themselves."""
    if checkpoint.step is not None:
        return str(checkpoint.step)
    if format_name(checkpoint) != "chain":
        return "not stated"
    from ckpt_formats.universal.chain import address, chain_file, states

    path = opened_path(checkpoint)
    named = address.parse(path) or address.Address(path, None)
    chain = chain_file.load(named.run / chain_file.NAME)
    if chain.is_family:
        return "not stated"
    return f"{states.step_of(chain, named)} in the chain; the checkpoint states none"


def _laid_out(layout: Mapping[str, Value]) -> str:
    """How the files are sharded, and under which keys of a state dict they have the model and the optimizer."""
    shown = {key: value for key, value in layout.items() if key != "keys" and _is_flat(value)}
    sharded = ", ".join(f"{key} {brief(value)}" for key, value in shown.items())
    keys = layout.get("keys")
    if not isinstance(keys, dict):
        return sharded or "not sharded"
    named = " and ".join(f'"{keys[part]}"' for part in ("model", "optimizer") if keys.get(part))
    return (
        (sharded or "not sharded") + (f"; keys {named}" if named else "") + ("; flat keys" if keys.get("flat") else "")
    )


def _is_flat(value: Value) -> bool:
    """Whether a line can show a value: `--json` has what describes a tree, such as the items of Orbax."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(one, (int, float)) for one in value)
    return value is not None and not isinstance(value, dict)


def print_text(checkpoint: Checkpoint, depth: int | None, extras: bool) -> None:
    """Print the index as text on stdout."""
    from ckpt import sizes
    from ckpt_cli.views import name_tree

    origin = checkpoint.origin
    click.echo(f"{printable(str(checkpoint.path))}: {format_name(checkpoint)}")
    version = f" {printable(origin.version)}" if origin.version else ""
    click.echo(f"engine      {printable(origin.engine)}{version}")
    click.echo(f"step        {_step(checkpoint)}")
    click.echo(f"layout      {printable(_laid_out(origin.layout))}")
    states = sizes.table(checkpoint)
    nbytes = states.of_parameters(states.nbytes)
    for role in dict.fromkeys(states.role.tolist()):
        members = states.role == role
        count, total = int(states.elements[states.weight][members].sum()), int(nbytes[members].sum())
        tensors = name_tree.tensors(int(members.sum()))
        facts = f"{format_count(count)} in {tensors}, {format_nbytes(total)} with all states"
        click.echo(f"{_PLURALS[ROLES[role]]:<11} {facts}")
    if states.uses_codecs():
        from ckpt_cli.views.sizes import table

        click.echo("\nstored")
        columns.show(table(sizes.rows_of(states), indent=2))
    for line in (*_quantised(checkpoint), *_quantised_states(checkpoint)):
        click.echo(line)
    if shared := _shared(checkpoint):
        click.echo("\nin packs of earlier members, whose states did not change since")
        for one in shared:
            click.echo(f"  {one.folder}  {format_nbytes(one.nbytes)}")
    click.echo("\nparameters")
    room = columns.width()
    for line in name_tree.lines(states, depth):
        for part in folded(f"  {line}", room):
            click.echo(part)
    for alias, name in checkpoint.aliases.items():
        click.echo(f"  {printable(alias)} is tied to {printable(name)}")
    if checkpoint.groups:
        click.echo("\noptimizer groups")
        for i, group in enumerate(checkpoint.groups):
            options = {key: value for key, value in group.options.items() if value is not None}
            for part in folded(f"  {i}: {len(group.names)} parameters, {printable(brief(options, 200))}", room):
                click.echo(part)
    if checkpoint.extras:
        click.echo("\nextras")
        for key, value in checkpoint.extras.items():
            click.echo(f"  {printable(key)}: {printable(brief(value, 1 << 20 if extras else _MAX_VALUE))}")
    if any(shard.rank for shard in checkpoint.files):
        click.echo("\nfiles" + " " * 27 + "first parameter … last")
        for line in grid(checkpoint):
            click.echo(f"  {line}")


def _quantised(checkpoint: Checkpoint) -> Iterator[str]:
    """A line for each scheme of quantised weights, and one for each kind of weights: those whose numbers differ."""
    overview = _overview(checkpoint)
    if overview is None:
        return
    decoded = [one for one in overview.parameters if one.shape is not None]
    for scheme, bits in dict.fromkeys((one.scheme, one.bits) for one in decoded):
        own = [one for one in decoded if (one.scheme, one.bits) == (scheme, bits)]
        count = sum(prod(one.shape or ()) for one in own)
        yield (
            f"quantised   {printable(scheme)}, {bits:g} bits: {len(own):,} weight{'s' * (len(own) != 1)}, "
            f"{count:,} elements, {format_nbytes(2 * count)} as bfloat16"
        )
        kinds = Counter(_NUMBER.sub("*", one.name) for one in own)
        for kind, number in list(kinds.items())[:_MAX_KINDS]:
            yield f"            {printable(kind)}{f' ({number:,})' if number > 1 else ''}"
        if len(kinds) > _MAX_KINDS:
            yield f"            and {len(kinds) - _MAX_KINDS:,} more kinds of weights"
    failures = [one for one in overview.parameters if one.shape is None]
    for one in failures[:_MAX_FAILURES]:
        yield f"quantised   {printable(one.name)} {printable(one.problem or '')}: not decoded"
    if len(failures) > _MAX_FAILURES:
        yield f"quantised   and {len(failures) - _MAX_FAILURES:,} more that are not decoded"
    if overview.bits_per_weight is not None:
        yield f"            {overview.bits_per_weight:.2f} bits per weight, with scales and plain weights"


def _quantised_states(checkpoint: Checkpoint) -> Iterator[str]:
    """A line for each scheme of quantised states of the optimizer."""
    from ckpt_formats.core.quantised.weights import may_have_quantised_states

    if not may_have_quantised_states(checkpoint):
        return
    from ckpt_formats.core.quantised.states import quantised_states  # other optimizers need no codecs

    states = quantised_states(checkpoint)
    for scheme in dict.fromkeys(one.scheme for one in states if one.tensor is not None):
        own = [one for one in states if one.scheme == scheme and one.tensor is not None]
        count = sum(one.tensor.size for one in own if one.tensor is not None)
        names = ", ".join(printable(name) for name in dict.fromkeys(one.name for one in own))
        yield (
            f"quantised   states {names} ({printable(scheme)}, {own[0].bits:g} bits): {len(own):,}, "
            f"{count:,} elements, {format_nbytes(4 * count)} as float32"
        )
    for one in [one for one in states if one.tensor is None][:_MAX_FAILURES]:
        state = f"{printable(one.name)} of {printable(one.parameter)}"
        yield f"quantised   state {state} {printable(one.problem)}: not decoded"


def _overview(checkpoint: Checkpoint) -> "QuantisedOverview | None":
    """What is quantised; None if nothing is."""
    from ckpt_formats.core.quantised.weights import quantised_weights

    if checkpoint.origin.engine != "llama.cpp" and not quantised_weights(checkpoint):
        return None
    from ckpt_formats.core.quantised.overview import quantised_overview  # other models need no codecs

    return quantised_overview(checkpoint)


def _quantised_data(checkpoint: Checkpoint) -> dict[str, Any]:
    """What is quantised as plain data."""
    overview = _overview(checkpoint)
    if overview is None:
        return {"quantised": [], "bits_per_weight": None}
    own = [{**asdict(one), "shape": list(one.shape or ())} for one in overview.parameters]
    return {"quantised": own, "bits_per_weight": overview.bits_per_weight}


def print_ranks(
    checkpoint: Checkpoint, parts: Sequence[FilePlan], target: Path, format_name: str, as_json: bool
) -> None:
    """Print what a run would write for each rank, and from which ranks it comes: the layout before and after."""
    from ckpt.pipeline import space_needed

    if as_json:
        rows, files = [], SourceFiles()
        for part in parts:
            own, foreign = moves(checkpoint, part.rank, files.of(part), files)
            row = {"file": part.file, "role": part.role, "rank": dict(part.rank), "nbytes": part.nbytes}
            rows.append(row | {"local_nbytes": own, "moved_nbytes": foreign})
        data({"target": str(target), "format": format_name, "nbytes": space_needed(parts), "files": rows})
        return
    click.echo("before")
    for line in grid(checkpoint):
        click.echo(f"  {line}")
    click.echo("after")
    for line in grid_after(checkpoint, parts):
        click.echo(f"  {line}")
    conclude(
        f"would write {format_nbytes(space_needed(parts))} in {len(parts)} files to {printable(str(target))}; "
        "nothing was "
        "written"
    )


def grid(checkpoint: Checkpoint) -> Iterator[str]:
    """A row for each file: the columns are the parameters in order, and those that it has a part of are marked."""
    columns = _columns(checkpoint)
    rows = [
        (_rank(s.rank, s.path.name), s.role, columns.get(s.path, set()), format_nbytes(s.nbytes))
        for s in checkpoint.files[:_MAX_FILES]
    ]
    return _rows(rows, len(checkpoint.files))


def columns_of_files(checkpoint: Checkpoint) -> dict[Path, str]:
    """For each file that has values of parameters: a 1 for each column of the picture that it has a part of, else 0."""
    return {
        path: "".join("1" if i in columns else "0" for i in range(_COLUMNS))
        for path, columns in _columns(checkpoint).items()
    }


def grid_after(checkpoint: Checkpoint, parts: Sequence[FilePlan]) -> Iterator[str]:
    """The same rows for planned files, with the bytes that come from other ranks."""
    files = SourceFiles()
    columns = _ColumnsOfFiles(checkpoint, files)
    rows = []
    for part in parts[:_MAX_FILES]:
        ranges = files.of(part)
        own, foreign = moves(checkpoint, part.rank, ranges, files)
        note = f"{format_nbytes(own + foreign)}, {format_nbytes(foreign)} from other ranks"
        rows.append((_rank(part.rank, part.file), part.role, columns.of(ranges), note))
    return _rows(rows, len(parts))


def moves(checkpoint: Checkpoint, rank: Mapping[str, int], ranges: FileRanges, files: SourceFiles) -> tuple[int, int]:
    """The bytes of a new file that its rank had before, and the bytes that come from files of other ranks."""
    own, total = 0, int(ranges.nbytes.sum())
    ranks, paths = {shard.path: shard.rank for shard in checkpoint.files}, list(files.numbers)
    numbers, members = np.unique(ranges.files, return_inverse=True)
    for i, number in enumerate(numbers):
        old = ranks.get(paths[number], {})
        if all(rank.get(axis) == at for axis, at in old.items() if axis in rank):
            own += int(ranges.nbytes[members == i].sum())
    return own, total - own


class _ColumnsOfFiles:
    """The columns of the picture to which the bytes of the source's files belong."""

    def __init__(self, checkpoint: Checkpoint, files: SourceFiles) -> None:
        rows: dict[int, list[tuple[int, int, int, int]]] = {}
        for path, start, stop, first, last in _ranges(checkpoint):
            rows.setdefault(files.number(path), []).append((start, stop, first, last))
        self._of_file = {file: np.array(sorted(of_file), np.int64).T for file, of_file in rows.items()}

    def of(self, ranges: FileRanges) -> set[int]:
        """The columns of these ranges."""
        marks = np.zeros(_COLUMNS + 1, np.int64)
        for file in np.unique(ranges.files):
            if (columns := self._of_file.get(int(file))) is None:
                continue
            starts, stops, firsts, lasts = columns
            chosen = ranges.files == file
            low, high = ranges.starts[chosen], ranges.stops[chosen]
            # Every range that begins before the end, from the first one that may end behind the start.
            begin, end = np.searchsorted(np.maximum.accumulate(stops), low, "right"), np.searchsorted(starts, high)
            counts = np.maximum(end - begin, 0)
            at = np.repeat(begin - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
            low, high = np.maximum(np.repeat(low, counts), starts[at]), np.minimum(np.repeat(high, counts), stops[at])
            at, low, high = (values[low < high] for values in (at, low, high))
            scale, length = lasts[at] + 1 - firsts[at], stops[at] - starts[at]
            np.add.at(marks, firsts[at] + (low - starts[at]) * scale // length, 1)
            np.add.at(marks, firsts[at] + (high - 1 - starts[at]) * scale // length + 1, -1)
        return set(map(int, np.flatnonzero(np.cumsum(marks)[:_COLUMNS])))


def _columns(checkpoint: Checkpoint) -> dict[Path, set[int]]:
    """The columns of the picture that each file has a part of."""
    columns: dict[Path, set[int]] = {}
    for path, _, _, first, last in _ranges(checkpoint):
        columns.setdefault(path, set()).update(range(first, last + 1))
    return columns


def _ranges(checkpoint: Checkpoint) -> Iterator[tuple[Path, int, int, int, int]]:
    """Ranges of files, (path, start, stop), and the columns, (first, last), of the parameters they hold."""
    total = max(sum(p.weight.size for p in checkpoint.parameters.values() if p.role != "extra"), 1)
    at = 0
    for parameter in checkpoint.parameters.values():
        if parameter.role == "extra":
            continue
        for tensor in parameter.states.values():
            for fragment in (f for copy in (tensor, *tensor.replicas) for f in copy.fragments):
                low, high = _flat_range(tensor.shape, fragment.box)
                first, last = (min((at + x) * _COLUMNS // total, _COLUMNS - 1) for x in (low, max(low, high - 1)))
                for raw in fragment.blob.sources():
                    yield raw.path, raw.offset, raw.offset + raw.span, first, last
        at += parameter.weight.size


def _parameters(table: StateTable) -> list[dict[str, Any]]:
    """The parameters as plain data."""
    from ckpt_formats.containers.typed_json import encode

    values = [encode(own) for own in table.values]
    names, dtypes = table.states, [dtype.name for dtype in table.dtypes]
    codecs = [None if not own or own == (PLAIN,) else ", ".join(own) for own in table.coding.codecs]
    columns = (table.state, table.dtype, table.nbytes, table.fragments, table.coding.nbytes, table.coding.codec)
    rows, dims, ends = (
        zip(*(column.tolist() for column in columns), strict=True),
        table.dims.tolist(),
        table.dim_ends.tolist(),
    )
    states = [
        (
            names[name],
            {
                "dtype": dtypes[dtype],
                "shape": dims[begin:end],
                "nbytes": nbytes,
                "blocks": blocks,
                **({} if codecs[codec] is None else {"stored_nbytes": stored, "codec": codecs[codec]}),
            },
        )
        for (name, dtype, nbytes, blocks, stored, codec), begin, end in zip(rows, ends, ends[1:], strict=False)
    ]
    first = table.first.tolist()
    parameters = zip(table.names, table.role.tolist(), table.value.tolist(), first, first[1:], strict=False)
    return [
        {"name": name, "role": ROLES[role], "states": dict(states[begin:end]), "values": values[value]}
        for name, role, value, begin, end in parameters
    ]


def _rows(rows: Sequence[tuple[str, str, set[int], str]], count: int) -> Iterator[str]:
    for rank, role, marked, note in rows[:_MAX_FILES]:
        cells = "".join("█" if i in marked else "·" for i in range(_COLUMNS))
        yield f"{rank:<22} {role:<9} {cells} {note:>10}"
    if count > _MAX_FILES:
        yield f"and {count - _MAX_FILES} more files"


def _shared(checkpoint: Checkpoint) -> "tuple[SharedPacks, ...]":
    """The packs of earlier members of a chain in which states of a checkpoint lie."""
    if not isinstance(checkpoint.seals, SealTable):
        return ()
    from ckpt_formats.universal.shared_packs import shared_packs_of

    return shared_packs_of(checkpoint)


def _origin(checkpoint: Checkpoint) -> dict[str, Any]:
    from ckpt_formats.containers.typed_json import encode

    origin = checkpoint.origin
    return {"engine": origin.engine, "version": origin.version, "step": origin.step, "layout": encode(origin.layout)}


def _rank(rank: Mapping[str, int], file: str) -> str:
    axes = " ".join(f"{axis} {number}" for axis, number in rank.items())
    name = printable(file.rpartition("/")[2])
    return axes or (name if len(name) <= 22 else f"{name[:21]}…")


def _flat_range(shape: Shape, box: Box) -> tuple[int, int]:
    """The range of a block in the flat tensor, in C order: its first element, and the one after its last."""
    low = high = 0
    for axis, (a, b) in enumerate(zip(box.start, box.stop, strict=True)):
        step = prod(shape[axis + 1 :])
        low, high = low + a * step, high + (b - 1) * step
    return low, high + 1
