"""DeepSpeed's own mixture of experts: which ranks share experts, and what an expert is called globally."""

import re
from collections.abc import Iterable

_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")


class ExpertNames:
    """Turns the number of an expert on its rank into its number in the model.

    Every rank writes its experts as 0, 1, ...; expert-parallel rank e of ranks
    with n experts each holds those from e * n on.
    """

    def __init__(self, local_names: Iterable[str], expert_rank: int) -> None:
        numbers = [int(match[2]) for name in local_names if (match := _EXPERT.fullmatch(name))]
        self._first = expert_rank * (max(numbers, default=-1) + 1)

    def __call__(self, name: str) -> str:
        match = _EXPERT.fullmatch(name)
        return f"{match[1]}{int(match[2]) + self._first}{match[3]}" if match else name


def expert_ranks(expert_rank: int, count: int, dp: int, contiguous: bool) -> list[int]:
    """The data-parallel ranks that hold the same experts, `count` of `dp`.

    Usually every (dp / count)-th; with `use_data_before_expert_parallelism`, neighbours.
    """
    if contiguous:
        return list(range(expert_rank * count, (expert_rank + 1) * count))
    return list(range(expert_rank, dp, dp // count))


def is_expert(name: str) -> bool:
    return _EXPERT.fullmatch(name) is not None
