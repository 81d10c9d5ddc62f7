"""`python -m ckpt_serving ENGINE URL…`: let inference servers load the folder of `ckpt follow --exec`.

    ckpt follow CHAIN TARGET --exec "python -m ckpt_serving vllm http://localhost:8000"

`python -m ckpt_serving vllm-live CHAIN URL…`: let vLLM's workers follow the chain themselves, without a folder.
"""

import os
import sys

from ckpt_formats.core.errors import CkptError

USAGE = f"""{__doc__.strip()}

ENGINE is vllm, sglang, slime or prime-rl. The exit code is 0 if all servers have the step, 1 if one has not, 2 for
wrong arguments. CKPT_ENGINE_KEY is sent as their API key."""


def main(arguments: list[str]) -> int:
    """Run one command, and return its exit code."""
    key = os.environ.get("CKPT_ENGINE_KEY")
    match arguments:
        case ["vllm-live", chain, first, *others]:
            from ckpt_serving.vllm_updates import update_live

            try:
                update_live(
                    chain, [first, *others], api_key=key, report=lambda step: print(f"step {step.step}", flush=True)
                )
            except CkptError as error:
                return _fail(error)
            return 0
        case [engine, first, *others] if not engine.startswith("-"):
            from ckpt_serving.reloads import ServedStep, reload_engines

            try:
                errors = reload_engines(engine, [first, *others], ServedStep.from_variables(os.environ), api_key=key)
            except CkptError as error:
                _fail(error)
                return 2
            return max(map(_fail, errors), default=0)
    print(USAGE, file=sys.stderr)
    return 2


def _fail(error: CkptError) -> int:
    print(f"error: {error}", *([f"  {error.hint}"] if error.hint else []), sep="\n", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
