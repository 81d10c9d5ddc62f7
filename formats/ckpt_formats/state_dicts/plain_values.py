"""Objects of other libraries that only wrap dicts and lists, as these dicts and lists: configurations, most often.

    omegaconf       DictConfig, ListConfig, TupleConfig and nodes; interpolations such as `${model.lr}` stay texts
    a dict          of a class of its own whose attributes lead back to itself: AttrDict, addict.Dict
    tensordict      a TensorDict, as a dict of tensors

Types and flags of OmegaConf are not values, and are left out: `OmegaConf.create` makes a configuration again.
"""

from ckpt_formats.containers.keys import KeyHashes
from ckpt_formats.containers.torchfile.builders import hashable
from ckpt_formats.core.claims import MAX_TREE_DEPTH
from ckpt_formats.core.values import Global, Record, Value
from ckpt_formats.state_dicts.walk import check_contents

_OMEGACONF = "omegaconf"
_CONTENT = "_content"
_NODE = "_val"
_TENSORDICT = Global("tensordict._reductions", "_make_td")
_TENSORS = "_tensordict"


def plain_value(record: Record, where: str) -> Value:
    """The dict, list or value that an object wraps; the object itself if it is more than that.

    Raises `UnsafeError` if it has keys that no dict can have.
    """
    return _Plain(where).of(record, 0) if _wraps(record) else record


def tensordict_parts(value: Value) -> tuple[dict[Value, Value], dict[Value, Value]] | None:
    """The content of a TensorDict, and its other attributes, such as the size of its batch; None for other values."""
    if not (isinstance(value, Record) and value.cls == _TENSORDICT and len(value.args) == 2):
        return None
    state = value.args[1]
    if not (isinstance(state, dict) and isinstance(state.get(_TENSORS), dict)):
        return None
    return state[_TENSORS], {key: item for key, item in state.items() if key != _TENSORS and item is not None}


def _wraps(record: Record) -> bool:
    if _is_omegaconf(record):
        return _wrapped(record) is not record
    is_dict = (record.mapping or record.state is record) and not (record.kwargs or record.items)
    return bool(is_dict) and record.state is not None and check_contents(record, set()) == "endless"


def _is_omegaconf(record: Record) -> bool:
    return record.cls.module.partition(".")[0] == _OMEGACONF


def _wrapped(record: Record) -> Value:
    """What an object of OmegaConf wraps: a dict or list of nodes, a value, or a text for an interpolation."""
    state = record.state
    if not isinstance(state, dict):
        return record
    return state.get(_CONTENT, state.get(_NODE, record))


class _Plain:
    """One pass over an object. Values that it has in several places are shared again."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._done: dict[int, tuple[Value, Value]] = {}
        self._classes: set[Global] = set()
        """Of dicts with attributes: an empty one states nothing but its class."""

    def of(self, value: Value, depth: int) -> Value:
        if depth > MAX_TREE_DEPTH or not isinstance(value, (dict, list, tuple, Record)):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = value, value
            self._done[id(value)] = value, self._opened(value, depth + 1)
        return self._done[id(value)][1]

    def _opened(self, value: Value, depth: int) -> Value:
        if isinstance(value, Record):
            if _is_omegaconf(value):
                inner = _wrapped(value)
                return tuple(self.of(inner, depth)) if _is_tuple(value, inner) else self.of(inner, depth)
            if value.cls in self._classes and not (value.args or value.state or value.mapping or value.items):
                return {}
            if not _wraps(value):
                return value
            self._classes.add(value.cls)
            return self._dict(value.mapping, depth)
        if type(value) is dict:
            return self._dict(value.items(), depth)
        if type(value) in (list, tuple):
            return type(value)(self.of(item, depth) for item in value)
        return value

    def _dict(self, pairs: Value, depth: int) -> dict[Value, Value]:
        hashes = KeyHashes()
        return {hashable(key, self._where, hashes): self.of(item, depth) for key, item in pairs}


def _is_tuple(record: Record, content: Value) -> bool:
    return record.cls.name == "TupleConfig" and isinstance(content, (list, tuple))
