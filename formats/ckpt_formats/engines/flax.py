"""Files of Flax: nested dicts in MessagePack, as `flax.serialization` and `flax.training.checkpoints` write them.

flax_model.msgpack                   weights
checkpoint_900, checkpoint_1000      the states of a run
checkpoint_1000_gda/params/kernel/   an array that several processes held: a folder of zarr

See docs/files.md. Source: flax.serialization, flax.training.checkpoints; transformers.modeling_flax_utils.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ckpt_formats.containers.msgpack import array_pieces, begins_as_dict, map_header, read_tree, text_bytes
from ckpt_formats.containers.safetensors_shards import lost_states
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Origin, Parameter, Role, SourceFile
from ckpt_formats.core.claims import MAX_TREE_DEPTH
from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, UnsafeError, UnsupportedError
from ckpt_formats.core.folders import MAX_ENTRIES, entries_of
from ckpt_formats.core.format import FilePlan, Plan, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import list_names, printable
from ckpt_formats.core.transfer import Transfer
from ckpt_formats.core.values import Value, is_natural
from ckpt_formats.state_dicts.extras import names_for_tensors

SUFFIX = ".msgpack"
FILE = "flax_model.msgpack"
"""What transformers calls the file in the folder of a model."""
INDEX = f"{FILE}.index.json"
"""Lists the files of a model that is stored in several."""
_OPTIMIZER = "opt_state"
"""The entry of a `TrainState` that holds the states of the optimizer."""
_ARRAYS = "_gda"
"""What follows a file's name in that of the folder with arrays that several processes held."""
_STEP = re.compile(r"([A-Za-z][\w-]*?_)(\d{1,15}(?:\.\d{1,15})?)")
"""The names of the files of a run: a prefix and a step, which may be a fraction."""
_MAX_PREFIXES = 16
_MAX_OPENED = 4
"""Files of a run that are opened, from the newest on, to see whether they are Flax's. Other tools number files, too."""
_SEPARATOR = "separator"
Tree = dict[str, "Tree | Parameter"]


@dataclass(frozen=True)
class WeightsTree:
    """How the names of a file's tensors become nested dicts."""

    separator: str


@dataclass(frozen=True, kw_only=True)
class Flax(WritableFormat):
    """Model weights in one `.msgpack` file of nested dicts."""

    name = "flax"
    summary = "model weights: a .msgpack file of Flax"
    joins_ranks = False

    separator: Literal[".", "/", ""] | None = None
    """Where names are split into keys of nested dicts: `.`, `/`, or nowhere (`""`); None: as the source, else `.`."""

    def detect(self, path: Path) -> bool:
        if path.is_file():
            return path.suffix == SUFFIX or begins_as_dict(path)
        return any((path / name).is_file() for name in (FILE, INDEX)) or bool(steps_in(path))

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        if path.is_dir() and not (path / FILE).is_file() and (runs := _runs(path)):
            return _newest(path, runs)
        from ckpt_formats.engines.orbax.aggregate import is_placeholder

        file = path / FILE if path.is_dir() else path
        if path.is_dir() and (path / INDEX).is_file():
            raise UnsupportedError(
                "a model of Flax in several files is not read", where=path, hint="Name one of its files."
            )
        root, nbytes = read_tree(file)
        if not isinstance(root, dict) or not root:
            raise CorruptError("holds no nested dicts of arrays", where=file)
        step = root.get("step")
        leaves = list(_leaves(root, ()))
        if isinstance(root.get(_OPTIMIZER), dict) or any(is_placeholder(value) for _, value in leaves):
            return _state(file, root, nbytes)
        extras: dict[str, Value] = {}
        separator = _separator_of([keys for keys, _ in leaves], file)
        parameters: dict[str, Parameter] = {}
        for keys, value in leaves:
            name = separator.join(keys)
            if not isinstance(value, Tensor):
                extras[name] = value
                continue
            role: Role = "buffer" if keys[0] == "batch_stats" else "parameter"
            parameters[name] = Parameter(name, role, {MODEL: value})
        extras_by_name = {key: names_for_tensors(value, key, parameters) for key, value in extras.items()}
        origin = Origin("flax", step=step if is_natural(step) else None, layout={_SEPARATOR: separator})
        return Checkpoint(
            path=path,
            origin=origin,
            parameters=parameters,
            extras=extras_by_name,
            files=(SourceFile(file, nbytes, "model"),),
        )

    def plan(self, source: Checkpoint) -> Plan:
        separator = self._separator(source)
        inside = source.origin.layout.get("params", ()) if source.origin.engine == "flax" else ()
        prefix = "".join(f"{key}{separator}" for key in inside)
        weights = {
            parameter.name: replace(
                parameter, name=prefix + parameter.name, states={MODEL: parameter.weight}, values={}
            )
            for parameter in source.parameters.values()
            if parameter.role != "extra"
        }
        aliases = {alias: name for alias, name in source.aliases.items() if name in weights}
        tied = {alias: replace(weights[name], name=prefix + alias) for alias, name in aliases.items()}
        parameters = tuple({**weights, **tied}.values())
        _tree(parameters, separator)
        file = FilePlan(FILE, parameters, WeightsTree(separator), role="model")
        extras = (Notice("extras", tuple(source.extras)),) if source.extras else ()
        return Plan((file,), (*lost_states(source), *extras), single_file=FILE)

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        content = part.content
        assert isinstance(content, WeightsTree)
        seal = transfer.write_sealed(folder, part.file, _encoded(_tree(part.parameters, content.separator), transfer))
        return Receipt(part.file, seal.nbytes, (seal,), {}, transfer.reader.evidence())

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        """The one file is whole when it is written."""

    def _separator(self, source: Checkpoint) -> str:
        if self.separator is not None:
            return self.separator
        stated = source.origin.layout.get(_SEPARATOR) if source.origin.engine == "flax" else None
        return stated if isinstance(stated, str) else "."


def steps_in(folder: Path) -> list[Path]:
    """The files of the steps of all runs in a folder, the newest last; none if there are none. Never raises."""
    return [path for _, path in sorted(step for run in _runs(folder).values() for step in run)]


def _runs(folder: Path) -> dict[str, list[tuple[float, Path]]]:
    """The steps and files of each run by its prefix, the newest last.

    The files of a prefix are a run's if one of the newest begins as a tree. Folders with more prefixes than a training
    has models have none.
    """
    files: dict[str, list[tuple[float, Path]]] = {}
    try:
        for entry, _ in zip(entries_of(folder), range(MAX_ENTRIES), strict=False):
            if (match := _STEP.fullmatch(entry.name)) is not None and entry.is_file():
                files.setdefault(match[1], []).append((float(match[2]), folder / entry.name))
    except CkptError:
        raise
    except OSError:
        return {}
    if len(files) > _MAX_PREFIXES:
        return {}
    runs = {prefix: sorted(steps) for prefix, steps in files.items()}
    return {prefix: steps for prefix, steps in runs.items() if _newest_tree(steps) is not None}


def _newest_tree(steps: list[tuple[float, Path]]) -> int | None:
    """Which of the newest files is the last that begins as a tree; None if none of them does."""
    newest = range(len(steps) - 1, max(-1, len(steps) - 1 - _MAX_OPENED), -1)
    return next((i for i in newest if begins_as_dict(steps[i][1])), None)


def _newest(folder: Path, runs: Mapping[str, list[tuple[float, Path]]]) -> Checkpoint:
    """The newest state of the run in a folder. Raises `UnsupportedError` if there are several runs."""
    if len(runs) > 1:
        names = list_names([steps[-1][1].name for steps in runs.values()], printable)
        raise UnsupportedError(f"several models are saved here: {names}", where=folder, hint="Name one of the files.")
    (steps,) = runs.values()
    at = _newest_tree(steps)
    assert at is not None  # else it would be no run
    file = steps[at][1]
    checkpoint = Flax().read(file, ReadOptions())
    if len(steps) == 1:
        return checkpoint
    text = f"{printable(file.name)} is read, the newest of {at + 1} checkpoints here"
    notices = [Notice(text, tuple(_names(folder, steps[:at])))]
    if later := tuple(_names(folder, steps[at + 1 :])):
        notices.append(Notice("newer, but damaged: no tree begins there", later, Weight.UNSURE))
    return replace(checkpoint, path=folder, notices=(*notices, *checkpoint.notices))


def _names(folder: Path, steps: Sequence[tuple[float, Path]]) -> Iterator[str]:
    """The names of the files of steps, and of their folders of arrays."""
    for _, path in steps:
        yield path.name
        if (folder / (path.name + _ARRAYS)).exists():
            yield path.name + _ARRAYS


def _state(file: Path, root: dict[str, Value], nbytes: int) -> Checkpoint:
    """The state of a training, or a tree with arrays in folders beside the file: read as the same tree of Orbax is."""
    from ckpt_formats.engines.orbax.aggregate import leaves_of
    from ckpt_formats.engines.orbax.arrays import read_arrays
    from ckpt_formats.engines.orbax.folder import StepFolder
    from ckpt_formats.engines.orbax.read import TreeLeaves, index_of

    if isinstance(root.get(_OPTIMIZER), dict):
        root = {**root, _OPTIMIZER: _with_sequences(root[_OPTIMIZER])}
    leaves = leaves_of(root, file)
    stored = [one.stored for one in leaves if one.stored is not None]
    folder = file.with_name(file.name + _ARRAYS)
    _check_folders(folder, stored)
    arrays = read_arrays(folder, True, paths=stored)
    tree = TreeLeaves({one.leaf.path: one.leaf for one in leaves})
    for one in leaves:
        tree.add(one.leaf, arrays.tensors[one.stored] if one.stored is not None else one.value)
    match = _STEP.fullmatch(file.name)
    in_name = int(match[2]) if match is not None and match[2].isdecimal() else None
    place = StepFolder(file, {"": file}, {}, in_name)
    layout: dict[str, Value] = {"items": {"": {"folder": "", "place": []}}, "json": []}
    files = (SourceFile(file, nbytes, "model"), *arrays.files)
    return index_of(file, place, tree, layout, {}, files, [], "flax")


def _with_sequences(value: Value) -> Value:
    """States of an optimizer as they were: Flax makes dicts of lists and tuples, and of states without arrays."""
    if not isinstance(value, dict):
        return value
    if not value:
        return None
    inside = {key: _with_sequences(item) for key, item in value.items()}
    return list(inside.values()) if list(inside) == [str(i) for i in range(len(inside))] else inside


def _check_folders(folder: Path, stored: Sequence[str]) -> None:
    """Raise `UnsafeError` for a folder of an array elsewhere, `IncompleteError` for one that is missing."""
    for path in stored:
        if "\0" in path or any(part in ("", ".", "..") for part in path.split("/")):
            raise UnsafeError(f"the array {printable(path)!r} is not in {printable(folder.name)}", where=folder)
    if missing := [path for path in stored if not (folder / path).is_dir()]:
        text = f"the arrays of {list_names(missing, printable)} are missing"
        raise IncompleteError(text, where=folder, hint="Copy the folder of arrays beside the file, too.")


def _leaves(value: Value, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Value]]:
    """All arrays and plain values of a tree with their keys. Lists have the keys 0, 1, ..., as Flax gives them."""
    items: Mapping[str, Value] = {str(i): item for i, item in enumerate(value)} if isinstance(value, list) else value
    if not isinstance(value, (dict, list)) or not items:
        yield keys, value
        return
    for key, item in items.items():
        yield from _leaves(item, (*keys, key))


def _separator_of(paths: Sequence[tuple[str, ...]], file: Path) -> str:
    """What joins the keys to names, so that the names can be split again."""
    keys = {key for path in paths for key in path}
    if not any("." in key for key in keys):
        return "."
    if all(len(path) == 1 for path in paths):
        return ""
    if not any("/" in key for key in keys):
        return "/"
    raise UnsupportedError("has keys with `.` and keys with `/`, so names of tensors would not be unique", where=file)


def _tree(parameters: Sequence[Parameter], separator: str) -> Tree:
    """The parameters in nested dicts. Raises `UnsupportedError` if one would be a dict as well, or lies too deep."""
    tree: Tree = {}
    for parameter in parameters:
        name = parameter.name
        keys = name.split(separator) if separator else [name]
        inner: Tree | Parameter = tree
        for key in keys[:-1]:
            inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner
        if isinstance(inner, Parameter) or keys[-1] in inner:
            raise UnsupportedError(
                f"`{printable(name)}` would be a tensor and a dict of tensors",
                hint="Choose another separator, or rename it.",
            )
        if len(keys) > MAX_TREE_DEPTH - 2:
            raise UnsupportedError(f"`{printable(name[:200])}` has too many parts for nested dicts")
        inner[keys[-1]] = parameter
    return tree


def _encoded(tree: Tree, transfer: Transfer) -> Iterator[bytes | memoryview]:
    """The bytes of the file, front to back."""
    yield map_header(len(tree))
    for key, item in tree.items():
        yield text_bytes(key)
        if isinstance(item, dict):
            yield from _encoded(item, transfer)
        else:
            yield from _encoded_array(item.states[MODEL], transfer)


def _encoded_array(tensor: Tensor, transfer: Transfer) -> Iterator[bytes | memoryview]:
    slabs = transfer.chunks(tensor)
    buffer = memoryview(b"")
    for header, nbytes in array_pieces(tensor.shape, tensor.dtype):
        yield header
        while nbytes:
            buffer = buffer or next(slabs)
            yield buffer[:nbytes]
            taken = min(nbytes, len(buffer))
            buffer, nbytes = buffer[taken:], nbytes - taken
