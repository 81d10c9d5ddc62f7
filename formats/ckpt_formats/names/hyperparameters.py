"""The hyperparameters of a model, read from what one library states of it, and written as what another one states.

What a library cannot state is found by reading back what was written: a hyperparameter that differs is refused by name.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from ckpt_formats.core.errors import CkptError, CorruptError, IncompleteError, UnsupportedError
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import is_natural
from ckpt_formats.names.expressions import Expression, evaluate, names_of
from ckpt_formats.names.tables import Hyperparameter, Settings, hyperparameters

Values = Mapping[str, Any]

LETTERS = "hybrid_override_pattern"
"""The entry of transformers and of Megatron with a letter for each layer of a hybrid model, as a text."""

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu_new",
    "gelu_fast": "gelu_new",
    "quick_gelu": "quick_gelu",
    "relu2": "relu2",
}
"""`gelu_new` is GELU by the hyperbolic tangent, `gelu` by the error function. By the names of transformers."""
_QUANTISATION = "quantization_config"
_DEQUANTISE = "Dequantise its weights with --dtype."
_MAX_LAYERS = 100_000
_MAX_TEXT = 60
_LARGE = 1e30


@dataclass(frozen=True)
class ModelReading:
    """The hyperparameters of a model that a library states."""

    values: Values
    """The value of each hyperparameter; its default where it is not stated or not valid."""
    problems: Mapping[str, CkptError]
    """The reason for each one that is missing or not valid."""
    stated: frozenset[str]
    """The ones that are stated, rather than defaults."""

    def checked(self) -> Values:
        """The values. Raises the first problem: `IncompleteError`, `CorruptError` or `UnsupportedError`."""
        if self.problems:
            raise next(iter(self.problems.values()))
        return self.values


def read(settings: Settings, entries: Mapping[str, Any], source: str, *, with_defaults: bool = True) -> ModelReading:
    """The hyperparameters in a library's entries. `source`: what states them, for messages.

    Without defaults, a hyperparameter is stated only if all the entries are that it depends on.
    """
    scope = {**(settings.defaults if with_defaults else {}), **entries}
    if isinstance(letters := scope.get(LETTERS), str) and len(letters) <= _MAX_LAYERS:
        scope[LETTERS] = list(letters)  # expressions have no texts that they can go through
    values: dict[str, Any] = {}
    problems: dict[str, CkptError] = {}
    stated: set[str] = set()
    for one in hyperparameters():
        values[one.name] = one.default
        if not _matters(one, values, problems):
            continue
        expression = settings.read.get(one.name)
        if expression is not None and (with_defaults or names_of(expression) <= scope.keys()):
            try:
                value = _normalised(one, evaluate(expression, scope), values)
            except ValueError as error:
                problems[one.name] = _not_valid(one, expression, scope, source, str(error))
                continue
            except CkptError as error:
                is_missing = bool(names_of(expression) - scope.keys())
                problems[one.name] = _missing(one, expression, source) if is_missing else error
                continue
            if value is not None:
                values[one.name] = value
                stated.add(one.name)
            elif one.optional:
                stated.add(one.name)
        if with_defaults and values[one.name] is None and one.is_required:
            problems[one.name] = _missing(one, expression, source)
    return ModelReading(values, problems, frozenset(stated))


@contextmanager
def located(where: Path, hint: str | None = None) -> Iterator[None]:
    """Within, an error gets the file that states the model for its place, and the hint if it has none."""
    try:
        yield
    except CkptError as error:
        raise type(error)(error.what, where=where, hint=error.hint or hint) from None


def write(settings: Settings, values: Values) -> dict[str, Any]:
    """A library's entries for a model. Raises `CorruptError` for a value that no entry can state."""
    return {name: evaluate(expression, values) for name, expression in settings.write.items()}


def differences(values: Values, other: ModelReading, *, training: bool = False) -> Iterator[tuple[str, Any, Any]]:
    """The hyperparameters that another source states differently: (name, value, other value).

    Those that have no influence on what the model computes are included only if `training`.
    """
    for one in hyperparameters():
        value, other_value = values[one.name], other.values[one.name]
        if one.name in other.problems or one.noted or (one.training and not training):
            continue
        if value is None and not evaluate(one.when, values):
            continue  # it does not matter for this model
        if value != other_value and (one.name in other.stated or not one.is_required):
            yield one.name, value, other_value


def noted(values: Values, other: ModelReading, library: str) -> tuple[Notice, ...]:
    """A notice of hyperparameters that a library has otherwise, with a small influence."""
    names = [one.name for one in hyperparameters() if one.noted and values[one.name] != other.values[one.name]]
    stated = tuple(f"{name} {other.values[name]}, not {values[name]}" for name in names)
    return (Notice(f"{library} computes with values that differ slightly", stated, Weight.UNSURE),) if names else ()


def check_plain(settings: Settings, entries: Mapping[str, Any], source: str, hint: str) -> None:
    """Raise `UnsupportedError` for an entry that no hyperparameter states and that is not as in all known models."""
    for name, expression in settings.plain.items():
        stated, plain = entries.get(name), evaluate(expression, {})
        each = isinstance(stated, (list, tuple)) and stated and all(one == plain for one in stated)
        if stated is not None and stated is not False and stated != plain and not each:
            shown = printable(str(stated))[:_MAX_TEXT]
            text = f"{source} {_states(source)} {name} {shown}, which no known family of models has"
            raise UnsupportedError(text, hint=_DEQUANTISE if name == _QUANTISATION else hint)


def entries_of(settings: Settings, name: str) -> str:
    """The entries that state a hyperparameter, as text: `head_dim, hidden_size`."""
    expression = settings.read.get(name)
    return ", ".join(sorted(names_of(expression))) if expression is not None and names_of(expression) else name


def _matters(one: Hyperparameter, values: Values, problems: Mapping[str, CkptError]) -> bool:
    """Whether the hyperparameter's condition holds. If what it depends on has a problem, it is left out, too."""
    if problems.keys() & names_of(one.when):
        return False
    return bool(evaluate(one.when, values))


def _normalised(one: Hyperparameter, value: Any, values: Values) -> Any:
    """The value as all libraries have it. Raises `ValueError` that says what it must be."""
    if value is None:
        return None
    if one.kind == "pattern":
        return _pattern(value, values.get("layers"))
    if one.kind == "texts":
        layers = values.get("layers")
        if not isinstance(value, list) or len(value) != layers or not all(isinstance(item, str) for item in value):
            raise ValueError("must be a text for each layer")
        return value
    if one.kind == "naturals":
        if not isinstance(value, (list, tuple)) or not all(map(is_natural, value)):
            raise ValueError("must be a list of integers from 0")
        return list(value)
    kinds = {
        "count": (is_natural(value) and value > 0, "must be a positive integer"),
        "natural": (is_natural(value), "must be an integer from 0"),
        "number": (_is_number(value), "is not a valid number"),
        "flag": (isinstance(value, bool) or (is_natural(value) and value <= 1), "must be true or false"),
        "text": (isinstance(value, str) and len(value) <= _MAX_TEXT, "must be a short text"),
        "activation": (isinstance(value, str) and value in _ACTIVATIONS, "is not supported"),
    }
    is_valid, requirement = kinds[one.kind]
    if not is_valid:
        raise ValueError(requirement)
    if one.name == "layers" and value > _MAX_LAYERS:
        raise ValueError(f"must be at most {_MAX_LAYERS:,}")
    if one.kind == "flag":
        return bool(value)
    return _ACTIVATIONS[value] if one.kind == "activation" else value


def _pattern(value: Any, layers: Any) -> list[bool]:
    if not is_natural(layers):
        raise ValueError("is for an unknown number of layers")
    if not isinstance(value, (list, tuple)) or any(type(one) not in (int, bool) or one not in (0, 1) for one in value):
        raise ValueError("must be a flag for each layer")
    if len(value) != layers:
        raise ValueError(f"must have {layers} flags, one for each layer")
    return [bool(one) for one in value]


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isfinite(value) and 0 <= value < _LARGE


def _not_valid(
    one: Hyperparameter, expression: Expression, scope: Mapping[str, Any], source: str, requirement: str
) -> CkptError:
    names = sorted(names_of(expression) & scope.keys())
    stated = ", ".join(f"{name} {printable(str(scope[name]))[:_MAX_TEXT]}" for name in names) or one.name
    error = UnsupportedError if one.kind == "activation" else CorruptError
    return error(f"{source} {_states(source)} {stated}: the model's {one.name} {requirement}")


def _missing(one: Hyperparameter, expression: Expression | None, source: str) -> CkptError:
    names = sorted(names_of(expression)) if expression is not None else []
    entries = " or ".join(f"`{name}`" for name in names) or f"the model's {one.name}"
    does = "do" if source.endswith("s") else "does"
    return IncompleteError(f"{source} {does} not state {entries}, the model's {one.name}")


def _states(source: str) -> str:
    return "state" if source.endswith("s") else "states"
