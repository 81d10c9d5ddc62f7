"""Orders of a trainer to its writer process: a line of JSON each, and bytes after it. An order is a dataclass."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol


class Order(Protocol):
    """A dataclass of plain values."""

    __dataclass_fields__: ClassVar[dict[str, Any]]


@dataclass(frozen=True)
class End:
    """Nothing follows."""


def encode_order(order: Order, content: bytes = b"") -> bytes:
    """Return the bytes of an order. `content`: those that follow its line."""
    fields = {"order": type(order).__name__, **vars(order), "nbytes": len(content)}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n" + content


def decode_order(fields: Mapping[str, Any], types: Iterable[type[Any]]) -> Any:
    """Return the order of a line, which is of one of these types."""
    by_name = {one.__name__: one for one in types}
    return by_name[fields["order"]](
        **{name: value for name, value in fields.items() if name not in ("order", "nbytes")}
    )
