"""DeepSpeed's own mixture of experts: which ranks hold the same experts, and the number of an expert in the model."""

import re
from collections.abc import Iterable

_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")


class ExpertNames:
    """Replaces the number of an expert on its rank by its number in the model.

    Every rank numbers its experts from 0. If every rank holds n experts, those of
    expert-parallel rank e have the numbers e * n to e * n + n - 1 in the model.
    """

    def __init__(self, local_names: Iterable[str], expert_rank: int) -> None:
        numbers = [int(match[2]) for name in local_names if (match := _EXPERT.fullmatch(name))]
        self._first = expert_rank * (max(numbers, default=-1) + 1)

    def __call__(self, name: str) -> str:
        match = _EXPERT.fullmatch(name)
        return f"{match[1]}{int(match[2]) + self._first}{match[3]}" if match else name


def expert_ranks(expert_rank: int, count: int, dp: int, contiguous: bool) -> list[int]:
    """The `count` data-parallel ranks, of `dp`, that hold the experts of expert-parallel rank `expert_rank`.

    They are every (dp / count)-th rank, or with `use_data_before_expert_parallelism` (`contiguous`) neighbours.
    """
    if contiguous:
        return list(range(expert_rank * count, (expert_rank + 1) * count))
    return list(range(expert_rank, dp, dp // count))


def is_expert(name: str) -> bool:
    """Is this the name of a parameter of an expert?"""
    return _EXPERT.fullmatch(name) is not None
