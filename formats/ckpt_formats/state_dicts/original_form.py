"""The tree that a file of torch.save held, noted beside its tensors, and grown again from the note.

    {'tree': value, 'extras': [key, ...], 'device': text, 'runs': [[tensor, ...], ...], 'views': [{...}, ...],
     'twins': [tensor, ...]}

A tensor is called by its state and its parameter, `param/layers.0.weight`. In its place `tree` has a `TensorName` of
that, or of `/3`: the view number 3. What the checkpoint's extras hold under the same key of the top level is not noted
twice: `extras` lists such keys, and `tree` has None there. `twins` are tensors that `tree` has under the name of
another, which lay in the same place. A view says what torch knows of a tensor beyond its values:

    tensor      which has the values
    run, at     the tensors in whose storage it lies, end to end, and after how many of their elements it begins
    strides     in elements, where they are not those of C order
    device, requires_grad, parameter, attrs    where they are not as usual
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckpt_formats.containers.torchfile import Storage, StorageSlice, TensorRef, TorchFile, emit, load_pickle, tensor_of
from ckpt_formats.containers.typed_json import same
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.errors import CkptError, Corrupt, flaw
from ckpt_formats.core.values import TensorName, Value
from ckpt_formats.state_dicts.extras import map_leaves, tensors_for_names
from ckpt_formats.state_dicts.storages import Place, StorageLayout, TensorChanged, find_shared, names_by_place, place


def form_of(file: TorchFile, parameters: Mapping[str, Parameter], extras: Mapping[str, Value]) -> Value:
    """What to note of a file whose tensors have become these parameters; None if that would not be all of it."""
    try:
        return _noted(file, parameters, extras)
    except CkptError:  # it is nested without end, in a place that nothing else looks at
        return None


def _noted(file: TorchFile, parameters: Mapping[str, Parameter], extras: Mapping[str, Value]) -> Value:
    known, twins = names_by_place(parameters.values())
    found: dict[int, tuple[TensorRef, Place]] = {}
    others: list[Value] = []

    def note(value: Value) -> Value:
        if isinstance(value, TensorRef) and id(value) not in found:
            found[id(value)] = value, place(tensor_of(value))
            map_leaves(value.attrs, note)
        elif isinstance(value, (Storage, StorageSlice)):
            others.append(value)
        return value

    map_leaves(file.root, note)
    if others or not all(at in known for _, at in found.values()):
        return None
    usual = _most(ref.storage.location for ref, _ in found.values())
    runs, lying = find_shared({at: known[at] for _, at in found.values()})
    views: list[dict[str, Value]] = []
    done: dict[int, TensorName] = {}

    def leaf(value: Value) -> Value:
        if not isinstance(value, TensorRef):
            return value
        if id(value) not in done:
            _, at = found[id(value)]
            view = {**lying.get(at, {}), **_beyond(value, usual)}
            if value.attrs:
                view["attrs"] = map_leaves(value.attrs, leaf)
            done[id(value)] = TensorName(f"/{len(views)}" if view else known[at])
            views.extend([{"tensor": known[at], **view}] if view else [])
        return done[id(value)]

    tree, twice = map_leaves(file.root, leaf), []
    if isinstance(tree, dict):
        twice = [key for key in tree if isinstance(key, str) and key in extras and same(tree[key], extras[key])]
        tree.update(dict.fromkeys(twice))
    return {"tree": tree, "extras": twice, "device": usual, "runs": runs, "views": views, "twins": twins}


def tree_of(form: Mapping[str, Value], source: Checkpoint) -> Value:
    """The tree with its tensors, to be written; None if the checkpoint has other tensors by now, or some more.

    Raises `Corrupt` for what `form_of` never gives, `Unsafe` if the file would name what none may.
    """
    try:
        _check_names([form["tree"], form["views"]], source.path)
        return _grown(form, source)
    except TensorChanged:
        return None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        why = f"what it notes of the file that it was is not as ckpt writes it: {flaw(error)}"
        raise Corrupt(why, where=source.path) from None


def _grown(form: Mapping[str, Value], source: Checkpoint) -> Value:
    laid = StorageLayout(source, form["runs"], form.get("twins", ()))
    done: dict[str, Value] = {}

    def leaf(value: Value) -> Value:
        if not isinstance(value, TensorName):
            return value
        if value.name not in done:
            view = {"tensor": value.name} if value.name[:1] != "/" else dict(form["views"][int(value.name[1:])])
            attrs = map_leaves(view.pop("attrs", None), leaf)
            done[value.name] = laid.view(**{"device": form["device"], **view}, attrs=attrs)
        return done[value.name]

    tree = map_leaves(form["tree"], leaf)
    for key in form["extras"]:
        if key not in source.extras:
            return None
        tree[key] = tensors_for_names(source.extras[key], source.parameters)
    return tree if laid.is_all else None


def _most(texts: Iterable[str]) -> str:
    return max(Counter(texts).items(), key=lambda item: item[1], default=("cpu", 0))[0]


def _beyond(ref: TensorRef, usual: str) -> dict[str, Value]:
    said: dict[str, Value] = {}
    if ref.storage.location != usual:
        said["device"] = ref.storage.location
    if ref.requires_grad:
        said["requires_grad"] = True
    if ref.is_parameter:
        said["parameter"] = True
    return said


def _check_names(values: Value, where: Path) -> None:
    """Read what would be written as strictly as any file of a stranger: the note may be one's."""
    load_pickle(emit(map_leaves(values, lambda leaf: None if isinstance(leaf, TensorName) else leaf)), str(where))
