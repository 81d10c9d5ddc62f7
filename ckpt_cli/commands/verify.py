"""`ckpt verify`: is a checkpoint whole and undamaged?"""

import click

from ckpt_cli.options import Reading, as_json, common, effort, reading


@click.command()
@click.argument("path", type=click.Path(readable=False))
@effort
@reading
@as_json
@common
def verify(path: str, workers: int | None, memory: int, reading: Reading, as_json: bool) -> None:
    """Read all of the checkpoint at PATH and check everything that can be checked.

    That all ranks' files are there and belong together; that every tensor is
    covered exactly once; every checksum the files hold (PyTorch writes CRC-32s
    that it never reads); that replicas agree, and that the model's copies are
    their masters, rounded. Of a chain, every step. Exit code 0 if all is well, 20 if not.

    \b
    Examples:
      ckpt verify run/global_step1000
      ckpt verify step1000 --json
    """
    import time
    from pathlib import Path

    from ckpt_cli import report, work
    from ckpt_cli.chains import verify as chains
    from ckpt_cli.checks import amount, examine
    from ckpt_cli.progress import progress
    from ckpt_cli.savings import is_coded
    from ckpt_formats.chain import index

    if (Path(path) / index.NAME).is_file():
        chains.verify(Path(path), work.effort_of(workers, memory), as_json)
        return
    checkpoint = work.open_source(path, reading)
    report.say_notices(checkpoint)
    if is_coded(checkpoint):
        work.load_kernels()
    began = time.monotonic()
    with progress("verifying", amount(checkpoint)) as moved:
        findings = examine(checkpoint, work.effort_of(workers, memory), moved)
    report.findings(checkpoint, findings, time.monotonic() - began, as_json)
    if findings:
        raise SystemExit(20)
