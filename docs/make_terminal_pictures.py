"""Terminal pictures of the docs, as SVG: `python docs/make_terminal_pictures.py`. What a command prints, drawn by rich.

The pictures load nothing: rich's fonts of the network are left out, and the reader's own monospaced font is taken.
"""

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
SAMPLE = ROOT / "sample_checkpoints" / "deepspeed-0.19-zero1-bf16-dp2"
WIDTH = 100
MAX_LINES = 24
FORMAT = re.sub(r"@font-face \{\{.*?\}\}\n", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
FORMAT = FORMAT.replace("font-family: Fira Code, monospace", "font-family: ui-monospace, Menlo, Consolas, monospace")

COMMANDS = {
    "inspect": ["ckpt inspect run --depth 2"],
    "convert": ["ckpt convert run step5", "ckpt verify step5"],
    "diff": ["ckpt diff run later"],
    "chain": ["ckpt append run.chain run", "ckpt append run.chain later --step 10", "ckpt log run.chain"],
    "doctor": ["ckpt doctor ."],
    "plan": ["ckpt plan --step 0.8s --mtbf 3h --stall 20s --restart 2m"],
}
"""By the name of the picture; all run in one folder, in this order."""


def draw(name: str, commands: list[str], folder: Path) -> None:
    """Run the commands in a folder, and draw what they print."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    environment = os.environ | {"FORCE_COLOR": "1", "COLUMNS": str(WIDTH), "PYTHONPATH": os.pathsep.join(sys.path)}
    for command in commands:
        words = [sys.executable, "-m", "ckpt_cli", *shlex.split(command)[1:]]
        done = subprocess.run(
            words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        lines = done.stdout.rstrip("\n").replace(str(folder), "/home/me").splitlines()
        if len(lines) > MAX_LINES:
            lines = [*lines[:MAX_LINES], "..."]
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        console.print(Text.from_ansi("\n".join(lines)), no_wrap=True, overflow="ellipsis")
    PICTURES.mkdir(exist_ok=True)
    svg = console.export_svg(title="ckpt", code_format=FORMAT, unique_id=f"ckpt-{name}")
    (PICTURES / f"{name}.svg").write_text(svg, "utf-8")


def main() -> None:
    """Draw all pictures, of copies of samples."""
    sys.path[:0] = [str(ROOT), str(ROOT / "formats"), str(ROOT / "codecs")]
    import numpy as np

    import ckpt

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(SAMPLE, folder / "run", ignore=shutil.ignore_patterns("truth.safetensors"))
        run = ckpt.open(folder / "run")
        changed = np.asarray(run["head.weight"]) * np.float32(1.01)
        later = run.replace({"head.weight": changed.astype(run["head.weight"].dtype)})
        ckpt.save(later, folder / "later", ckpt.Universal())
        for picture, commands in COMMANDS.items():
            draw(picture, commands, folder)
            print(f"docs/pictures/{picture}.svg")


if __name__ == "__main__":
    main()
