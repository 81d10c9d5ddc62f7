"""Writes docs/pictures: pages of `--html` in a headless Chromium, as `make browser` installs it.

    python docs/make_page_pictures.py

The checkpoints are made here, and hold no values that are worth a file: `inspect` of one with eight billion parameters
shows its index only.
"""

import os
import sys
import tempfile
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT)]

import browsing  # noqa: E402
import page_samples as samples  # noqa: E402
from ckpt_cli.views import chain_log  # noqa: E402
from ckpt_formats.core.checkpoint import Checkpoint, Origin, SourceFile  # noqa: E402
from held import checkpoint, parameter  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
RECORDED = ROOT / "sample_checkpoints" / "recorded-1" / "run.chain"
STATES = {"master": np.float32, "model": ml_dtypes.bfloat16, "exp_avg": np.float32, "exp_avg_sq": np.float32}
LLAMA = {
    "self_attn.q_proj.weight": (4096, 4096),
    "self_attn.k_proj.weight": (1024, 4096),
    "self_attn.v_proj.weight": (1024, 4096),
    "self_attn.o_proj.weight": (4096, 4096),
    "mlp.gate_proj.weight": (14336, 4096),
    "mlp.up_proj.weight": (14336, 4096),
    "mlp.down_proj.weight": (4096, 14336),
    "input_layernorm.weight": (4096,),
    "post_attention_layernorm.weight": (4096,),
}
"""The shapes of a layer of Llama 3 8B."""


def llama() -> Checkpoint:
    """Its index. The values are one zero, seen as large arrays."""
    shapes = {f"model.layers.{layer}.{role}": shape for layer in range(32) for role, shape in LLAMA.items()}
    shapes |= {
        "model.embed_tokens.weight": (128256, 4096),
        "model.norm.weight": (4096,),
        "lm_head.weight": (128256, 4096),
    }
    parameters = [
        parameter(name, {state: np.broadcast_to(np.zeros((), dtype), shape) for state, dtype in STATES.items()})
        for name, shape in shapes.items()
    ]
    origin = Origin("DeepSpeed", "0.19.8", 1000, {"dp": 8, "tp": 1, "pp": 1, "zero_stage": 1})
    path, share = Path("run/global_step1000"), sum(one.nbytes for one in parameters) // 7
    files = [SourceFile(path / "mp_rank_00_model_states.pt", share, "model", {"tp": 0})]
    files += [
        SourceFile(
            path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", 6 * share // 8, "optimizer", {"dp": rank}
        )
        for rank in range(8)
    ]
    return replace(checkpoint(parameters, origin=origin, path=path), files=tuple(files))


def pair() -> tuple[Checkpoint, Checkpoint]:
    """Two states of a small model; later layers have changed more."""
    first, rng = samples.model(16, 16), np.random.default_rng(1)
    parameters = {}
    for number, (name, one) in enumerate(first.parameters.items()):
        scale = 1e-3 * 2 ** (number / 24) * (8 if name.endswith("norm.weight") else 1)
        states = {state: np.asarray(tensor).astype(np.float32) for state, tensor in one.states.items()}
        moved = {state: value + rng.normal(size=value.shape) * scale for state, value in states.items()}
        parameters[name] = parameter(name, {state: value.astype(STATES[state]) for state, value in moved.items()})
    return first, replace(first, parameters=parameters, origin=replace(first.origin, step=1200), errors={})


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    os.chdir(ROOT / "sample_checkpoints")
    samples.DEEPSPEED = Path(samples.DEEPSPEED.name)
    with tempfile.TemporaryDirectory() as name, browsing.chromium() as browser:
        folder = Path(name)
        fields = samples.log_fields(folder / "run.chain", RECORDED)
        texts = {
            # Nothing is at its path, from which a format would be told.
            "inspect": samples.inspect(llama()).replace('"format":"shadow"', '"format":"deepspeed"'),
            "diff": samples.diff(*pair()),
            "stats": samples.stats(replace(pair()[1], path=Path("run/global_step1200"))),
            "log": chain_log.page_of(Path("run.chain"), fields),
            "plan": samples.plan(),
        }
        for name, text in texts.items():
            (folder / f"{name}.html").write_text(text, "ascii")
        for name, width, height, scheme in (
            ("inspect", 1180, 820, "light"),
            ("diff", 1180, 820, "light"),
            ("stats", 1180, 820, "light"),
            ("log", 1180, 820, "dark"),
            ("plan", 1180, 820, "light"),
            ("inspect", 390, 780, "dark"),
        ):
            picture = PICTURES / f"{name}-{'phone' if width < 500 else 'page'}.png"
            with browsing.opened(browser, folder / f"{name}.html", width, scheme, height) as tab:
                point(tab.page, name)
                screenshot = Image.open(BytesIO(tab.page.screenshot())).convert("RGB")
                screenshot.quantize(256, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
                    picture, optimize=True
                )
                assert not tab.wrong, tab.wrong
            print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size:,} bytes")


def point(page: Any, name: str) -> None:
    """Show what the pointer tells on a wide page."""
    if page.viewport_size["width"] > 500 and name == "diff":
        page.locator(".cell").nth(30).hover()


if __name__ == "__main__":
    main()
