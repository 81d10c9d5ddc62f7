"""What a user should know of a model before it is written."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.text import printable
from ckpt_formats.engines.hf.model_names import NameMatch

_MAX_NAMES = 3


def remarks(match: NameMatch, named: Sequence[Parameter], config: Mapping[str, Any] | None) -> Iterator[str]:
    """What does not fit, and what was changed so that it fits. `named` are the tensors as they will be written."""
    names, tie = {parameter.name for parameter in named}, match.tie
    if config is not None and not match.known and "quantization_config" not in config:
        kind = config.get("model_type")
        yield f"the names of models of type {kind!r:.80} are not known here: they stay as they are"
    if changed := [(old, new) for old, new in match.names.items() if old != new]:
        yield f"names are the model's own: `{changed[0][0]}` becomes `{changed[0][1]}`, and so on"
    if match.stacks:
        yield "tensors are as the model's files have them, not as the running model: stacks of experts are taken apart"
    if match.missing:
        yield f"tensors are missing that the model has, and transformers will make up: {_listed(match.missing)}"
    if match.surplus:
        yield f"tensors are there that the model has not, and transformers will leave: {_listed(match.surplus)}"
    if tie is not None and match.known and {tie.alias, tie.name} <= names:
        yield (
            f"`{tie.alias}` is a tensor of its own, but the configuration ties it to `{tie.name}`: transformers may "
            "take one for both"
        )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(f"`{printable(name)}`" for name in names[:_MAX_NAMES]) + more
