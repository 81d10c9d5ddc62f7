"""The first bytes of files that ckpt reads, whatever their endings say."""

import re
from collections.abc import Collection

HEAD_NBYTES = 512
"""How many bytes of a file suffice: tar states itself at byte 257."""

TAR = re.compile(rb".{257}ustar", re.DOTALL)
ZIP = re.compile(rb"PK\x03\x04")
PICKLE = re.compile(rb"\x80[\x00-\x05]")
SAFETENSORS = re.compile(rb".{4}\0{4}[{]", re.DOTALL)
"""The length of a header in 8 bytes, then JSON. The limit of a header, 100 MB, leaves the upper bytes zero."""

STAND_IN = re.compile(rb"\s*(version https://git-lfs|<(!doctype )?html|<\?xml)|\0{64}", re.IGNORECASE)
"""What stands for a file: a pointer of Git LFS, the answer of a server, zeros. `contents` names each."""
_TORCH_BEFORE_ZIP = re.compile(rb"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19")
"""How files of torch.save began before version 1.6: its magic number, pickled."""


def holds_tensors(head: bytes) -> bool:
    """Whether a file is by its first bytes of a kind in which programs save tensors."""
    if ZIP.match(head) or PICKLE.match(head) or SAFETENSORS.match(head):
        return True
    return re.match(rb"\x89HDF|GGUF|\x93NUMPY", head) is not None


def is_file_inside(head: bytes) -> bool:
    """Whether bytes inside a file begin as a file with tensors does. A pickle there is an object of the run.

    Data loaders, for example, keep their states as pickles; only files of torch.save before 1.6 are pickles, too.
    """
    return holds_tensors(head) and (PICKLE.match(head) is None or _TORCH_BEFORE_ZIP.match(head) is not None)


def is_npz(names: Collection[str]) -> bool:
    """Whether an archive with members of these names is one of `numpy.savez`."""
    return bool(names) and all(name.endswith(".npy") for name in names)


def is_stable_baselines(names: Collection[str]) -> bool:
    """Whether an archive with members of these names is a model of Stable-Baselines3."""
    return "policy.pth" in names
