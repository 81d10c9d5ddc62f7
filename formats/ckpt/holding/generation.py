"""What all ranks of a run send together: a segment of its log, or a save."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class SentGeneration:
    """What all ranks of a run send together: it is whole when the main file of each of them is."""

    run: str
    name: str
    created: int
    """When it began, in nanoseconds since 1970: the same for all ranks."""
    world: int
    main_file: Callable[[int], str]
    """The name of the file of a rank that every rank has."""
    step: int
    """The step at which it begins."""
    is_recorded: bool
    """Whether it is a segment of a log, and no save."""
