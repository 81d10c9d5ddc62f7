"""Join the files into which tensor parallelism splits a model of Meta's: `consolidated.00.pth`, `.01.pth`, …

Each file has a part of every matrix, and the names are the same in all. Rules on names state how each is sharded
(`core/rule_sets/meta-llama.toml`), after those of the user; `params.json` beside the files states the sizes.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ckpt_formats.containers.safetensors import parse_json_object
from ckpt_formats.containers.torchfile import TensorRef, TorchFile, tensor_of
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Origin, Parameter, SourceFile
from ckpt_formats.core.claims import MAX_SMALL_JSON
from ckpt_formats.core.errors import CorruptError, IncompleteError, RulesError, UnsupportedError
from ckpt_formats.core.files import read_whole
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.layout import Layout, merge
from ckpt_formats.core.rules import rule_set
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import Value, is_natural

_FILE = re.compile(r"consolidated\.(\d\d)\.pth")
_PARAMS = "params.json"
_RULES = "meta-llama"
_EMBEDDING, _NORM, _QUERY = "tok_embeddings.weight", "norm.weight", "layers.0.attention.wq.weight"
_COPY = "Copy all files consolidated.*.pth into one folder."


def rank_of(path: Path) -> int | None:
    """The rank of a file, by its name; None if Meta gives no file this name."""
    match = _FILE.fullmatch(path.name)
    return None if match is None else int(match[1])


def read_ranks(folder: Path, files: Sequence[TorchFile], options: ReadOptions) -> Checkpoint:
    """The model of the files of all ranks. No tensor is read.

    Raises `IncompleteError` if files are missing, `CorruptError` if they contradict each other, `RulesError` for a
    tensor without a rule, `UnsupportedError` if they have more than tensors.
    """
    ranks = sorted(files, key=lambda file: file.path.name)
    for number, file in enumerate(ranks):
        if rank_of(file.path) != number:
            raise IncompleteError(f"consolidated.{number:02}.pth is missing", where=folder, hint=_COPY)
    trees = [_tensors(file) for file in ranks]
    for file, tree in zip(ranks, trees, strict=True):
        if other := tree.keys() ^ trees[0].keys():
            raise CorruptError(
                f"`{printable(min(other))}` is in one of {ranks[0].path.name} and {file.path.name} only",
                where=folder,
                hint="Files of two models may be mixed: copy those of one model again.",
            )
    sizes = _sizes(folder, trees)
    layout = Layout((*options.rules, *rule_set(_RULES)), sizes)
    parameters: dict[str, Parameter] = {}
    for name in trees[0]:
        shards = [tree[name] for tree in trees]
        if any(shard.dtype != shards[0].dtype for shard in shards):
            raise CorruptError(f"`{printable(name)}` has different element types on different ranks", where=folder)
        try:
            merged = merge(name, shards, layout.rule(name))
        except RulesError as error:
            error.where = error.where or str(folder)
            raise
        parameters[name] = Parameter(name, "parameter", {MODEL: merged})
    return Checkpoint(
        path=folder,
        origin=Origin("torch", None, None, {"tp": len(ranks)}),
        parameters=parameters,
        files=tuple(
            SourceFile(file.path, file.path.stat().st_size, "model", {"tp": rank}) for rank, file in enumerate(ranks)
        ),
        seals=tuple(seal for file in ranks for seal in file.seals()),
        layout=layout,
    )


def _tensors(file: TorchFile) -> dict[str, Tensor]:
    if not isinstance(file.root, dict):
        raise UnsupportedError("is not a dict of tensors, as the files of a model of Meta's are", where=file.path)
    for key, value in file.root.items():
        if not isinstance(value, TensorRef):
            raise UnsupportedError(
                f"`{printable(str(key))}` is not a tensor: this is not a file of a model of Meta's", where=file.path
            )
    return {str(key): tensor_of(value) for key, value in file.root.items()}


def _sizes(folder: Path, trees: Sequence[Mapping[str, Tensor]]) -> dict[str, int]:
    """The sizes that the rules name. Raises `IncompleteError` if the tensors of more ranks would be needed for them."""
    first, ranks = trees[0], len(trees)
    if any(name not in first or not first[name].shape for name in (_EMBEDDING, _NORM)):
        return {"by_rows": 0}
    params = _params(folder)
    dim, embedding = first[_NORM].shape[0], first[_EMBEDDING].shape
    heads, groups = _count(params, "n_heads", 1), _count(params, "n_kv_heads", 0)
    attention = heads * _count(params, "head_dim", dim // heads)
    by_rows = len(embedding) == 2 and embedding[1] == dim
    sizes = {"by_rows": int(by_rows), "dim": dim, "attention": attention}
    kv = sum(tree[_KEY].shape[0] for tree in trees) if _KEY in first and first[_KEY].shape else attention
    sizes |= {"kv": groups * (attention // heads) if groups else kv, "groups": groups or ranks}
    rows = sum(tree[_QUERY].shape[0] for tree in trees if _QUERY in tree and tree[_QUERY].shape)
    table = sum(tree[_EMBEDDING].shape[0 if by_rows else 1] for tree in trees)
    expected = _count(params, "vocab_size", 0) if by_rows else dim
    if 0 < rows < attention or table < expected:
        raise IncompleteError(
            f"{ranks} of the files into which tensor parallelism split a model of Meta's are here, and others are "
            f"missing: by its sizes, `{_QUERY}` has {attention:,} rows, and these have {rows:,}",
            where=folder,
            hint=_COPY,
        )
    return sizes


_KEY = "layers.0.attention.wk.weight"


def _params(folder: Path) -> Mapping[str, Value]:
    path = folder / _PARAMS
    return parse_json_object(read_whole(path, MAX_SMALL_JSON), path) if path.is_file() else {}


def _count(params: Mapping[str, Value], key: str, otherwise: int) -> int:
    """A number of `params.json`, from 1; `otherwise` if it states none."""
    value = params.get(key)
    return int(value) if is_natural(value) and value else otherwise
