"""DeepSpeed operators which g++ builds at first use."""

from __future__ import annotations

from engines.kinds import Kind


def load(kind: Kind) -> None:
    """Build and load what the kind needs, in the process from which its ranks are forked: they find it loaded."""
    if kind.compiled:
        from deepspeed.accelerator import get_accelerator

        get_accelerator().create_op_builder(kind.compiled).load(verbose=False)
