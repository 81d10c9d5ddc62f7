"""Show the newest whole checkpoint of a run."""

from ckpt.runs.latest import latest
from ckpt_cli import notes
from ckpt_cli.progress import doing
from ckpt_cli.views.report import conclude, data
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable


def show_latest(run: str, verify: bool, options: ReadOptions, anonymous: bool, as_json: bool) -> None:
    """Print its path; notes name newer ones that are not whole."""
    with doing(f"reading the headers of {printable(run)}"):
        newest = latest(run, verify=verify, options=options, anonymous=anonymous)
    for one in newest.passed_over:
        notes.note(Notice(f"passed over {printable(one.path.name)}: {printable(one.reason)}", weight=Weight.UNSURE))
    if not as_json:
        conclude(printable(str(newest.path)))
        return
    data(
        {
            "path": str(newest.path),
            "name": newest.path.name,
            "step": newest.step,
            "format": newest.checkpoint.format,
            "verified": verify,
            "passed_over": [{"path": str(one.path), "problem": one.reason} for one in newest.passed_over],
        }
    )
