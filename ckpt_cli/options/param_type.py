"""The base of the options' own types: Click's, which says in brackets what it converts to."""

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    ParamType = click.ParamType
else:

    class ParamType(click.ParamType):
        """Takes brackets with every Click; Click's own does from 8.4 on."""

        def __class_getitem__(cls, _: object) -> type["ParamType"]:
            return cls
