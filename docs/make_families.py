"""Writes docs/families.md from the tables of families; with --check, fails if it is not what they state."""

import sys
from collections.abc import Iterator
from pathlib import Path

from ckpt_formats.names.overview import LIBRARIES, FamilySummary, family_summaries

PAGE = Path(__file__).with_name("families.md")

HEAD = """# Families of models

Generated from the tables of names by `python docs/make_families.py`; do not edit.
`ckpt formats --families` prints the same.

ckpt knows the names, shapes and order of the tensors of these families.
The last columns are libraries between which it translates a model ([names](hf.md#names)).
**Megatron core** has a mark if its arguments can state a model with the default options of transformers.
ckpt refuses a model with an option that Megatron core does not have, and names the option.
Models of other families can be converted, too: under the names that they have.
"""

TITLES = {
    "hf": "Hugging Face's files",
    "hf_memory": "transformers in memory",
    "megatron": "Megatron's names",
    "gguf": "llama.cpp",
    "torchtitan": "TorchTitan",
    "meta": "Meta",
    "maxtext": "MaxText",
}


def page() -> str:
    columns = ["family", "`model_type`", "classes", "Megatron core", "experts", "MTP"]
    columns += [TITLES.get(name, name) for name in LIBRARIES]
    lines = [HEAD, _row(columns), _row(["---"] * len(columns))]
    lines += [_row(_cells(one)) for one in family_summaries()]
    lines += ["", "**MTP**: layers for multi-token prediction.", ""]
    return "\n".join(lines)


def _cells(family: FamilySummary) -> Iterator[str]:
    yield family.name
    yield ", ".join(f"`{name}`" for name in family.model_types)
    yield ", ".join(f"`{name}`" for name in family.architectures)
    yield from map(_mark, (family.in_megatron, family.has_experts, family.has_mtp))
    yield from (_mark(name in family.libraries) for name in LIBRARIES)


def _mark(is_there: bool) -> str:
    return "✓" if is_there else ""


def _row(cells: Iterator[str] | list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> int:
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), "utf-8")
        return 0
    if not PAGE.exists() or PAGE.read_text("utf-8") != page():
        print("docs/families.md is not what the tables state: run `python docs/make_families.py`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
