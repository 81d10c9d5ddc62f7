"""What averages and merges share: the weights of their sources, with files, checksums and notices."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckpt_formats.core.checkpoint import Checkpoint, SourceFile
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.values import TensorName, Value
from ckpt_formats.engines.hf.folder import is_training_file
from ckpt_formats.state_dicts.run_files import PREFIX as _HF

CONFIG = "hf/config.json"


def model_of(source: Checkpoint) -> Checkpoint:
    """The weights alone, with the files of a model of Hugging Face's: its configuration and tokenizer."""
    model = source.weights_only()
    files = {
        key: value
        for key, value in source.extras.items()
        if key.startswith(_HF) and not is_training_file(key.removeprefix(_HF))
    }
    named = {value.name for value in files.values() if isinstance(value, TensorName)}
    tensors = {name: source.parameters[name] for name in named & source.parameters.keys()}
    return replace(model, extras={**model.extras, **files}, parameters={**model.parameters, **tensors})


def holder(model: Checkpoint, name: str) -> str:
    """The name of the parameter that has the values of `name`, which may be tied to it."""
    return name if name in model.parameters else model.aliases[name]


def dropped_notices(sources: Sequence[Checkpoint]) -> Iterator[Notice]:
    """Notices: the optimizers' states are dropped; the weights are approximate."""
    every = (item for source in sources for item in source.tensors() if item[0].role != "extra")
    states = dict.fromkeys(state for parameter, state, tensor in every if tensor is not parameter.weight)
    if states or any(source.groups for source in sources):
        yield Notice(
            "only weights are combined; the optimizer's states are not in the result", tuple(states), Weight.LOST
        )
    if any(source.errors for source in sources):
        yield Notice("some of the weights are approximate: they were coded with loss", weight=Weight.UNSURE)


def all_files(models: Sequence[Checkpoint]) -> tuple[SourceFile, ...]:
    """The files of all checkpoints, each once."""
    return tuple({file.path: file for model in models for file in model.files}.values())


def untied_config(extras: Mapping[str, Value]) -> dict[str, Value]:
    """The extras with a model configuration that ties no embeddings."""
    config = extras.get(CONFIG)
    if not isinstance(config, dict):
        return dict(extras)
    config = {**config, "tie_word_embeddings": False}
    inner = config.get("text_config")
    if isinstance(inner, dict) and "tie_word_embeddings" in inner:
        config["text_config"] = {**inner, "tie_word_embeddings": False}
    return {**extras, CONFIG: config}
