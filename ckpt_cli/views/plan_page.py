"""The page that `plan --html` writes: the waste as a curve over the interval between bases."""

from typing import TYPE_CHECKING, Any

from ckpt.planning.schedule import FailurePlan
from ckpt.planning.search import max_steps
from ckpt.planning.waste import waste, waste_logged
from ckpt_cli.views.page import page

if TYPE_CHECKING:
    from ckpt_cli.views.plan import PlanReport

_SCRIPTS = ("charts", "plan")
_POINTS = 160
_SPAN = 30.0
"""The curves reach from the shortest interval of the plan by this to the longest times this."""


def page_of(report: "PlanReport", fields: dict[str, Any]) -> str:
    """The page, of ASCII characters only. `fields`: those of `--json`. Equal plans give equal pages."""
    return page("plan", _SCRIPTS, {**fields, "curves": curves(report.plan)})


def curves(plan: FailurePlan) -> dict[str, list[tuple[int, float]]]:
    """For bases only, and with a log that is flushed at the best interval: steps between bases, and the waste."""
    schedules = [plan.bases, *([] if plan.logged is None else [plan.logged])]
    first = max(1.0, min(one.base_steps for one in schedules) / _SPAN)
    last = max(first + 1, min(max(one.base_steps for one in schedules) * _SPAN, max_steps(plan.run)))
    steps = sorted({round(first * (last / first) ** (i / (_POINTS - 1))) for i in range(_POINTS)})
    result = {"bases": [(k, waste(plan.run, k)) for k in steps]}
    if plan.log is not None and plan.logged is not None and plan.logged.flush_steps is not None:
        flush = plan.logged.flush_steps
        result["logged"] = [(k, waste_logged(plan.run, plan.log, k, flush)) for k in steps]
    return result
