"""What a run imports: little for `--help`, and never an engine, torch or pickle."""

import ast
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckpt import job
from damage import SAMPLES, ckpt
from durations import slowness

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "numpy", "rich", "jinja2", "ml_dtypes", "xxhash", "isal", "json", "tomllib", "importlib.metadata"}
ENGINES = {"torch", "deepspeed", "megatron", "transformers", "safetensors", "cloudpickle", "dill", "pandas"}

REPORT = """
import atexit, json, os, sys
{blocker}
atexit.register(lambda: open({report!r}, "w").write(json.dumps(sorted(sys.modules))))
from ckpt_cli.main import run
for arguments in {runs!r}:
    sys.argv = ["ckpt", *arguments]
    try:
        run()
    except SystemExit as end:
        assert not end.code, arguments
"""
BLOCKER = """
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ImportError(f"{{name}} is not to be imported")
sys.meta_path.insert(0, Blocker())
"""


def run_python(code: str, *more: str, **env: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *more, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, timeout=60
    )


def imported_by(tmp_path: Path, *arguments: str) -> set[str]:
    return imported_by_all(tmp_path, [list(arguments)], set())


def imported_by_all(tmp_path: Path, runs: list[list[str]], blocked: set[str]) -> set[str]:
    """By commands that one process runs, one after another."""
    report = tmp_path / "modules.json"
    blocker = BLOCKER.format(blocked=sorted(blocked)) if blocked else ""
    done = run_python(REPORT.format(blocker=blocker, report=str(report), runs=runs))
    assert done.returncode == 0, done.stderr
    return set(json.loads(report.read_text()))


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_commands_without_a_checkpoint_import_next_to_nothing(arguments: list[str], tmp_path: Path) -> None:
    report = tmp_path / "modules.json"
    code = REPORT.format(blocker="", report=str(report), runs=[arguments]).replace("json.dumps(sorted", "str(sorted")
    done = run_python(code.replace("atexit, json,", "atexit,"))
    assert done.returncode == 0, done.stderr
    modules = set(eval(report.read_text()))
    assert not modules & HEAVY
    assert not {name for name in modules if name.startswith("ckpt_cli.commands")}
    bare = run_python("import sys; print(len(sys.modules))")
    assert len(modules) - int(bare.stdout) < 115


PLAIN = {
    "deepspeed-0.19-zero1-bf16-dp2": {"deepspeed"},
    "deepspeed-0.19-zero3-bf16-dp4-tied-frozen": {"deepspeed"},
    "ds_to_universal-0.19-zero1-bf16-dp2": {"deepspeed"},
    "megatron-0.16-tp2-pp2-dist": {"megatron", "dcp"},
    "megatron-0.16-tp2-pp2-legacy": {"megatron"},
    "dcp-2.13-fsdp2-w2": {"dcp"},
    "dcp-2.2-fsdp1-w2": {"dcp"},
    "transformers-5.23-trainer": set(),
    "transformers-5.23-trainer/model.safetensors": {"safetensors"},
    "universal-1-plain": set(),
}
"""Samples of all formats whose states are not coded, and the engines that are needed to read each."""
OF_CHAINS_AND_WRITERS = {
    *("ckpt_formats.universal.chain.chain_file", "ckpt_formats.universal.boxes.whole", "ckpt_formats.core.views"),
    *("ckpt_formats.core.transfer", "concurrent.futures", "logging", "tempfile", "difflib", "numpy.typing"),
    *("shutil", "lzma", "bz2"),
}
"""What a checkpoint without parents does not need until its values are read."""


@pytest.mark.parametrize("sample", PLAIN)
def test_inspect_imports_the_format_at_the_path_and_no_codec(sample: str, tmp_path: Path) -> None:
    """But one: a copy that is its master rounded has the codec `rounded`, which loads no kernels to compare a few."""
    modules = imported_by(tmp_path, "inspect", str(SAMPLES / sample))
    assert not {name.partition(".")[0] for name in modules} & {"torch", "rich", "zstandard"}
    assert "numpy.ma" not in modules
    codecs = {name.partition(".")[2] for name in modules if name.startswith("ckpt_codecs.")}
    assert codecs <= {"base", "errors", "scratch", "registry", "lossless", "lossless.rounded"}
    engines = {name.split(".")[2] for name in modules if name.startswith("ckpt_formats.engines.")}
    assert engines - {"hf"} == PLAIN[sample]  # a trainer of Hugging Face may have written files around any folder
    if sample == "universal-1-plain":
        assert not modules & OF_CHAINS_AND_WRITERS
        assert len(modules) < 370


SELDOM = {
    f"ckpt_formats.{module}"
    for module in (
        *("registry.seal_file", "registry.plugins", "core.value_changes", "core.name_patterns", "core.prefetch"),
        *("containers.shard_index", "containers.contents", "core.evidence", "core.seal_checks", "core.coverage"),
        *("engines.fsdp_ranks.dtensor", "containers.torchfile_tree"),
    )
}
"""What few checkpoints need, or only reading or writing their values."""


def test_inspect_of_a_torch_file_imports_no_module_that_it_does_not_need(tmp_path: Path) -> None:
    sample = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
    file = next(sample.rglob("mp_rank_00_model_states.pt"))
    (tmp_path / "model.pt").write_bytes(file.read_bytes())
    runs = [["inspect", str(tmp_path / "model.pt")], ["inspect", str(sample)]]
    assert not imported_by_all(tmp_path, runs, set()) & SELDOM


@pytest.mark.parametrize("sample", ["universal-1-coded", "universal-1-delta", "recorded-1/run.chain"])
def test_inspect_of_coded_states_imports_no_zstandard(sample: str, tmp_path: Path) -> None:
    """Rich draws the table of their sizes."""
    modules = imported_by(tmp_path, "inspect", str(SAMPLES / sample))
    assert not {name.partition(".")[0] for name in modules} & {"torch", "zstandard"}
    assert not {
        name for name in modules if name.startswith(("numpy.ma.", "rich.progress", "rich.markdown", "pygments"))
    }


def test_log_imports_no_codec_of_gradients_and_no_optimizer(tmp_path: Path) -> None:
    modules = imported_by(tmp_path, "log", str(SAMPLES / "universal-1-delta"))
    assert not {name.partition(".")[0] for name in modules} & {"torch", "zstandard"}
    unused = (
        "ckpt_codecs.gradients",
        "ckpt_codecs.optimizers",
        "ckpt_formats.universal.gradients",
        "ckpt_formats.engines",
    )
    assert not [name for name in modules if name.startswith(unused)]


def test_the_command_sets_the_collector_and_the_library_does_not() -> None:
    source = str(SAMPLES / "deepspeed-0.19-zero1-bf16-dp2")
    code = (
        "import gc, sys\n"
        "def collector(): return gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()\n"
        "before = collector()\n"
        f"import ckpt; ckpt.open({source!r})\n"
        "assert collector() == before\n"
        f"sys.argv = ['ckpt', 'inspect', {source!r}]\n"
        "from ckpt_cli.main import run\n"
        "try: run()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert gc.isenabled() and gc.get_threshold()[0] > before[1][0] and gc.get_freeze_count() > 10_000\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_numpy_of_the_command_starts_no_threads() -> None:
    """Tests say so in the environment, which users do not."""
    code = (
        "import os, sys\n"
        "del os.environ['OPENBLAS_NUM_THREADS'], os.environ['OMP_NUM_THREADS']\n"
        f"sys.argv = ['ckpt', 'inspect', {str(SAMPLES / 'universal-1-plain')!r}]\n"
        "from ckpt_cli.main import run\n"
        "try: run()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'numpy' in sys.modules and len(os.listdir('/proc/self/task')) == 1\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


INTERRUPT = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
signal.signal(signal.SIGINT, {handler})
sys.argv = ["ckpt", "inspect", {source!r}]
from ckpt_cli.__main__ import start
start()
"""


@pytest.mark.parametrize(
    ("module", "handler", "code"),
    [
        ("click", "signal.default_int_handler", 130),
        ("numpy._core._multiarray_umath", "signal.default_int_handler", 130),
        ("ml_dtypes._ml_dtypes_ext", "signal.default_int_handler", 130),
        ("click", "signal.SIG_IGN", 0),
    ],
)
def test_ctrl_c_in_an_import_ends_in_silence_unless_the_parent_process_ignores_it(
    module: str, handler: str, code: int
) -> None:
    source = str(SAMPLES / "universal-1-plain")
    done = run_python(INTERRUPT.format(module=module, handler=handler, source=source))
    assert (done.returncode, done.stderr, bool(done.stdout)) == (code, "", code == 0)


def test_a_plan_from_options_imports_no_numpy(tmp_path: Path) -> None:
    run = ("--step", "0.8s", "--mtbf", "3h", "--stall", "20s", "--replay", "40ms")
    modules = imported_by(tmp_path, "plan", *run)
    assert not {name.partition(".")[0] for name in modules} & {"numpy", "rich", "torch", "xxhash", "ckpt_codecs"}


@pytest.mark.parametrize("command", ["convert", "inspect", "verify"])
def test_the_help_of_a_command_imports_no_numpy(command: str, tmp_path: Path) -> None:
    modules = imported_by(tmp_path, command, "--help")
    assert not modules & {"numpy", "ml_dtypes", "rich", "torch", "xxhash"}


@pytest.mark.slow
def test_help_answers_in_a_moment() -> None:
    def seconds() -> float:
        """Of a processor, however busy it is with other things."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-m", "ckpt_cli", "--help"], capture_output=True, timeout=60)
        assert done.returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(5)) / slowness() < 0.15


@pytest.mark.parametrize("sample", sorted(p.name for p in SAMPLES.glob("deepspeed-*")))
@pytest.mark.slow
def test_a_real_checkpoint_is_opened_without_any_engine(sample: str, tmp_path: Path) -> None:
    """With a blocker in front of all imports, so that what is tried and forgiven shows as well."""
    source = str(SAMPLES / sample)
    runs = [
        ["inspect", source],
        ["verify", source],
        ["convert", source, str(tmp_path / "universal")],
        ["convert", source, str(tmp_path / "model.pt"), "--to", "torch"],
        ["convert", source, str(tmp_path / "hf"), "--to", "safetensors"],
        ["inspect", str(tmp_path / "universal"), "--json"],
        ["verify", str(tmp_path / "model.pt")],
        ["verify", str(tmp_path / "hf")],
        ["convert", str(tmp_path / "universal"), str(tmp_path / "again.pt"), "--to", "torch"],
    ]
    modules = imported_by_all(tmp_path, runs, ENGINES)
    assert not {name.partition(".")[0] for name in modules} & ENGINES


def test_pickle_is_imported_by_numpy_at_most(tmp_path: Path) -> None:
    """NumPy imports it; we never do, so none is left when NumPy's own is taken away."""
    source = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
    code = (
        "import sys, numpy, ml_dtypes, multiprocessing\n"
        "for name in ('pickle', '_pickle'): sys.modules.pop(name, None)\n"
        f"sys.argv = ['ckpt', 'convert', {str(source)!r}, {str(tmp_path / 'out')!r}]\n"
        "from ckpt_cli.main import run\n"
        "try: run()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'pickle' not in sys.modules and '_pickle' not in sys.modules\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "manifest.json").is_file()


def test_no_folder_shadows_the_standard_library() -> None:
    assert not (ROOT / "codecs" / "__init__.py").exists()
    assert not (ROOT / "formats" / "__init__.py").exists()
    code = "import codecs, encodings; print(codecs.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": "."}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent != ROOT / "codecs"
    assert "codecs.py" in done.stdout


def test_a_conversion_that_codes_nothing_does_not_ask_for_the_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requests: list[bool] = []
    monkeypatch.setattr(job, "load_kernels", lambda: requests.append(True))
    source = SAMPLES / "deepspeed-0.19-zero1-bf16-dp2"
    assert ckpt("convert", source, tmp_path / "plain").code == 0
    assert requests == []
    assert ckpt("compress", source, tmp_path / "coded").code == 0
    assert requests == [True]


# The library


def names_in(path: Path) -> Iterator[str]:
    """What a module calls or takes from others, with dots: `print`, `os.environ`, `click`."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize(
    "path", sorted((ROOT / "formats" / "ckpt").rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_library_does_not_print_exit_or_read_the_environment(path: Path) -> None:
    used = {name for full in names_in(path) for name in (full, full.partition(".")[0])}
    assert not used & {
        "print",
        "input",
        "exit",
        "quit",
        "SystemExit",
        "sys.exit",
        "sys.stdout",
        "sys.stderr",
        "sys.argv",
    }
    assert not used & {"os.environ", "os.environb", "os.getenv", "os._exit", "os.abort", "os.putenv"}
    assert not used & {"click", "rich", "torch", "logging", "warnings"}


def test_the_library_opens_a_checkpoint_without_click_rich_and_torch() -> None:
    code = (
        "import sys, ckpt\n"
        "assert 'numpy' not in sys.modules\n"
        "for path in sys.argv[1:]:\n"
        "    assert len(ckpt.open(path)) > 0\n"
        "names = {name.partition('.')[0] for name in sys.modules}\n"
        "print(sorted(names & {'click', 'rich', 'torch', 'ckpt_cli', 'safetensors', 'transformers', 'deepspeed'}))"
    )
    sources = [next(SAMPLES.glob(pattern)) for pattern in ("deepspeed-*-zero1-bf16-dp2", "dcp-*")]
    done = subprocess.run([sys.executable, "-c", code, *map(str, sources)], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
