"""Formats by name, and the checkpoint at a path.

To add a format: write its module, and add its row to `listed.FORMATS`. Installed packages add further ones (`plugins`).
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ckpt_formats.core.errors import InvalidArgumentError, UnsupportedError
from ckpt_formats.core.text import printable
from ckpt_formats.registry.listed import FORMATS as FORMATS
from ckpt_formats.registry.listed import ONLY_READ as ONLY_READ

if TYPE_CHECKING:
    from ckpt_formats.core.format import Format, WritableFormat


def format_named(name: str) -> "Format":
    """The format of this name, which is one of ckpt or of an installed package.

    Raises `InvalidArgumentError` if there is none, `UnsupportedError` if the package that provides it is broken.
    """
    if name not in FORMATS:
        from ckpt_formats.registry.plugins import plugins  # most commands name a format of ckpt

        provided = plugins()
        if name not in provided:
            names = ", ".join(name for name in (*FORMATS, *provided) if name not in ONLY_READ)
            raise InvalidArgumentError(f"there is no format {printable(name[:60])}", hint=f"Formats are {names}.")
        return provided[name].load()
    module, _, attribute = FORMATS[name].place.partition(":")
    format: Format = getattr(import_module(module), attribute)()
    return format


def writable(name: str, **options: object) -> "WritableFormat":
    """The format of this name, for writing.

    Raises `UnsupportedError` if it can only be read, `InvalidArgumentError` if it lacks an option, and as
    `format_named`.
    """
    from dataclasses import fields, replace

    from ckpt_formats.core.format import WritableFormat

    format = format_named(name)
    if not isinstance(format, WritableFormat):
        hint = "Convert to `universal`, which holds everything."
        if name == "chain":
            hint = "`ckpt append CHAIN CKPT` writes chains."
        raise UnsupportedError(f"{name} can be read, not written", hint=hint)
    known = [field.name for field in fields(format)]
    listed = ", ".join(known) or "none"
    if unknown := [option for option in options if option not in known]:
        raise InvalidArgumentError(f"format {name} has no option {unknown[0]}", hint=f"Its options: {listed}.")
    return replace(format, **options)
