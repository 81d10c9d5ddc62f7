"""DeepSpeed's operators for CPUs, which g++ builds at first use.

DeepSpeed would build each by itself, of two sources that both read every header of torch: a minute of a processor an
operator. Here its sources of all three are one source, with the few headers that they need: 20 seconds for all.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import shutil
import sys
from functools import cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import cpuinfo
import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from engines.kinds import COMPILED, Kind
from trained import locked

_SOURCE = """\
#include <torch/extension.h>
#include <algorithm>
#include <cassert>
#include <cmath>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <type_traits>
#include <unordered_map>

#include "csrc/adam/cpu_adam_impl.cpp"
#undef TORCH_EXTENSION_NAME
#define TORCH_EXTENSION_NAME cpu_adam
#include "csrc/adam/cpu_adam.cpp"
#undef TORCH_EXTENSION_NAME
#define TORCH_EXTENSION_NAME fused_adam
#include "csrc/cpu/adam/fused_adam.cpp"

#undef STEP
namespace lion {
#undef TORCH_EXTENSION_NAME
#define TORCH_EXTENSION_NAME cpu_lion
#include "csrc/lion/cpu_lion_impl.cpp"
#include "csrc/lion/cpu_lion.cpp"
}
"""
"""Both Adams share their table of optimizers, so a process uses one of them. Lion's functions have Adam's names."""
_HEADER = """\
#pragma once
#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>
namespace torch {
using namespace at;
constexpr auto kFloat32 = at::kFloat;
}
"""
"""In place of torch's `extension.h`, which takes three times as long as all of the rest."""


def _instructions() -> str:
    """What `-march=native` compiles for: a processor that has others does not run it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


_STATE = hashlib.sha256((_SOURCE + _HEADER + _instructions()).encode()).hexdigest()[:8]
OPERATORS = f"operators-{deepspeed.__version__}-{torch.__version__}-{sys.implementation.cache_tag}-{_STATE}"


def load(kind: Kind) -> None:
    """Build and load what the kind needs, in the process from which its ranks are forked: they find it loaded."""
    if kind.autotp:
        importlib.import_module("transformers.cache_utils")  # as each rank would, to look for its caches in batches
    if kind.compiled:
        cpuinfo.get_cpu_info = cache(cpuinfo.get_cpu_info)  # a second each time, and each optimizer asks
        cpuinfo.get_cpu_info()
        builder = get_accelerator().create_op_builder(kind.compiled)
        type(builder)._loaded_ops[builder.name] = _module(builder.name, _library())


@cache
def _library() -> Path:
    """The library of all operators, built by whichever process needs it first."""
    with locked(OPERATORS) as folder:
        library, begun = folder / "operators.so", folder / "begun"
        if not library.exists():
            shutil.rmtree(begun, ignore_errors=True)  # of a build that was killed
            (begun / "torch").mkdir(parents=True)
            (begun / "torch" / "extension.h").write_text(_HEADER)
            (begun / "operators.cpp").write_text(_SOURCE)
            _build(begun)
            (begun / library.name).rename(library)
            shutil.rmtree(begun)
    return library


def _build(folder: Path) -> None:
    """Build `operators.so` with DeepSpeed's flags, but for symbols for a debugger."""
    from torch.utils.cpp_extension import load as build

    builders = [get_accelerator().create_op_builder(name) for name in COMPILED.values()]
    operators = Path(deepspeed.__file__).parent / "ops"
    (flags,) = {tuple(flag for flag in builder.cxx_args() if flag and flag != "-g") for builder in builders}
    headers = {str(operators / path) for builder in builders for path in builder.include_paths()}
    os.environ["MAX_JOBS"] = "1"
    build(
        "operators",
        [str(folder / "operators.cpp")],
        extra_include_paths=[str(folder), *sorted(headers), str(operators)],
        extra_cflags=[*flags, "-UC10_USE_GLOG"],
        build_directory=str(folder),
        is_python_module=False,
    )


def _module(name: str, library: Path) -> ModuleType:
    loader = ExtensionFileLoader(name, str(library))
    spec = spec_from_loader(name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module
