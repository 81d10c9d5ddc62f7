"""Python imports this at its start, in every process that a test starts while faults are measured."""

import os

if "CKPT_FAULTS" in os.environ:
    import fault_switch

    fault_switch.install(os.environ["CKPT_FAULTS"])
