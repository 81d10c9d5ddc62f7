"""Read folders of torchtune: the model under Hugging Face's names, and the state of the recipe.

    OUTPUT/epoch_1/model-00001-of-00002.safetensors, config.json, ...    as from `save_pretrained`
    OUTPUT/recipe_state/recipe_state.pt                                  optimizer, seed, epochs, data loader

torchtune trains a model under its own names. The optimizer refers to parameters by these names, or by their order. For
most families, torchtune also orders the rows of queries and keys differently: the two rows of a rotation are adjacent.
Source: torchtune `_checkpointer`, `models.convert_weights`.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ckpt_formats.containers.torchfile import open_file
from ckpt_formats.core.checkpoint import MODEL, Checkpoint, Parameter, SourceFile
from ckpt_formats.core.errors import IncompleteError, RulesError, UnsupportedError, form_of
from ckpt_formats.core.folders import names_in
from ckpt_formats.core.format import Format, ReadOptions
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.tensor import Tensor
from ckpt_formats.core.values import Value, is_natural
from ckpt_formats.core.views import halves_of_rotary
from ckpt_formats.engines.hf import HuggingFace
from ckpt_formats.engines.hf.read import HAS_RECIPE
from ckpt_formats.engines.torch_folder import TorchFolder
from ckpt_formats.state_dicts.extras import candidate_names, names_for_tensors
from ckpt_formats.state_dicts.optimizer_form import is_optimizer
from ckpt_formats.state_dicts.read import training_state
from ckpt_formats.state_dicts.run_files import PREFIX

STATE = "recipe_state/recipe_state.pt"
_EPOCH = re.compile(r"(?:epoch|step)_(\d{1,9})")
_FAMILIES = ("llama", "mistral", "gemma", "qwen2")
_SAME_ROW_ORDER = ("qwen2",)
_FIRST = (("model.embed_tokens.weight", "tok_embeddings.weight"),)
_LAYER = (
    ("self_attn.q_proj.weight", "attn.q_proj.weight"),
    ("self_attn.q_proj.bias", "attn.q_proj.bias"),
    ("self_attn.k_proj.weight", "attn.k_proj.weight"),
    ("self_attn.k_proj.bias", "attn.k_proj.bias"),
    ("self_attn.v_proj.weight", "attn.v_proj.weight"),
    ("self_attn.v_proj.bias", "attn.v_proj.bias"),
    ("self_attn.o_proj.weight", "attn.output_proj.weight"),
    ("mlp.gate_proj.weight", "mlp.w1.weight"),
    ("mlp.down_proj.weight", "mlp.w2.weight"),
    ("mlp.up_proj.weight", "mlp.w3.weight"),
    ("input_layernorm.weight", "sa_norm.scale"),
    ("post_attention_layernorm.weight", "mlp_norm.scale"),
)
_LAST = (("model.norm.weight", "norm.scale"), ("lm_head.weight", "output.weight"))
"""Names in files and in torchtune, in the order in which its modules register the parameters."""
_OWN_NAME = "tok_embeddings.weight"
_PERMUTED = re.compile(r".*\.self_attn\.([qk])_proj\.weight")
_UNMATCHED = (
    "optimizer states could not be matched to parameters, because torchtune uses other names: they are copied unchanged"
)


class Torchtune(Format):
    name = "torchtune"
    summary = "torchtune: weights of an epoch, and the recipe's state with the optimizer"

    def detect(self, path: Path) -> bool:
        return (path / STATE).is_file()

    def read(self, path: Path, options: ReadOptions) -> Checkpoint:
        with form_of("a folder of torchtune", path):
            return _read(path, options)


def _read(path: Path, options: ReadOptions) -> Checkpoint:
    file = open_file(path / STATE)
    state = {str(key): value for key, value in file.root.items()}
    folder = _folder_of(path, state.get("epochs_run"))
    base = (HuggingFace() if HuggingFace().detect(folder) else TorchFolder()).read(folder, options)
    optimizer = state.pop("optimizer", None)
    checkpoint, notices = base, [notice for notice in base.notices if notice != HAS_RECIPE]
    if is_optimizer(optimizer) and "param_groups" in optimizer:
        with_states = _with_optimizer(base, optimizer)
        if with_states is None:
            state["optimizer"] = optimizer
            notices.append(Notice(_UNMATCHED, weight=Weight.LOST))
        else:
            checkpoint = with_states
    elif optimizer is not None:
        state["optimizer"] = optimizer
    if newer := [name for name in names_in(path) if _number(name) > _number(folder.name)]:
        text = (
            f"{folder.name} is read, to which the recipe's state belongs; there are newer weights, without their state"
        )
        notices.append(Notice(text, tuple(newer), Weight.LOST))
    parameters, extras = dict(checkpoint.parameters), dict(checkpoint.extras)
    for key, value in state.items():
        free = next(name for name in candidate_names(key) if name not in extras)
        extras[free] = names_for_tensors(value, free, parameters)
    return replace(
        checkpoint,
        path=path,
        origin=replace(base.origin, engine="torchtune"),
        parameters=parameters,
        extras=extras,
        files=(*base.files, SourceFile(file.path, file.path.stat().st_size, "optimizer")),
        seals=(*base.seals, *file.seals()),
        notices=tuple(notices),
        original=None,
    )


def _number(name: str) -> int:
    """The number of an epoch, from the name of its folder; -1 for other names."""
    match = _EPOCH.fullmatch(name)
    return int(match[1]) if match else -1


def _folder_of(path: Path, epochs: Value) -> Path:
    """The folder of the epoch to which the recipe's state belongs. Raises `IncompleteError` if it is missing."""
    numbers = {int(match[1]): path / name for name in names_in(path) if (match := _EPOCH.fullmatch(name))}
    numbers = {number: folder for number, folder in numbers.items() if folder.is_dir()}
    if not numbers:
        raise IncompleteError("there is a state of the recipe, but no folder of an epoch with the model", where=path)
    last = epochs - 1 if is_natural(epochs) and epochs else max(numbers)
    if last not in numbers:
        raise IncompleteError(
            f"the recipe's state belongs to epoch {last}, but its folder is missing",
            where=path,
            hint=f"Name the folder of an epoch to read only its model: {numbers[max(numbers)].name}",
        )
    return numbers[last]


def _with_optimizer(base: Checkpoint, optimizer: Mapping[str, Value]) -> Checkpoint | None:
    """The checkpoint with the optimizer's states under the names of the files; None if they cannot be matched."""
    config = base.extras.get(f"{PREFIX}config.json")
    weights = {name: parameter.weight for name, parameter in base.parameters.items() if parameter.role != "extra"}
    pairs = _pairs(config, weights) if isinstance(config, dict) else None
    if pairs is None and _OWN_NAME in weights:
        pairs = [(name, name) for name in weights]
    if pairs is None:
        return None
    new = {own: name for name, own in pairs}
    try:
        state_read = training_state(
            {"model": weights, "optimizer": _renamed(optimizer, new)}, base.path, list(new.values())
        )
        heads = _heads(config)
        reordered = {name: _in_files_order(parameter, heads) for name, parameter in state_read.parameters.items()}
    except (UnsupportedError, RulesError):
        return None
    if not state_read.groups:
        return None
    extra = {name: parameter for name, parameter in base.parameters.items() if parameter.role == "extra"}
    return replace(
        base,
        parameters={**reordered, **extra},
        groups=state_read.groups,
        aliases={**base.aliases, **state_read.aliases},
    )


def _pairs(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> list[tuple[str, str]] | None:
    """(name, torchtune's name) of each tensor, in the order of torchtune's model; None if that is not known."""
    layers = config.get("num_hidden_layers")
    if config.get("model_type") not in _FAMILIES or not isinstance(layers, int):
        return None
    inner = [
        (f"model.layers.{i}.{name}", f"layers.{i}.{own}")
        for i in range(min(layers, len(weights)))
        for name, own in _LAYER
    ]
    pairs = [pair for pair in (*_FIRST, *inner, *_LAST) if pair[0] in weights]
    return pairs if len(pairs) == len(weights) else None


def _renamed(optimizer: Mapping[str, Value], new: Mapping[str, str]) -> dict[str, Value]:
    """The optimizer with its parameters under the names in `new`; numbers of parameters are unchanged."""
    groups = [
        {**group, "params": [new.get(key, key) if isinstance(key, str) else key for key in group["params"]]}
        for group in optimizer["param_groups"]
    ]
    states = {new.get(key, key) if isinstance(key, str) else key: state for key, state in optimizer["state"].items()}
    return {**optimizer, "state": states, "param_groups": groups}


def _heads(config: Value) -> Mapping[str, int]:
    """The number of heads of queries and keys; {} if the rows have the order of the files."""
    if not isinstance(config, dict) or config.get("model_type") in (None, *_SAME_ROW_ORDER):
        return {}
    queries = config.get("num_attention_heads")
    keys = config.get("num_key_value_heads", queries)
    if not isinstance(queries, int) or not isinstance(keys, int):
        raise UnsupportedError("the configuration does not state the number of heads")
    return {"q": queries, "k": keys}


def _in_files_order(parameter: Parameter, heads: Mapping[str, int]) -> Parameter:
    """The parameter with the rows of its states in the order of the file.

    Raises `UnsupportedError` for other shapes.
    """
    match = _PERMUTED.fullmatch(parameter.name)
    if match is None or not heads:
        return parameter
    shape = parameter.weight.shape
    states = {}
    for name, state in parameter.states.items():
        if name != MODEL and state.size > 1:
            if state.shape != shape:
                raise UnsupportedError(f"state {name} of `{parameter.name}` has another shape than the parameter")
            state = _even_rows_first(state, heads[match[1]])
        states[name] = state
    return replace(parameter, states=states)


def _even_rows_first(tensor: Tensor, heads: int) -> Tensor:
    """The rows of each head reordered: the even rows, then the odd ones. `tensor`: (rows, ...)."""
    if heads < 1 or not tensor.shape or tensor.shape[0] % (2 * heads):
        raise UnsupportedError(f"{list(tensor.shape[:1])} rows cannot be those of {heads} heads")
    return halves_of_rotary(tensor, heads)
