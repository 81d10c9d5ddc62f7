"""The kernels of another CPU level than the one that this process would choose."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from unittest import mock

import kernel_headers
from ckpt_codecs.native import library

LEVELS = library.levels()


def families() -> list[ModuleType]:
    """The modules `ckpt_codecs.native.*`: each has `SIGNATURES`, and its functions in `kernels`."""
    names = [f"ckpt_codecs.native.{name}" for name in kernel_headers.FAMILIES]
    return [importlib.import_module(name) for name in names if find_spec(name)]


@contextmanager
def at_level(level: int) -> Iterator[None]:
    """Bind all kernels to a level until the end of the block. Other threads of the process get it, too."""
    _unbind()
    try:
        with mock.patch.object(library, "level", return_value=level):
            yield
    finally:
        _unbind()


def _unbind() -> None:
    for family in families():
        signatures = family.kernels._signatures
        family.kernels.__dict__.clear()
        family.kernels._signatures = signatures
