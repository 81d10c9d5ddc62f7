"""How often a run should store bases and flush its log, and what failures then cost: pure functions of measured costs.

Time is in seconds, data in bytes, intervals in steps. Sources:

- J. W. Young, A first order approximation to the optimum checkpoint interval, Communications of the ACM 17 (9), 1974.
- J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer
  Systems 22 (3), 2006.
- LowDiff (SC '25, arXiv 2509.04084): bases and differentials in batches, tuned while the run goes on.

`waste` has the formulas, `search` finds the best intervals, `simulate` repeats the same run with drawn failures.
"""

from ckpt.planning.costs import DataRates, LogCosts, RunCosts
from ckpt.planning.schedule import FailurePlan, Schedule, plan_schedule

__all__ = ["DataRates", "FailurePlan", "LogCosts", "RunCosts", "Schedule", "plan_schedule"]
