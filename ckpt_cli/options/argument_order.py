"""Recognise arguments in another order than a command has them, and refuse them with the line that was meant."""

import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from ckpt_formats.core.errors import InvalidArgumentError
from ckpt_formats.core.text import printable

_CHAIN, _LIST = ".chain", "chain.json"
_ADAPTER = "adapter_config.json"
Meant = tuple[str, list[str]]
"""What is wrong with an order, and the arguments in the order that was meant."""


def check_order(command: str, given: Sequence[str], words: Sequence[str]) -> None:
    """Raise `InvalidArgumentError` if paths are given in another order than the command has them.

    Args:
        command: The name of the command.
        given: Its arguments, in their order.
        words: All words after the name of the command, options among them.
    """
    meant = None if command not in ORDERS or "--overwrite" in words else ORDERS[command](list(given))
    if meant is None:
        return
    what, order = meant
    raise InvalidArgumentError(what, hint=f"Write: ckpt {command} {_line(words, given, order)}")


def _line(words: Sequence[str], given: Sequence[str], order: Sequence[str]) -> str:
    """The words with the arguments in another order, quoted for a shell."""
    rest, line = list(given), list[str]()
    for word in words:
        if rest and word == rest[0]:
            line.append(order[len(given) - len(rest)])
            rest.pop(0)
        else:
            line.append(word)
    return printable(shlex.join(order if rest else line))


def _of_append(given: list[str]) -> Meant | None:
    chain = next((one for one in given[1:] if _is_chain(one)), None)
    if chain is None or _is_chain(given[0]) or not _is_checkpoint(given[0]):
        return None
    what = f"{printable(given[0])} is a checkpoint and {printable(chain)} a chain: the chain comes first"
    return what, [chain, *(one for one in given if one != chain)]


def _of_target(given: list[str]) -> Meant | None:
    if _exists(given[0]) or not all(map(_is_checkpoint, given[1:])):
        return None
    what = (
        f"there is nothing at {printable(given[0])}, but a checkpoint at {printable(given[-1])}: the target comes last"
    )
    return what, [*given[1:], given[0]]


def _of_merge_lora(given: list[str]) -> Meant | None:
    meant = _of_target(given)
    what, order = meant or ("", given)
    base, adapter, *rest = order
    if _is_adapter(base) and not _is_adapter(adapter) and _is_checkpoint(adapter):
        what = what or f"{printable(base)} is an adapter and {printable(adapter)} is none: the base model comes first"
        return what, [adapter, base, *rest]
    return meant


ORDERS: dict[str, Callable[[list[str]], Meant | None]] = {
    "append": _of_append,
    "average": _of_target,
    "merge": _of_target,
    "merge-lora": _of_merge_lora,
}
"""By command, what recognises another order of its arguments."""


def _is_url(path: str) -> bool:
    return "://" in path


def _exists(path: str) -> bool:
    """Whether something is at a path, as far as it can be told without asking a store."""
    return _is_url(path) or os.path.lexists(path) or os.path.lexists(path.rpartition("@")[0] or path)


def _is_chain(path: str) -> bool:
    """Whether a path is a chain, or the name of one that is not there yet."""
    if not _is_url(path) and os.path.lexists(path):
        return os.path.isfile(os.path.join(path, _LIST))
    return path.rstrip("/").endswith(_CHAIN)


def _is_adapter(path: str) -> bool:
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    return os.path.exists(path) and os.path.isfile(os.path.join(folder, _ADAPTER))


def _is_checkpoint(path: str) -> bool:
    """Whether a checkpoint is at a path, or a state of a chain; what is in a store is taken for one."""
    if _is_url(path):
        return True
    run, mark, _ = path.rpartition("@")
    if mark and os.path.isfile(os.path.join(run, _LIST)):
        return True
    from ckpt_formats.registry.location import is_checkpoint

    return os.path.exists(path) and is_checkpoint(Path(path))
