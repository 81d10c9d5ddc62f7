"""Formats by name, and the checkpoint at a path. To add a format: write its module, and add its line to `FORMATS`.
Installed packages add further ones (`plugins`).

The values are import paths, not classes, so that the list of names imports nothing.
The order is the order of detection: specific formats first.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ckpt_formats.core.errors import InvalidArgumentError, UnsupportedError
from ckpt_formats.core.text import printable

if TYPE_CHECKING:
    from ckpt_formats.core.format import Format, WritableFormat

FORMATS: dict[str, str] = {
    "universal": "ckpt_formats.universal:Universal",
    "chain": "ckpt_formats.universal.chain.format:ChainFormat",
    "deepspeed-universal": "ckpt_formats.engines.deepspeed.universal:DeepSpeedUniversal",
    "megatron": "ckpt_formats.engines.megatron:MegatronDist",
    "megatron-legacy": "ckpt_formats.engines.megatron:MegatronLegacy",
    "deepspeed": "ckpt_formats.engines.deepspeed:DeepSpeed",
    "torchtune": "ckpt_formats.engines.torchtune:Torchtune",
    "fairseq2": "ckpt_formats.engines.fairseq2:Fairseq2",
    "hf": "ckpt_formats.engines.hf:HuggingFace",
    "fsdp-ranks": "ckpt_formats.engines.fsdp_ranks:FsdpRanks",
    "dcp": "ckpt_formats.engines.dcp:DCP",
    "safetensors": "ckpt_formats.engines.safetensors:Safetensors",
    "flax": "ckpt_formats.engines.flax:Flax",
    "numpy": "ckpt_formats.engines.npz:NumPy",
    "stable-baselines3": "ckpt_formats.engines.stable_baselines3:StableBaselines3",
    "tar": "ckpt_formats.engines.tar:Tar",
    "torch": "ckpt_formats.engines.torch_save:Torch",
    "torch-folder": "ckpt_formats.engines.torch_folder:TorchFolder",
}
ONLY_READ = ("chain", "fairseq2", "fsdp-ranks", "numpy", "stable-baselines3", "tar", "torchtune", "torch-folder")
"""Formats that cannot be written. `writable` knows them too, but imports the format to find out."""


def format_named(name: str) -> "Format":
    """The format of this name, which is one of ckpt or of an installed package.

    Raises `InvalidArgumentError` if there is none, `UnsupportedError` if the package that provides it is broken.
    """
    if name not in FORMATS:
        from ckpt_formats.registry.plugins import plugins

        provided = plugins()
        if name not in provided:
            names = ", ".join(name for name in (*FORMATS, *provided) if name not in ONLY_READ)
            raise InvalidArgumentError(f"there is no format {printable(name[:60])}", hint=f"Formats are {names}.")
        return provided[name].load()
    module, _, attribute = FORMATS[name].partition(":")
    format: Format = getattr(import_module(module), attribute)()
    return format


def writable(name: str, **options: object) -> "WritableFormat":
    """The format of this name, for writing.

    Raises `UnsupportedError` if it can only be read, `InvalidArgumentError` if it lacks an option, and as
    `format_named`.
    """
    from dataclasses import fields, replace

    from ckpt_formats.core.format import WritableFormat

    format = format_named(name)
    if not isinstance(format, WritableFormat):
        hint = "Convert to `universal`, which holds everything."
        if name == "chain":
            hint = "`ckpt append CHAIN CHECKPOINT` writes chains."
        raise UnsupportedError(f"{name} can be read, not written", hint=hint)
    known = [field.name for field in fields(format)]
    listed = ", ".join(known) or "none"
    if unknown := [option for option in options if option not in known]:
        raise InvalidArgumentError(f"format {name} has no option {unknown[0]}", hint=f"Its options: {listed}.")
    return replace(format, **options)
