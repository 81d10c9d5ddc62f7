"""Show the newest whole checkpoint of a run."""

from ckpt.runs.latest import latest
from ckpt_cli import notes
from ckpt_cli.reading import is_anonymous, reading_headers
from ckpt_cli.views.report import conclude, data
from ckpt_formats.core.format import ReadOptions
from ckpt_formats.core.notices import Notice, Weight
from ckpt_formats.core.text import printable


def show_latest(run: str, verify: bool, options: ReadOptions, as_json: bool) -> None:
    """Print its path; notes name newer ones that are not whole."""
    with reading_headers(run):
        newest = latest(run, verify=verify, options=options, anonymous=is_anonymous())
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
