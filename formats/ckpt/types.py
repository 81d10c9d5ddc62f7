"""The classes of what the library returns and calls, for annotations."""

from ckpt.chains.compact import CompactResult
from ckpt.chains.trials import AcceptedStep, Trial
from ckpt.chains.write import AppendResult
from ckpt.compare import Diff, DiffSums, Histogram, TensorDiff, ValueDiff
from ckpt.compare.fitting import Fit
from ckpt.compare.fitting.fit import Reshaped, Retyped
from ckpt.compare.statistics import Figures, Stats, TensorStats
from ckpt.copying.follow import CopyUpdate
from ckpt.copying.rank_index import IndexedRanks
from ckpt.copying.sealing import Sealed
from ckpt.copying.selection import ChosenFile
from ckpt.findings.report import Finding, Report
from ckpt.following.changes import TensorChange
from ckpt.following.source import FollowedStep
from ckpt.job import Progress
from ckpt.pipeline import Result
from ckpt.pipeline.cluster.distribute import ClusterStatus
from ckpt.pipeline.planned_reads import StoreReads
from ckpt.pipeline.targets import Removed
from ckpt.protection.damage import DamagedFile
from ckpt.protection.protect_plan import Protection
from ckpt.protection.repair import Repair
from ckpt.publishing.publish import PublishedCheckpoint
from ckpt.reading import Verification
from ckpt.runs.latest import Latest, PassedOver
from ckpt.runs.new import SkippedCheckpoint
from ckpt.runs.prune import PrunedCheckpoint, PruneResult
from ckpt.runs.watch import StoredCheckpoint
from ckpt.shadow.described import PartOfState
from ckpt.shadow.mirror import LogMirror
from ckpt.shadow.shadow import ShadowStatus
from ckpt_codecs.delta import DeltaCodec
from ckpt_formats.core.checkpoint import Edit, Group, Origin, OriginalForm, Parameter, SourceFile
from ckpt_formats.core.format import FilePlan, Plan
from ckpt_formats.core.identity import Identity
from ckpt_formats.core.layout import ShardBlock
from ckpt_formats.core.notices import Notice
from ckpt_formats.core.tensor import BlockIndexer, FlatIndexer, Tensor
from ckpt_formats.core.value_changes import ChangedTensor
from ckpt_formats.state_dicts.keys import StateKeys
from ckpt_formats.universal.chain.chain_file import AppendedFrom, ChainIndex, LoggedSteps, Member, SharedPacks, Tip
from ckpt_formats.universal.gradients.parts import StatePart
from ckpt_formats.universal.published.records import RecordRef, StepName

__all__ = [
    "AcceptedStep",
    "AppendResult",
    "AppendedFrom",
    "BlockIndexer",
    "ChainIndex",
    "ChangedTensor",
    "ChosenFile",
    "ClusterStatus",
    "CompactResult",
    "CopyUpdate",
    "DamagedFile",
    "DeltaCodec",
    "Diff",
    "DiffSums",
    "Edit",
    "Figures",
    "FilePlan",
    "Finding",
    "Fit",
    "FlatIndexer",
    "FollowedStep",
    "Group",
    "Histogram",
    "Identity",
    "IndexedRanks",
    "Latest",
    "LogMirror",
    "LoggedSteps",
    "Member",
    "Notice",
    "Origin",
    "OriginalForm",
    "Parameter",
    "PartOfState",
    "PassedOver",
    "Plan",
    "Progress",
    "Protection",
    "PruneResult",
    "PrunedCheckpoint",
    "PublishedCheckpoint",
    "RecordRef",
    "Removed",
    "Repair",
    "Report",
    "Reshaped",
    "Result",
    "Retyped",
    "Sealed",
    "ShadowStatus",
    "ShardBlock",
    "SharedPacks",
    "SkippedCheckpoint",
    "SourceFile",
    "StateKeys",
    "StatePart",
    "Stats",
    "StepName",
    "StoreReads",
    "StoredCheckpoint",
    "Tensor",
    "TensorChange",
    "TensorDiff",
    "TensorStats",
    "Tip",
    "Trial",
    "ValueDiff",
    "Verification",
]
