"""Measured settings of `subspace`, by the purpose of the checkpoints. docs/lossy-codecs.md has the figures."""

from ckpt_codecs.lossy.subspace import Subspace

PRESETS = {
    "resume": Subspace(step=1.0, octaves=2.0),
    "balanced": Subspace(step=2.0),
    "archive": Subspace(step=4.0),
    "standalone": Subspace(step=1.0, anchor_step=0.25, octaves=2.0),
}
