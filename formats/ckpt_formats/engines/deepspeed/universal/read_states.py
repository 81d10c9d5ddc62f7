"""Read one parameter's files: its master and its optimizer states, each a complete tensor.

A file contains a mapping with the tensor as `param`. From stage 3 without tensor
parallelism, it contains only the flattened tensor; the model's files state its shape.
`step.pt` contains a number or a tensor of shape [].
"""

from collections.abc import Mapping
from math import prod

from ckpt_formats.containers.torchfile import TorchFile
from ckpt_formats.core.checkpoint import MASTER
from ckpt_formats.core.errors import CorruptError, IncompleteError
from ckpt_formats.core.geometry import Shape
from ckpt_formats.core.state_names import STORED_MASTER
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.values import Value, kind_of
from ckpt_formats.engines.deepspeed.lookups import get, is_tensor, shape_of, tensor, vector


def read_states(name: str, files: Mapping[str, TorchFile], shape: Shape) -> tuple[dict[str, Tensor], dict[str, Value]]:
    """The states and plain values of a parameter of this shape. `files` are by state.

    Raises `IncompleteError` if there is no master, `CorruptError` if the files contradict the shape.
    """
    if MASTER not in files:
        raise IncompleteError(
            f"`{name}` has optimizer states, but no {STORED_MASTER}.pt", where=next(iter(files.values())).path
        )
    shape = _expert_shape(files[MASTER]) or shape
    states: dict[str, Tensor] = {}
    values: dict[str, Value] = {}
    for state, file in files.items():
        value = get(file.root, "param", object, file.path) if isinstance(file.root, dict) else file.root
        if not is_tensor(value):
            if state != "step" or not isinstance(value, (int, float)):
                raise CorruptError(f"expected a tensor, found {kind_of(value)}", where=file.path)
            values[state] = value
            continue
        stored = tensor(value, file.path)
        if stored.shape == (prod(shape),) != shape:
            stored = Tensor.of(vector(value, file.path).shaped(shape))
        if stored.shape != shape and (stored.shape or state == MASTER):
            raise CorruptError(
                f"`{name}` has the shape {list(stored.shape)}, but {list(shape)} in the model's files",
                where=file.path,
                hint="Files of several runs may be mixed.",
            )
        states[state] = stored
    return states, values


def _expert_shape(file: TorchFile) -> Shape | None:
    """The shape of a tensor of all experts, None for other tensors. The model's files have the shape of one rank."""
    if not isinstance(file.root, dict) or not file.root.get("is_expert_param"):
        return None
    shape = tensor(file.root.get("param"), file.path).shape
    count = shape_of([file.root.get("ep_num_experts")], file.path)
    if shape[:1] != count:
        raise CorruptError(f"a tensor of shape {list(shape)} should contain {count[0]} experts", where=file.path)
    return shape
