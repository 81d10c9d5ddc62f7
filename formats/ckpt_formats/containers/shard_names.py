"""The names of the files of a model in several files."""

import re
from typing import NamedTuple

INDEX_SUFFIX = ".index.json"
NUMBERED = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})(\.[a-z]+)")
_OF_VLLM = re.compile(r"model-rank-(\d{1,6})-part-(\d{1,6})\.safetensors")


class ShardNumber(NamedTuple):
    """The numbers in a file name: `model-00002-of-00003.safetensors` is file 2 of 3 of `model`."""

    stem: str
    number: int
    total: int


def number_of(name: str) -> ShardNumber | None:
    """The numbers in a file name; None if it has none."""
    match = NUMBERED.fullmatch(name)
    return None if match is None else ShardNumber(match[1], int(match[2]), int(match[3]))


def part_of_vllm(name: str) -> tuple[int, int] | None:
    """The rank and the number of a file of vLLM's sharded state, by its name; None for other names."""
    match = _OF_VLLM.fullmatch(name)
    return None if match is None else (int(match[1]), int(match[2]))
