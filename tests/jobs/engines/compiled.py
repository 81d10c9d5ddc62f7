"""DeepSpeed operators which g++ builds at first use."""

from __future__ import annotations

import os
import sys

import deepspeed
import torch

from engines.kinds import Kind
from trained import locked

OPERATORS = f"operators-{deepspeed.__version__}-{torch.__version__}-{sys.implementation.cache_tag}"


def load(kind: Kind) -> None:
    """Build and load what the kind needs, in the process from which its ranks are forked: they find it loaded."""
    if kind.compiled:
        from deepspeed.accelerator import get_accelerator

        with locked(OPERATORS) as folder:
            os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)
            for stale in folder.glob("*/lock"):
                stale.unlink()  # of a build that was killed: torch waits for ever until somebody removes it
            builder = get_accelerator().create_op_builder(kind.compiled)
            # Symbols for a debugger, of all headers of torch, are 40 % of the time.
            flags = [flag for flag in builder.cxx_args() if flag != "-g"]
            builder.cxx_args = lambda: flags
            builder.load(verbose=False)
