"""The original form of a file of torch.save: a description of its tree, from which the tree is rebuilt.

    {'tree': value, 'extras': [key, ...], 'device': text, 'storages': [[tensor, ...], ...],
     'views': [{...}, ...], 'aliases': [tensor, ...]}

A tensor is named by its state and its parameter, `param/layers.0.weight`. In its place `tree` has a `TensorName` with
this name, or with `/3`, which means view number 3. A value of the top level that the checkpoint's extras have under the
same key is not stored twice: `extras` lists such keys, and `tree` has None there. `aliases` are tensors that `tree`
has under the name of another tensor, because both were at the same place. A view has what torch stores for a tensor
besides its values:

    tensor      the name of the tensor with the values
    storage, offset    the number of the item of `storages` (concatenated tensors) that contains it, and its first
                element in this storage
    strides     in elements, unless they are those of C order
    device, requires_grad, parameter, attrs    unless they are the usual ones
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from ckpt_formats.containers.torchfile import Storage, StorageSlice, TensorRef, TorchFile, blob_of, emit, load_pickle
from ckpt_formats.containers.typed_json import same
from ckpt_formats.core.checkpoint import Checkpoint, Parameter
from ckpt_formats.core.errors import CkptError, CorruptError, flaw
from ckpt_formats.core.values import TensorName, Value
from ckpt_formats.state_dicts.extras import map_leaves, tensors_for_names
from ckpt_formats.state_dicts.storages import (
    Place,
    StorageLayout,
    TensorChanged,
    find_shared,
    names_by_place,
    place_of_blob,
)


def form_of(file: TorchFile, parameters: Mapping[str, Parameter], extras: Mapping[str, Value]) -> Value:
    """The description of a file whose tensors became these parameters; None if it cannot be complete."""
    try:
        return _describe(file, parameters, extras)
    except CkptError:  # the tree is nested too deeply, at a place that no other code reads
        return None


def _describe(file: TorchFile, parameters: Mapping[str, Parameter], extras: Mapping[str, Value]) -> Value:
    name_by_place, aliases = names_by_place(parameters.values())
    references: dict[int, tuple[TensorRef, Place]] = {}
    bare_storages: list[Value] = []

    def note(value: Value) -> Value:
        if isinstance(value, TensorRef) and id(value) not in references:
            references[id(value)] = value, place_of_blob(blob_of(value))
            if value.attrs is not None:
                map_leaves(value.attrs, note)
        elif isinstance(value, (Storage, StorageSlice)):
            bare_storages.append(value)
        return value

    map_leaves(file.root, note)
    if bare_storages or not all(at in name_by_place for _, at in references.values()):
        return None
    common_device = _most_common(ref.storage.location for ref, _ in references.values())
    storages, layouts = find_shared({at: name_by_place[at] for _, at in references.values()})
    views: list[dict[str, Value]] = []
    names: dict[int, TensorName] = {}

    def leaf(value: Value) -> Value:
        if not isinstance(value, TensorRef):
            return value
        if id(value) not in names:
            _, at = references[id(value)]
            view = {**layouts.get(at, {}), **_view_properties(value, common_device)}
            if value.attrs:
                view["attrs"] = map_leaves(value.attrs, leaf)
            names[id(value)] = TensorName(f"/{len(views)}" if view else name_by_place[at])
            views.extend([{"tensor": name_by_place[at], **view}] if view else [])
        return names[id(value)]

    tree, in_extras = map_leaves(file.root, leaf), []
    if isinstance(tree, dict):
        in_extras = [key for key in tree if isinstance(key, str) and key in extras and same(tree[key], extras[key])]
        tree.update(dict.fromkeys(in_extras))
    return {
        "tree": tree,
        "extras": in_extras,
        "device": common_device,
        "storages": storages,
        "views": views,
        "aliases": aliases,
    }


def tree_of(form: Mapping[str, Value], source: Checkpoint) -> Value:
    """The tree with its tensors, to write it; None if the checkpoint has other or further tensors now.

    Raises `CorruptError` for a form that `form_of` never returns, `UnsafeError` if the file would name what is not
    allowed.
    """
    try:
        _check_names([form["tree"], form["views"]], source.path)
        return _rebuild(form, source)
    except TensorChanged:
        return None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
        why = f"its description of the original file is not one that ckpt writes: {flaw(error)}"
        raise CorruptError(why, where=source.path) from None


def _rebuild(form: Mapping[str, Value], source: Checkpoint) -> Value:
    layout = StorageLayout(source, form["storages"], form.get("aliases", ()))
    views: dict[str, Value] = {}

    def leaf(value: Value) -> Value:
        if not isinstance(value, TensorName):
            return value
        if value.name not in views:
            view = {"tensor": value.name} if value.name[:1] != "/" else dict(form["views"][int(value.name[1:])])
            attrs = map_leaves(view.pop("attrs", None), leaf)
            views[value.name] = layout.view(**{"device": form["device"], **view}, attrs=attrs)
        return views[value.name]

    tree = map_leaves(form["tree"], leaf)
    for key in form["extras"]:
        if key not in source.extras:
            return None
        tree[key] = tensors_for_names(source.extras[key], source.parameters)
    return tree if layout.is_all else None


def _most_common(texts: Iterable[str]) -> str:
    return max(Counter(texts).items(), key=lambda item: item[1], default=("cpu", 0))[0]


def _view_properties(ref: TensorRef, common_device: str) -> dict[str, Value]:
    properties: dict[str, Value] = {}
    if ref.storage.location != common_device:
        properties["device"] = ref.storage.location
    if ref.requires_grad:
        properties["requires_grad"] = True
    if ref.is_parameter:
        properties["parameter"] = True
    return properties


def _check_names(values: Value, where: Path) -> None:
    """Read what would be written as strictly as any other file, because the description may be hostile."""
    load_pickle(emit(map_leaves(values, lambda leaf: None if isinstance(leaf, TensorName) else leaf)), str(where))
