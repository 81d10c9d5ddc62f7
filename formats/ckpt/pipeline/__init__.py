"""The pipeline behind everything that writes: plan, write the files, verify checksums, commit, publish."""

from ckpt.pipeline.checks import (
    check_complete,
    check_not_suspicious,
    identities_of,
    job_id,
    listed_seals,
    plan,
    raise_if_damaged,
    seals_error,
    space_needed,
)
from ckpt.pipeline.resources import Execution, Resources
from ckpt.pipeline.result import Result, complete_before
from ckpt.pipeline.write import write
from ckpt.pipeline.write_files import CountBytes

__all__ = [
    "CountBytes",
    "Execution",
    "Resources",
    "Result",
    "check_complete",
    "check_not_suspicious",
    "complete_before",
    "identities_of",
    "job_id",
    "listed_seals",
    "plan",
    "raise_if_damaged",
    "seals_error",
    "space_needed",
    "write",
]
