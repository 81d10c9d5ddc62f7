"""Measured settings of `subspace`, by the purpose of the checkpoints. docs/lossy-codecs.md has the figures."""

from ckpt_codecs.lossy.subspace import Subspace

PRESETS = {
    "resume": Subspace(step_size=1.0, second_octaves=2.0),
    "balanced": Subspace(step_size=2.0),
    "archive": Subspace(step_size=4.0),
    "standalone": Subspace(step_size=1.0, base_step_size=0.25, second_octaves=2.0),
}
