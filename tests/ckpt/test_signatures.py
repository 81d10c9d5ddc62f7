"""Every class that a user meets in the annotations of the library has a public name.

These are the parameters and results of functions and methods, and attributes. Of `ckpt.types`, which functions return,
only attributes; of a format, its options and what all formats have: the rest is for authors of formats and codecs.
"""

import ast
import importlib
import inspect
import typing
from collections.abc import Iterator
from functools import cached_property
from types import FunctionType
from typing import Any

import pytest

import ckpt
from public_names import PUBLIC

OURS = ("ckpt", "ckpt_formats", "ckpt_codecs", "ckpt_recorder", "ckpt_training")
NAMED = {id(thing) for thing in (*PUBLIC.values(), *(getattr(ckpt.ext, name) for name in ckpt.ext.__all__))}


def annotations_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """The annotations of a function, or of the public attributes and methods of a class, each with its place."""
    if isinstance(thing, FunctionType):
        yield from _of_function(thing, thing.__qualname__)
        return
    for base in thing.__mro__:
        if base.__module__.partition(".")[0] not in OURS:
            continue
        for name, annotation in inspect.get_annotations(base).items():
            if not name.startswith("_"):
                yield f"{base.__name__}.{name}", _evaluated(annotation, base)
        is_of_engine = issubclass(thing, ckpt.WritableFormat) and base is not ckpt.WritableFormat
        is_returned = thing.__name__ in ckpt.types.__all__
        for name, member in vars(base).items():
            if is_of_engine or (is_returned and not isinstance(member, (property, cached_property))):
                continue
            if name.startswith("_") and name not in ("__init__", "__getitem__", "__iter__", "__call__"):
                continue
            function = _function_of(member)
            if function is not None:
                yield from _of_function(function, f"{base.__name__}.{name}")


def _function_of(member: Any) -> FunctionType | None:
    if isinstance(member, property):
        return member.fget  # type: ignore[return-value]
    if isinstance(member, cached_property):
        return member.func  # type: ignore[return-value]
    if isinstance(member, (classmethod, staticmethod)):
        return member.__func__  # type: ignore[return-value]
    return member if isinstance(member, FunctionType) else None


def _of_function(function: FunctionType, place: str) -> Iterator[tuple[str, Any]]:
    for name, annotation in inspect.get_annotations(inspect.unwrap(function)).items():
        yield f"{place}({name})", _evaluated(annotation, inspect.unwrap(function))


def _evaluated(annotation: Any, owner: Any) -> Any:
    """An annotation that is a text becomes what it names, also what only type checkers import."""
    if not isinstance(annotation, str):
        return annotation
    module = importlib.import_module(owner.__module__)
    names = {**_imported_for_types(module), **vars(module)}
    return eval(annotation, names)


def _imported_for_types(module: Any) -> dict[str, Any]:
    """What the module imports under `if TYPE_CHECKING`."""
    names: dict[str, Any] = {}
    _, _, block = inspect.getsource(module).partition("\nif TYPE_CHECKING:\n")
    lines = []
    for line in block.splitlines():
        if line and not line.startswith(" "):
            break
        lines.append(line[4:])
    for statement in ast.parse("\n".join(lines)).body:
        _run(statement, names)
    return names


def _run(statement: ast.stmt, names: dict[str, Any]) -> None:
    try:
        exec(compile(ast.Module([statement], []), "imports", "exec"), names)
    except ImportError:  # a package that is not installed, or a name that only type checkers know
        names |= {one.asname or one.name: Any for one in getattr(statement, "names", ())}


def classes_in(annotation: Any) -> Iterator[type]:
    """The classes that an annotation names, at any depth."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        yield annotation
        return
    if isinstance(annotation, (list, tuple)):  # the arguments of a Callable
        for one in annotation:
            yield from classes_in(one)
    for one in (typing.get_origin(annotation), *typing.get_args(annotation)):
        if one is not None and one is not annotation:
            yield from classes_in(one)


def test_checkpoint_takes_its_fields_by_name_only() -> None:
    assert {one.kind for one in inspect.signature(ckpt.Checkpoint).parameters.values()} == {
        inspect.Parameter.KEYWORD_ONLY
    }


@pytest.mark.parametrize("name", PUBLIC)
def test_every_class_in_an_annotation_has_a_public_name(name: str) -> None:
    unnamed = {
        f"{one.__module__}.{one.__qualname__} in {place}"
        for place, annotation in annotations_of(PUBLIC[name])
        for one in classes_in(annotation)
        if one.__module__.partition(".")[0] in OURS and id(one) not in NAMED
    }
    assert not unnamed
