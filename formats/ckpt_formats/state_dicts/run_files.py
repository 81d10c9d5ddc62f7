"""Files of a model or a run that lie beside its checkpoint: extras called `hf/NAME`, written as the files NAME.

hf/trainer_state.json    a dict: a file of JSON
hf/tokenizer.json        bytes, (n,) uint8: a file with these bytes
hf/scheduler.pt          any other value: a file of torch.save
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.folders import is_torch_file_of_run
from ckpt_formats.core.format import FilePlan, Receipt
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.values import TensorName, Value

if TYPE_CHECKING:
    from ckpt_formats.core.transfer import Transfer

PREFIX = "hf/"
"""The prefix of an extra that is a file; the file's name follows."""


@dataclass(frozen=True)
class SideFile:
    """The content of a file that is not of torch: its text; None: its bytes are a tensor of the source."""

    text: str | None = None


def plan_run_files(source: Checkpoint, own: re.Pattern[str]) -> tuple[tuple[FilePlan, ...], Checkpoint]:
    """The files that lie beside the checkpoint, and the checkpoint without these extras.

    `own`: the names of the engine's own files and folders there. Raises `UnsupportedError` for values that torch cannot
    store.
    """
    files = {
        key: file
        for key, value in source.extras.items()
        if not own.fullmatch(key.removeprefix(PREFIX)) and (file := _file(key, value, source.parameters))
    }
    extras = {key: value for key, value in source.extras.items() if key not in files}
    return tuple(files.values()), replace(source, extras=extras)


def plan_side_file(name: str, value: Value) -> FilePlan:
    """A file of JSON, or of the bytes of a tensor."""
    if isinstance(value, Tensor):
        return FilePlan(name, (), SideFile(), value.nbytes, "other", tensors=(value,))
    text = json.dumps(value, indent=2) + "\n"
    return FilePlan(name, (), SideFile(text), len(text), "other")


def write_side_file(folder: Path, plan: FilePlan, transfer: "Transfer") -> Receipt:
    """Write a file that `plan_side_file` planned."""
    assert isinstance(plan.content, SideFile)
    parts = [plan.content.text.encode()] if plan.content.text is not None else transfer.chunks(plan.tensors[0])
    seal = transfer.write_sealed(folder, plan.file, parts)
    return Receipt(plan.file, seal.nbytes, (seal,), {}, transfer.reader.evidence())


def content_of(name: str, value: Value, parameters: Mapping[str, Parameter]) -> Value | None:
    """What `plan_side_file` writes for an extra: a dict for JSON, or the bytes, (n,) uint8; None if it is neither."""
    if isinstance(value, TensorName):
        tensor = parameters[value.name].weight
        return tensor if tensor.dtype.name == "uint8" and len(tensor.shape) == 1 else None
    return value if name.endswith(".json") and isinstance(value, dict) and _is_json(value) else None


def _is_json(value: Value) -> bool:
    """Whether JSON can hold the value. Extras are untrusted input."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            if not all(isinstance(key, str) for key in item):
                return False
            stack += item.values()
        elif isinstance(item, list):
            stack += item
        elif item is not None and not isinstance(item, (bool, int, float, str)):
            return False
    return True


def _file(key: str, value: Value, parameters: Mapping[str, Parameter]) -> FilePlan | None:
    name = key.removeprefix(PREFIX)
    if name in ("", key) or name.startswith(".") or "\0" in name or PurePath(name).name != name:
        return None
    if is_torch_file_of_run(name):
        from ckpt_formats.containers.torchfile_tree import tree_part  # it imports the writer of torch's files
        from ckpt_formats.state_dicts.extras import tensors_for_names

        return tree_part(name, tensors_for_names(value, parameters), (), "other")
    content = content_of(name, value, parameters)
    return None if content is None else plan_side_file(name, content)
