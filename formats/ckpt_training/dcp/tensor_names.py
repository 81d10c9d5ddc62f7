"""Which parameter and state each tensor is that a trainer gives to `torch.distributed.checkpoint.save`, by its path."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckpt_formats.core.checkpoint import MODEL, Group
from ckpt_formats.core.errors import InvalidArgumentError, UnsupportedError
from ckpt_formats.core.state_names import from_stored
from ckpt_formats.core.text import printable
from ckpt_formats.core.values import TensorName, Value
from ckpt_formats.engines.dcp.metadata import Steps
from ckpt_formats.state_dicts.optimizer_form import Optimizer
from ckpt_training.dcp.entries import PARAMS

_STATE, _GROUPS = "state", "param_groups"


@dataclass(frozen=True)
class TensorPlace:
    """A tensor of a checkpoint: a state of a parameter, or an extra."""

    parameter: str
    state: str = MODEL
    is_extra: bool = False


@dataclass(frozen=True)
class StateDictForm:
    """Where a state dict has the model and the optimizers, and which tensor is what."""

    model: Steps
    """The path of the model's state dict."""
    nested: tuple[Steps, ...]
    """The paths of the state dicts of optimizers, with lists of groups."""
    flat: tuple[Steps, ...]
    """The paths of those that are flat."""
    places: Mapping[str, TensorPlace]
    """The tensors, by their keys."""

    def params_keys(self, paths: Mapping[str, Steps]) -> list[str]:
        """The keys of the lists of names in nested groups."""
        return [key for key, path in paths.items() if path[-1] == PARAMS and self._group_of(path) is not None]

    def groups(self, values: Mapping[str, Value], paths: Mapping[str, Steps]) -> list[Group]:
        """The parameter groups. `values`: everything but weights and states, by keys.

        Raises `UnsupportedError` for groups that number their parameters.
        """
        names = [place.parameter for place in self.places.values() if not place.is_extra]
        return [*self._nested_groups(values, paths, frozenset(names)), *self._flat_groups(values, paths, names)]

    def extras(self, values: Mapping[str, Value], paths: Mapping[str, Steps]) -> dict[str, Value]:
        """The values that belong to no optimizer, by keys."""
        return {
            key: value
            for key, value in values.items()
            if self._group_of(paths[key]) is None and not self._is_flat_option(paths[key])
        }

    def _nested_groups(
        self, values: Mapping[str, Value], paths: Mapping[str, Steps], names: frozenset[str]
    ) -> Iterator[Group]:
        options: dict[tuple[Steps, int], dict[str, Value]] = {}
        for key, value in values.items():
            place = self._group_of(paths[key])
            if place is not None:
                options.setdefault(place, {})[".".join(map(str, paths[key][len(place[0]) + 2 :]))] = value
        for place in sorted(options, key=lambda place: (self.nested.index(place[0]), place[1])):
            own = options[place]
            params = own.pop(PARAMS, [])
            if not set(params) <= names:
                unknown = next(one for one in params if one not in names)
                raise UnsupportedError(
                    f"a parameter group lists {unknown!r:.80}, which is not a tensor of the model",
                    hint="Build the state dict with torch.distributed.checkpoint.state_dict.get_state_dict.",
                )
            yield Group(own, tuple(params))

    def _flat_groups(
        self, values: Mapping[str, Value], paths: Mapping[str, Steps], names: Sequence[str]
    ) -> Iterator[Group]:
        for root in self.flat:
            inside = {
                str(paths[key][-1]): value
                for key, value in values.items()
                if self._is_flat_option(paths[key]) and paths[key][:-1] == root
            }
            content = Optimizer(root, inside, tuple(inside), "").content(frozenset(names))
            if content is None:
                raise UnsupportedError(f"an option of `{'.'.join(map(str, root))}` is of no tensor of the model")
            for options in content[1]:
                own = dict(options)
                params = own.pop(PARAMS)
                yield Group(own, tuple(params))

    def _group_of(self, path: Steps) -> tuple[Steps, int] | None:
        for root in self.nested:
            at = len(root)
            if path[:at] == root and len(path) > at + 2 and path[at] == _GROUPS and isinstance(path[at + 1], int):
                return root, int(path[at + 1])
        return None

    def _is_flat_option(self, path: Steps) -> bool:
        return path[:-1] in self.flat and str(path[-1]).startswith(f"{_GROUPS}.")


def form_of(paths: Mapping[str, Steps], tensors: Sequence[str]) -> StateDictForm:
    """The form of a state dict. `paths`: of all keys. `tensors`: the keys of tensors.

    Raises `InvalidArgumentError` if states of an optimizer belong to no tensor of one model.
    """
    nested = dict.fromkeys(
        path[: path.index(_GROUPS)]
        for path in paths.values()
        if _GROUPS in path[:-1] and isinstance(path[path.index(_GROUPS) + 1], int)
    )
    flat = dict.fromkeys(path[:-1] for path in paths.values() if str(path[-1]).startswith(f"{_GROUPS}."))
    states: dict[str, tuple[str, str]] = {}
    joined_states: dict[str, str] = {}
    weights: dict[Steps, dict[str, str]] = {}
    for key in tensors:
        path = paths[key]
        root = path[:-3]
        if len(path) > 2 and root in nested and path[-3] == _STATE:
            states[key] = str(path[-2]), str(path[-1])
        elif path[:-1] in flat and str(path[-1]).startswith(f"{_STATE}."):
            joined_states[key] = str(path[-1])[len(_STATE) + 1 :]
        elif not any(path[: len(one)] == one for one in nested) and not _is_option(path, flat):
            weights.setdefault(path[:-1], {})[str(path[-1])] = key
    model = _model(weights, {name for name, _ in states.values()}, list(joined_states.values()))
    own = weights.get(model, {})
    places = {key: TensorPlace(name) for name, key in own.items()}
    for key, (name, state) in states.items():
        places[key] = TensorPlace(name, from_stored(state))
    for key, rest in joined_states.items():
        name = _longest(rest, own)
        places[key] = TensorPlace(name, from_stored(rest[len(name) + 1 :]))
    for key in tensors:
        if key not in places:
            places[key] = TensorPlace("/".join(map(str, paths[key])), is_extra=True)
    return StateDictForm(model, tuple(nested), tuple(flat), places)


def tensor_name(place: TensorPlace) -> TensorName:
    """What stands for an extra tensor in a value."""
    return TensorName(place.parameter)


def _is_option(path: Steps, flat: Mapping[Steps, None]) -> bool:
    return path[:-1] in flat and str(path[-1]).startswith(f"{_GROUPS}.")


def _model(weights: Mapping[Steps, Mapping[str, str]], names: set[str], joined: Sequence[str]) -> Steps:
    """The path of the model's state dict: the one that has all tensors of the optimizers."""
    fitting = [
        root for root, own in weights.items() if names <= own.keys() and all(_longest(rest, own) for rest in joined)
    ]
    chosen = next((root for root in (("model",), ()) if root in fitting), fitting[0] if len(fitting) == 1 else None)
    if chosen is None and (weights or names or joined):
        shown = next(iter((*names, *joined, *(next(iter(own)) for own in weights.values()))))
        raise InvalidArgumentError(
            f"the state dict has no model, or several, to which `{printable(shown)}` belongs",
            hint="Save one model, under the key `model`.",
        )
    return chosen or ()


def _longest(rest: str, names: Mapping[str, str]) -> str:
    """The longest name with which `rest` begins; empty if there is none."""
    name = rest.rpartition(".")[0]
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name
