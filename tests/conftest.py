"""Settings of all tests, and the zoo of real checkpoints. Shared arrays, checkpoints and strategies are in `held`."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from engines import launch
from engines.kinds import KINDS

collect_ignore_glob = ["*_jobs/*", "engines/*"]
"""Scripts for other processes: to look in them for doctests would import the engines here."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background, as some runners do; the programs that we start would ignore it, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "ckpt", deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
settings.load_profile("ckpt")


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of every kind that real DeepSpeed has trained.

    Set CKPT_ZOO to a folder to keep them between runs; otherwise they are made anew, in minutes.
    """
    kept = os.environ.get("CKPT_ZOO")
    out = Path(kept) if kept else tmp_path_factory.mktemp("zoo")
    launch.train(KINDS, out)
    return out


@pytest.fixture(scope="session")
def megatron_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `megatron_jobs.launch.save` puts kinds of runs of real Megatron, for all tests together.

    Set CKPT_MEGATRON to a folder to keep them between runs; otherwise they are made anew, in minutes.
    """
    kept = os.environ.get("CKPT_MEGATRON")
    return Path(kept) if kept else tmp_path_factory.mktemp("megatron")
