"""Remarks for the user about a model that will be written."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.text import printable
from ckpt_formats.engines.hf.model_names import NameMatch

_MAX_NAMES = 3


def remarks(match: NameMatch, named: Sequence[Parameter], config: Mapping[str, Any] | None) -> Iterator[str]:
    """The differences to the model, and what is changed to fit it. `named` are the tensors as they will be written."""
    names, tie = {parameter.name for parameter in named}, match.tie
    if config is not None and not match.known and "quantization_config" not in config:
        kind = config.get("model_type")
        yield f"the names of models of type {kind!r:.80} are not known: names stay unchanged"
    if changed := [(old, new) for old, new in match.names.items() if old != new]:
        yield f"names are changed to the model's own: `{changed[0][0]}` becomes `{changed[0][1]}`, and so on"
    if match.stacks:
        yield "tensors have the form of the model's files, not of the model in memory: stacks of experts are divided"
    if match.missing:
        yield f"tensors of the model are missing, and transformers will initialize them: {_listed(match.missing)}"
    if match.surplus:
        yield f"tensors are not in the model, and transformers will ignore them: {_listed(match.surplus)}"
    if tie is not None and match.known and {tie.alias, tie.name} <= names:
        yield (
            f"`{tie.alias}` is a separate tensor, but the configuration ties it to `{tie.name}`: transformers may "
            "use one of them for both"
        )


def _listed(names: Sequence[str]) -> str:
    suffix = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(f"`{printable(name)}`" for name in names[:_MAX_NAMES]) + suffix
