"""Model weights of Flax: a `.msgpack` file of nested dicts, as `flax.serialization.to_bytes` writes it.

See docs/files.md. Source: flax.serialization; transformers.modeling_flax_utils.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ckpt_formats.containers.msgpack import array_pieces, map_header, read_tree, text_bytes
from ckpt_formats.containers.safetensors_shards import lost_states
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Origin, Parameter, Role, SourceFile
from ckpt_formats.core.claims import MAX_TREE_DEPTH
from ckpt_formats.core.errors import CkptError, CorruptError, UnsupportedError
from ckpt_formats.core.files import write_sealed
from ckpt_formats.core.format import FilePlan, Plan, ReadOptions, Receipt, WritableFormat
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
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
_UNMATCHED = Notice(
    "optimizer states (`opt_state`) could not be matched to parameters: they are copied unchanged", weight=Weight.LOST
)
_DICT = re.compile(rb"([\x81-\x8f]|\xde..|\xdf....)[\xa0-\xbf\xd9-\xdb]", re.DOTALL)
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
            return path.suffix == SUFFIX or _begins_as_dict(path)
        return any((path / name).is_file() for name in (FILE, INDEX))

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        file = path / FILE if path.is_dir() else path
        if path.is_dir() and (path / INDEX).is_file():
            raise UnsupportedError(
                "a model of Flax in several files is not read", where=path, hint="Name one of its files."
            )
        root, nbytes = read_tree(file)
        if not isinstance(root, dict) or not root:
            raise CorruptError("holds no nested dicts of arrays", where=file)
        step = root.get("step")
        extras: dict[str, Value] = {key: root.pop(key) for key in (_OPTIMIZER,) if key in root}
        leaves = list(_leaves(root, ()))
        separator = _separator_of([keys for keys, _ in leaves], file)
        parameters: dict[str, Parameter] = {}
        for keys, value in leaves:
            name = separator.join(keys)
            if not isinstance(value, Tensor):
                extras[name] = value
                continue
            role: Role = "buffer" if keys[0] == "batch_stats" else "parameter"
            parameters[name] = Parameter(name, role, {MODEL: value})
        notices = (_UNMATCHED,) if _OPTIMIZER in extras else ()
        extras_by_name = {key: names_for_tensors(value, key, parameters) for key, value in extras.items()}
        origin = Origin("flax", step=step if is_natural(step) else None, layout={_SEPARATOR: separator})
        return Checkpoint(
            path=path,
            origin=origin,
            parameters=parameters,
            extras=extras_by_name,
            files=(SourceFile(file, nbytes, "model"),),
            notices=notices,
        )

    def plan(self, source: Checkpoint) -> Plan:
        separator = self._separator(source)
        weights = {
            parameter.name: replace(parameter, states={MODEL: parameter.weight}, values={})
            for parameter in source.parameters.values()
            if parameter.role != "extra"
        }
        tied = {alias: replace(weights[name], name=alias) for alias, name in source.aliases.items() if name in weights}
        parameters = tuple({**weights, **tied}.values())
        _tree(parameters, separator)
        file = FilePlan(FILE, parameters, WeightsTree(separator), role="model")
        extras = (Notice("extras", tuple(source.extras)),) if source.extras else ()
        return Plan((file,), (*lost_states(source), *extras), single_file=FILE)

    def write(self, folder: Path, part: FilePlan, transfer: Transfer) -> Receipt:
        content = part.content
        assert isinstance(content, WeightsTree)
        seal = write_sealed(folder, part.file, _encoded(_tree(part.parameters, content.separator), transfer))
        return Receipt(part.file, seal.nbytes, (seal,), {}, transfer.reader.evidence())

    def commit(self, folder: Path, source: Checkpoint, receipts: Sequence[Receipt]) -> None:
        """The one file is whole when it is written."""

    def _separator(self, source: Checkpoint) -> str:
        if self.separator is not None:
            return self.separator
        stated = source.origin.layout.get(_SEPARATOR) if source.origin.engine == "flax" else None
        return stated if isinstance(stated, str) else "."


def _begins_as_dict(path: Path) -> bool:
    """Is the first value of a file a dict with a text as its first key? `flax.training` gives its files no suffix."""
    try:
        with path.open("rb") as file:
            head = file.read(6)
    except CkptError:
        raise
    except OSError:
        return False
    return _DICT.match(head) is not None


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
