"""Each command's JSON has the form that docs/json.md states: every field, and no other; errors too."""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from ckpt_cli.main import COMMANDS
from damage import SAMPLES, ckpt
from published import PublishedRun

DOCS = Path(__file__).parents[2] / "docs"
SCHEMAS = runpy.run_path(str(DOCS / "make_json.py"))["schemas"]()["$defs"]
ZERO1, DELTAS, TRAINER = (
    SAMPLES / name for name in ("deepspeed-0.19-zero1-bf16-dp2", "universal-1-delta", "transformers-5.23-trainer")
)


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a chain, a recorded run, two small models and an adapter."""
    save_file = pytest.importorskip("safetensors.numpy").save_file
    folder = tmp_path_factory.mktemp("json")
    shutil.copytree(DELTAS, folder / "run.chain")
    shutil.copytree(SAMPLES / "recorded-1" / "run.chain", folder / "recorded.chain")
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    published = PublishedRun(folder / "published.chain", {"weight": weight})
    published.publish(1, {"weight": weight})
    published.publish(2, {"weight": weight + 1})
    for name in ("a", "b"):
        save_file({"layer.weight": weight, "layer.bias": weight[0]}, folder / f"{name}.safetensors")
        (step := folder / "run" / f"step-{len(name) + (name == 'b')}").mkdir(parents=True)
        save_file({"layer.weight": weight}, step / "model.safetensors")
        for path in (step / "model.safetensors", step):
            os.utime(path, (1_700_000_000, 1_700_000_000))
    (folder / "adapter").mkdir()
    prefix = "base_model.model.layer"
    pair = {f"{prefix}.lora_A.weight": weight[:2], f"{prefix}.lora_B.weight": weight[:, :2].copy()}
    save_file(pair, folder / "adapter" / "adapter_model.safetensors")
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return folder


RUNS: dict[str, list[list[Any]]] = {
    "convert": [[ZERO1, "u"], [ZERO1, "x", "--dry-run"], ["b.safetensors", "c.safetensors", "--seal"]],
    "reshard": [[ZERO1, "r", "--dp", "1"], [ZERO1, "x", "--dp", "1", "--dry-run"]],
    "inspect": [["u"], [TRAINER], ["run.chain@12"], ["recorded.chain"], [SAMPLES / "damaged"],
                ["u", "a.safetensors", "run.chain@12"]],
    "latest": [["run.chain"], [SAMPLES / "damaged"]],
    "verify": [["u"], ["run.chain"], ["recorded.chain"], ["published.chain"], ["--quick", "u"], ["u", "a.safetensors"],
               [SAMPLES / "damaged" / "flipped-bit"], [SAMPLES / "damaged" / "truncated-shard"]],
    "extract": [["a.safetensors", "layer.bias"], ["a.safetensors", "layer.weight[0:2]", "w.npy"]],
    "check": [["a.safetensors", "--like", "b.safetensors"], ["u", "--like", "a.safetensors"]],
    "stats": [["a.safetensors"], ["run.chain@11", "--by", "role"], ["u", "--by", "state"]],
    "rules": [["u"], [SAMPLES / "megatron-0.16-tp2-pp2-dist"]],
    "diff": [["run.chain@10", "run.chain@11", "--by", "layer", "--by", "state"], ["u", ZERO1],
             ["run.chain@10", "run.chain@11", "run.chain@12", "--by", "tensor"], ["u", ZERO1, "--table"],
             ["run.chain@11", "run.chain@12", "-o", "d"], ["run.chain@11", "run.chain@12", "-o", "e", "--dry-run"]],
    "append": [["new.chain", "run.chain@10"], ["new.chain", "run.chain@11", "--dry-run"],
               ["new.chain", "run.chain@13"], ["several.chain", "run.chain@10", "run.chain@11"],
               ["models.chain", "a.safetensors", "--family"], ["models.chain", "u", "--name", "other"],
               ["models.chain", "run/step-2", "--name", "tuned", "--dry-run"]],
    "publish": [["a.safetensors", "policy.chain", "--names", "as-is", "--step", "1", "--dry-run"],
                ["a.safetensors", "policy.chain", "--names", "as-is", "--step", "1"],
                ["b.safetensors", "policy.chain", "--names", "as-is", "--step", "2"]],
    "follow": [["published.chain", "served", "--once"], ["published.chain", "served", "--once"]],
    "restore": [["run.chain", "s"], ["run.chain", "x", "--dry-run"], ["recorded.chain", "x", "--dry-run"]],
    "shadow": [["recorded.chain", "--once"], ["recorded.chain", "--once", "-o", "sh"]],
    "serve": [],
    "hold": [],
    "log": [["run.chain"], ["recorded.chain"], ["published.chain"], ["models.chain"]],
    "plan": [["--step", "0.8s", "--mtbf", "3h", "--stall", "20s", "--replay", "40ms"],
             ["--step", "0.8s", "--mtbf", "3h", "--state", "84GB", "--write", "2GB/s"],
             ["--step", "0.8s", "--mtbf", "3h", "--state", "84GB", "--stall", "1s", "--hosts", "16"],
             ["recorded.chain", "--step", "0.8s", "--mtbf", "3h", "--stall", "20s", "--replay-rate", "250M"]],
    "average": [["a.safetensors", "b.safetensors", "m.pt"], ["a.safetensors", "b.safetensors", "x", "--dry-run"]],
    "merge": [["a.safetensors", "b.safetensors", "s.pt", "--method", "slerp", "--t", "0.5"],
              ["a.safetensors", "b.safetensors", "x", "--method", "linear", "--dry-run"]],
    "merge-lora": [["a.safetensors", "adapter", "l.safetensors"], ["a.safetensors", "adapter", "x", "--dry-run"]],
    "compress": [["u", "c"], ["u", "x", "--dry-run"]],
    "decompress": [["c", "back"], ["c", "x", "--dry-run"]],
    "doctor": [[], ["u"]],
    "commit": [["u"]],
    "copy": [["u", "copied"], ["u", "x", "--dry-run"]],
    "seal": [["a.safetensors", "--dry-run"], ["a.safetensors"]],
    "watch": [],
    "index": [[SAMPLES / "dcp-2.13-fsdp2-w2"]],
    "protect": [["u", "--dry-run"], ["copied", "--lose", "1"]],
    "repair": [["copied", "--dry-run"], ["copied"]],
    "prune": [["run", "--keep", "last:1", "--dry-run"]],
    "clean": [["x"]],
    "formats": [[], ["--families"]],
    "completion": [["fish"]],
    "compact": [["models.chain", "--remove", "other", "--dry-run"], ["models.chain", "--remove", "other"],
                ["run.chain", "--keep", "last:2", "--dry-run"], ["run.chain", "--keep", "last:2"],
                ["recorded.chain", "--dry-run"]],
}  # fmt: skip
"""In the order in which they are run: some need what others wrote."""

WRONG: dict[str, list[Any]] = {
    "convert": ["gone", "x"],
    "copy": ["gone", "x"],
    "reshard": [ZERO1, "x", "--dp", "0"],
    "inspect": ["gone"],
    "latest": ["gone"],
    "verify": ["gone"],
    "extract": ["a.safetensors", "gone"],
    "check": ["gone", "--like", "gone"],
    "stats": ["gone"],
    "rules": ["gone"],
    "diff": ["gone", "gone"],
    "append": ["run.chain", "gone"],
    "publish": ["gone", "policy.chain"],
    "follow": ["gone", "x", "--once"],
    "restore": ["run.chain", "x", "--step", "99"],
    "shadow": ["gone", "--once"],
    "serve": ["gone", "--listen", "127.0.0.1:0"],
    "hold": ["--status", "127.0.0.1:1"],
    "log": ["gone"],
    "plan": [],
    "average": ["a.safetensors", "x"],
    "merge": ["a.safetensors", "b.safetensors", "x", "--method", "slerp"],
    "merge-lora": ["a.safetensors", "b.safetensors", "x"],
    "compress": ["gone", "x"],
    "decompress": ["gone", "x"],
    "doctor": ["gone"],
    "commit": ["gone"],
    "seal": ["gone"],
    "index": ["a.safetensors"],
    "protect": ["gone"],
    "repair": ["gone"],
    "watch": ["run", "run/copies", "--once"],
    "prune": ["gone", "--keep", "last:1"],
    "clean": [],
    "formats": ["too many"],
    "completion": ["tcsh"],
    "compact": ["gone"],
}


def check(name: str, report: dict[str, Any]) -> None:
    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(report)


def test_all_commands_are_run_and_stated() -> None:
    sys.path.insert(0, str(DOCS))
    from make_json import COMMANDS as STATED

    assert set(RUNS) == set(WRONG) == set(COMMANDS) == set(STATED)
    assert SCHEMAS.keys() == {"error", *(name for name, parts in STATED.items() if parts)}
    for schema in SCHEMAS.values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.slow
def test_every_result_has_its_form(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One test, because commands need what others wrote."""
    monkeypatch.chdir(here)
    for name, runs in RUNS.items():
        for arguments in runs:
            done = ckpt(name, *arguments, "--json")
            assert done.code in (0, 1, 20), (name, arguments, done.err)
            assert done.out.count("\n") == 1, (name, arguments)
            report = json.loads(done.out)
            assert "error" not in report, (name, arguments, done.err)
            try:
                check(name, report)
            except jsonschema.ValidationError as error:
                why = [one.message[:300] for one in (error.context or [error])]
                raise AssertionError((name, arguments, why)) from None


@pytest.mark.parametrize("name", WRONG)
def test_every_error_has_its_form(name: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    done = ckpt(name, *WRONG[name], "--json")
    assert done.out.count("\n") == 1
    report = json.loads(done.out)
    check("error", report)
    assert report["error"]["code"] == done.code > 1
