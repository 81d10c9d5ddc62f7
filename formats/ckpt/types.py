"""The classes of what the library returns and calls, for annotations: nobody constructs them.

`Progress` is the type of `progress=`.
"""

from ckpt.chains.write import AppendResult
from ckpt.compare import Diff
from ckpt.copying.sealing import Sealed
from ckpt.findings.report import Finding, Report
from ckpt.job import Progress
from ckpt.pipeline import Result
from ckpt.pipeline.cluster.distribute import ClusterStatus
from ckpt_formats.core.checkpoint import Parameter
from ckpt_formats.core.format import FilePlan, Plan
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.tensor import Tensor

__all__ = [
    "AppendResult",
    "ClusterStatus",
    "Diff",
    "FilePlan",
    "Finding",
    "Notice",
    "Parameter",
    "Plan",
    "Progress",
    "Report",
    "Result",
    "Sealed",
    "Tensor",
]
