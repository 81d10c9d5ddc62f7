"""Settings of all tests, and the zoo of real checkpoints. Shared arrays, checkpoints and strategies are in `held`."""

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

# Workers of pytest share the cores: a thread that waits for others in a loop takes one from what it waits for.
# libgomp and OpenBLAS read these when torch and NumPy are imported, here and in what tests start.
os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "OPENBLAS_NUM_THREADS": "1"}

import pytest
from hypothesis import HealthCheck, settings

import collector
import durations
import megatron_jobs.launch
from ckpt_cli import notes
from ckpt_formats.core.gc_pause import gc_paused
from effort import EXAMPLES, QUICK_EXAMPLES, TIMES
from engines import launch
from engines.kinds import KINDS
from quick_cases import QuickCases, mark_others_slow
from trained import alone_in

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background, as some runners do; the programs that we start would ignore it, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Where this is set, every `ckpt` that a test starts would compile all modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

settings.register_profile(
    "ckpt",
    deadline=None,
    max_examples=EXAMPLES * TIMES,
    derandomize=TIMES == 1,  # a check that fails, fails again; campaigns look elsewhere each time
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.register_profile("quick", settings.get_profile("ckpt"), max_examples=QUICK_EXAMPLES)  # of `make quick`
settings.load_profile("ckpt")


SLOW_TESTS = durations.SlowTests.load()
LONGEST_FILES = durations.SlowTests.load(durations.LONGEST)


def pytest_configure(config: pytest.Config) -> None:
    """`make quick` fails where a test has become slow. Properties try more examples elsewhere."""
    if config.option.markexpr == durations.QUICK:
        config.pluginmanager.register(QuickCases(SLOW_TESTS), "quick-cases")
    if config.option.markexpr == durations.QUICK and config.getoption("--hypothesis-profile") == "quick":
        config.pluginmanager.register(durations.Stopwatch())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`make quick` does not even import a file that has no quick tests."""
    if config.option.markexpr != durations.QUICK or not collection_path.is_relative_to(durations.ROOT):
        return None
    slow = SLOW_TESTS.name_of(collection_path.relative_to(durations.ROOT).as_posix())
    return True if slow or durations.is_marked_slow(collection_path) else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """What collecting makes stays: to search it for garbage, again and again, took a sixth of the time."""
    with gc_paused():
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    collector.freeze_for_good()


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with long tests go first, the longest at once: one that begins last keeps a worker busy while others wait.

    Neighbours in the alphabet also wait for each other, while one of them trains what both read.
    """
    root, long = str(durations.ROOT), set()
    for item in items:
        name = item.nodeid
        if " at 0x" in name or root in name:
            raise pytest.UsageError(f"{name} has another name elsewhere: give its parameters `ids`")
        if SLOW_TESTS.name_of(name):
            item.add_marker("slow")
        if durations.is_slow(item):
            long.add(item.path)
    quick = config.pluginmanager.get_plugin("quick-cases")
    config.stash[durations.COLLECTED] = [item.nodeid for item in items] + (quick.omitted if quick else [])
    seconds = LONGEST_FILES.seconds
    items.sort(key=lambda item: (item.path not in long, -seconds.get(item.nodeid.partition("::")[0], 0.0)))
    mark_others_slow(items)


@pytest.fixture(autouse=True)
def _nothing_of_other_commands() -> None:
    """A process runs one command; tests run many in one."""
    notes.begin(as_json=False, verbose=False)


@pytest.fixture(scope="module", autouse=True)
def _environment_of_stores_as_before() -> Iterator[None]:
    """The tests of a file leave no store behind, which others would reach, or which would go when others use theirs."""
    before = _environment_of_stores()
    yield
    assert _environment_of_stores() == before


def _environment_of_stores() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "CKPT_"))
    }


@pytest.fixture(scope="session")
def zoo() -> Path:
    """The folder of every kind that real DeepSpeed has trained."""
    with alone_in("engines") as folder:
        launch.train(KINDS, folder)
    return folder


@pytest.fixture(scope="session")
def megatron_folder() -> Path:
    """The folder of every kind of run of real Megatron."""
    with alone_in("megatron_jobs") as folder:
        megatron_jobs.launch.save(megatron_jobs.launch.KINDS, folder)
    return folder
