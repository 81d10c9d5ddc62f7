"""Whether states of a checkpoint are stored encoded. For checkpoints of other formats, no codec is imported."""

from ckpt_formats.core.checkpoint import Checkpoint
from ckpt_formats.core.state_table import TabulatedParameters
from ckpt_formats.core.tensor import Blob


def uses_codecs(checkpoint: Checkpoint) -> bool:
    """Whether any state is stored encoded."""
    if isinstance(checkpoint.parameters, TabulatedParameters):
        return checkpoint.parameters.table.uses_codecs()
    blobs = [fragment.blob for _, _, tensor in checkpoint.tensors() for fragment in tensor.examples()]
    if not any(map(may_be_encoded, blobs)):
        return False
    from ckpt_formats.universal.chunked import EncodedBlob
    from ckpt_formats.universal.replay import DeltaBlob

    return any(isinstance(blob, (EncodedBlob, DeltaBlob)) for blob in blobs)


def may_be_encoded(blob: Blob) -> bool:
    """Whether a blob is of a class of the universal format, the only one that stores values encoded."""
    return type(blob).__module__.startswith("ckpt_formats.universal.")
