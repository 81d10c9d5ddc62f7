"""The packages that ckpt uses: which are installed, and what each is for."""

import shlex
import sys
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec

_EXTRAS = "pip install 'ckpt-suite[{}]'"


@dataclass(frozen=True)
class Package:
    """A package of others, by the name that pip knows."""

    name: str
    version: str | None
    """None: it is missing, or does not say."""
    feature: str
    """What it is for."""
    remedy: str
    """The command that installs it."""
    needed: bool
    """Whether ckpt does not work without it."""
    problem: str | None
    """Why it cannot be used; None if it can."""


NEEDED = {
    "click": ("click", "the command line"),
    "isal": ("isal", "checksums"),
    "jinja2": ("jinja2", "pages: --html"),
    "ml-dtypes": ("ml_dtypes", "bfloat16 and float8"),
    "numpy": ("numpy", "all values"),
    "rich": ("rich", "tables and progress"),
    "xxhash": ("xxhash", "checksums"),
    "zstandard": ("zstandard", "coded checkpoints"),
}
"""By the name that pip knows: the module, and what it is for."""

OPTIONAL = {
    "obstore": ("obstore", "checkpoints in stores: s3://, gs://, az://", _EXTRAS.format("cloud")),
    "boto3": ("boto3", "the profiles in ~/.aws, for s3://", "pip install boto3"),
    "distributed": ("distributed", "workers of Dask: --executor dask://", _EXTRAS.format("dask")),
    "huggingface_hub": ("huggingface_hub", "models on the hub: hf://", _EXTRAS.format("hf")),
    "ray": ("ray", "workers of Ray: --executor ray://", _EXTRAS.format("ray")),
    "torch": (
        "torch",
        "loading into jobs, saving and recording them, and replay by torch's own optimizer",
        _EXTRAS.format("training"),
    ),
}
"""Likewise, with the command that installs it."""


def find_packages() -> tuple[Package, ...]:
    """All packages, the needed ones first. Those are imported, the others only located: torch takes seconds."""
    # Without NumPy, ml_dtypes itself would print a traceback.
    only_located = ("ml_dtypes",) if _import_problem("numpy") else ()
    needed = [
        _package(
            name,
            feature,
            f"pip install {shlex.quote(name)}",
            True,
            _location_problem(module) if module in only_located else _import_problem(module),
        )
        for name, (module, feature) in sorted(NEEDED.items())
    ]
    optional = [
        _package(name, feature, remedy, False, _location_problem(module))
        for name, (module, feature, remedy) in sorted(OPTIONAL.items())
    ]
    return (*needed, *optional)


def find_version(name: str) -> str | None:
    """The version of an installed package; None if there is none."""
    try:
        return metadata.version(name)
    except Exception:  # metadata of others may be missing or broken in any way
        return None


def _package(name: str, feature: str, remedy: str, needed: bool, reason: str | None) -> Package:
    problem = None if reason is None else f"the package {name} {reason}"
    version = find_version(name) if problem is None else None
    return Package(name, version, feature, remedy, needed, problem)


def _import_problem(module: str) -> str | None:
    try:
        import_module(module)
    except Exception as error:  # a broken package raises anything
        return "is missing" if isinstance(error, ModuleNotFoundError) else f"is broken ({type(error).__name__})"
    return None


def _location_problem(module: str) -> str | None:
    try:
        is_installed = module in sys.modules or find_spec(module) is not None
    except Exception:
        is_installed = False
    return None if is_installed else "is not installed"
