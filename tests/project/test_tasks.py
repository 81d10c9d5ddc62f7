"""All commands and all lines of Python in docs/tasks.md run, in the order of the page, on real checkpoints."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import ckpt as library
from damage import SAMPLES, ckpt

PAGE = (Path(__file__).parents[2] / "docs" / "tasks.md").read_text("utf-8")
BLOCK = re.compile(r"<!-- runs ?(\d*) -->\n```(console|python)\n(.*?)```", re.DOTALL)
"""A code block, before it the exit code of its commands, if it is not 0."""
SAMPLE_OF = {
    "run": "deepspeed-0.19-zero1-bf16-dp2",
    "zero3": "deepspeed-0.19-zero3-bf16-dp4-tied-frozen",
    "fsdp": "dcp-2.13-fsdp2-w2",
    "megatron": "megatron-0.16-tp2-pp2-dist",
    "megatron-old": "megatron-0.16-tp2-pp2-legacy",
    "trainer": "transformers-5.23-trainer",
    "recorded.chain": "recorded-1/run.chain",
}
"""The names in the page, and the samples that have them."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the checkpoints that the page names."""
    for name, sample in SAMPLE_OF.items():
        shutil.copytree(SAMPLES / sample, tmp_path / name, ignore=shutil.ignore_patterns("truth.safetensors"))
    run = library.open(tmp_path / "run")
    later = run.replace({"head.weight": np.zeros_like(run["head.weight"])})
    library.save(later, tmp_path / "later", library.Universal())
    (tmp_path / "base").mkdir()
    save_file({"head.weight": np.ones((256, 32), np.float32)}, tmp_path / "base" / "model.safetensors")
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "lora_alpha": 4, "r": 2}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    low, high = np.ones((2, 32), np.float32), np.ones((256, 2), np.float32)
    names = {"base_model.model.head.lora_A.weight": low, "base_model.model.head.lora_B.weight": high}
    save_file(names, tmp_path / "adapter" / "adapter_model.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_every_task_of_the_page_is_done(folder: Path) -> None:
    blocks = BLOCK.findall(PAGE)
    assert len(blocks) >= 30
    for code, language, text in blocks:
        if language == "python":
            assert len([line for line in text.splitlines() if line.strip()]) <= 5
            exec(compile(text, "docs/tasks.md", "exec"), {})
            continue
        for line in text.splitlines():
            assert line.startswith("$ ckpt ")
            done = ckpt(*shlex.split(line)[2:])
            assert done.code == int(code or 0), f"{line}\n{done.out}\n{done.err}"
    written = {path.name for path in folder.iterdir()} - set(SAMPLE_OF)
    assert not {name for name in written if name.startswith(".")}
    assert len(written) > 25
    assert load_file(folder / "merged" / "model.safetensors" if (folder / "merged").is_dir() else folder / "merged")


def test_every_block_of_the_page_is_run_but_those_that_need_a_bucket() -> None:
    rest = re.findall(r"^```\w+\n(.*?)```", BLOCK.sub("", PAGE), re.DOTALL | re.MULTILINE)
    assert all("s3://" in text for text in rest)
