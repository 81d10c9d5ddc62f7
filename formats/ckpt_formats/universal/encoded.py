"""Which states of a checkpoint are stored encoded, and by which codecs."""

from ckpt_codecs.delta import DeltaCodec
from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.universal.chunked import EncodedBlob
from ckpt_formats.universal.replay import DeltaBlob, stored_delta


def uses_codecs(checkpoint: Checkpoint) -> bool:
    """Whether any state is stored encoded."""
    return any(
        isinstance(f.blob, (EncodedBlob, DeltaBlob)) for _, _, tensor in checkpoint.tensors() for f in tensor.examples()
    )


def delta_codecs(checkpoint: Checkpoint) -> list[DeltaCodec]:
    """The codecs by which the deltas of a checkpoint are decoded: one of each name."""
    blobs = (f.blob for _, _, tensor in checkpoint.tensors() for f in tensor.examples())
    return list({delta.codec.name: delta.codec for blob in blobs if (delta := stored_delta(blob)) is not None}.values())
