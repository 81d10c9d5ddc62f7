"""What the headers of the C kernels declare."""

import re
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).parents[2] / "codecs" / "kernels"
READERS = ("lossless", "deltas", "lossy", "gradients", "quantised", "stats", "parity")
"""Families that are given bytes of files: each has a part of the fuzzer."""
FAMILIES = (*READERS, "stepping")
"""Of each there are a header and a Python module in ckpt_codecs.native."""

_PROTOTYPE = re.compile(r"([\w\s*]+?)\bAPI\((\w+)\)\s*\(([^()]*)\)\s*;")
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_DIRECTIVE = re.compile(r"^[ \t]*#(?:\\\n|.)*$", re.MULTILINE)


@dataclass(frozen=True)
class Prototype:
    """An exported kernel. Types are C's names, `pointer` for all pointers and arrays."""

    name: str
    result: str
    arguments: tuple[str, ...]


def read_prototypes(family: str) -> dict[str, Prototype]:
    """The exported kernels of a family by name, in the order of its header."""
    text = _DIRECTIVE.sub("", _COMMENT.sub(" ", (SOURCES / f"{family}.h").read_text()))
    prototypes = {}
    for result, name, arguments in _PROTOTYPE.findall(text):
        types = tuple(_type(argument) for argument in arguments.split(",") if argument.strip() != "void")
        prototypes[name] = Prototype(name, " ".join(result.split()), types)
    # A declaration that the pattern above does not understand must not be overlooked.
    assert len(prototypes) == len(re.findall(r"\bAPI\(", text)), f"{family}.h has a declaration that is not understood"
    return prototypes


def _type(argument: str) -> str:
    if "*" in argument or "[" in argument:
        return "pointer"
    *words, _name = argument.replace("const ", "").split()
    return " ".join(words)
