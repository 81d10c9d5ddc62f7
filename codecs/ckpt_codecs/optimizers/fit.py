"""From states before and after a step to the numbers of the step. What is found wrong costs bytes, never exactness."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.delta import StepInfo
from ckpt_codecs.optimizers.sample import Sample
from ckpt_codecs.optimizers.state_names import LARGEST
from ckpt_codecs.optimizers.step import (
    ADAM,
    BETWEEN,
    DESCENT,
    FORMS,
    OptimizerStep,
    adam_weights,
    count_replayed,
    descent_weights,
    extrapolated_weights,
    gradient,
    gradient_bits,
    gradients_from_bits,
    number,
    second_moment,
)

GOOD = 0.9
"""The share of weights that are as foretold with numbers that need no fitting."""
BETAS = ((0.9, 0.999), (0.9, 0.95), (0.9, 0.98), (0.95, 0.95), (0.9, 0.99), (0.8, 0.95))
LIKELY = 0.7
"""The same of the clearest gradients that a scale must make numbers of 8 bits, to be tried on more."""
FEW, CLOSE = 2048, 0.02
"""Values that tell which orders of operations are tried on more; how much worse than the best these may be."""
MOST_STEPS = 10**9
STARTS = 2
"""Orders of operations that are searched from."""
NEAR = 192
"""Numbers on either side of a fitted one that are tried."""


def fit_adam(sample: Sample, step: StepInfo) -> OptimizerStep:
    """The rule of one step of Adam; of several, if they are."""
    m0, v0, m1, v1 = _moments(sample)
    steps = None if step.before is None or step.after is None else step.after - step.before
    if steps in (None, 1):
        beta1, beta2 = _betas(step.options, m0, m1, v0, v1)
        base = OptimizerStep(ADAM[0], beta1=beta1, beta2=beta2, fade=beta1)
        tried = _compared(_adam_rules(base, step), sample)
        rule, share = max(tried, key=_share_of)
        if share < GOOD:
            starts = {(rule.rule, rule.root): rule for rule, _ in tried if rule.rule != "apex"}
            near = sorted(starts.values(), key=lambda start: _distance(_least(start, sample), sample))
            rule, share = max([(rule, share), *(_searched(start, sample) for start in near[:STARTS])], key=_share_of)
        if share > 0.3:
            return fit_forms(fit_scale(rule, m0, m1), m0, m1, v0, v1)
    return fit_between(sample)


def fit_descent(sample: Sample, step: StepInfo) -> OptimizerStep:
    """The rule of one step of gradient descent with momentum."""
    b0, b1 = sample.before["momentum_buffer"], sample.after["momentum_buffer"]
    momentum = number(step.options, "momentum")
    base = OptimizerStep(DESCENT[0], beta1=0.9 if momentum is None else momentum, fade=_slope(b0, b1))
    tried = _compared(_descent_rules(base, step), sample)
    rule, share = max(tried, key=_share_of)
    if share < GOOD:
        rule, share = max((rule, share), _searched(rule, sample), key=_share_of)
    return rule if share > 0.3 else OptimizerStep(fade=base.fade)


def fit_between(sample: Sample) -> OptimizerStep:
    """Least squares: how much of the way the first and the last update tell."""
    m0, v0, m1, v1 = _moments(sample)
    tiny = np.float32(1e-12)
    known = np.stack([m0 / (np.sqrt(v0) + tiny), m1 / (np.sqrt(v1) + tiny), sample.w0], 1).astype(np.float64)
    way = sample.w1.astype(np.float64) - sample.w0
    found = _least_squares(known, way)
    rule = OptimizerStep(BETWEEN, early=found[0], late=found[1], decay=1 + found[2], fade=_slope(m0, m1))
    far = [_usual(np.abs(sample.w1 - w)) for w in (extrapolated_weights(rule, sample.w0, m0, v0, m1, v1), sample.w0)]
    return rule if far[0] <= far[1] else replace(rule, early=0.0, late=0.0, decay=1.0)


def fit_scale(rule: OptimizerStep, m0: Array, m1: Array) -> OptimizerStep:
    """Were gradients in bfloat16, times one number? Then all of them are near its multiples by 8-bit numbers."""
    g = gradient(rule, m0, m1).astype(np.float64)
    clear = np.abs(g) / (np.abs(m0) + np.abs(m1))
    usable = np.isfinite(clear) & (np.abs(g) > 1e-30) & (np.abs(g) < 1e30)
    best = np.flatnonzero(usable)[_greatest(clear[usable], 512)]
    if best.size < 16:
        return rule
    g = np.abs(g[best])
    scales = (np.frexp(g[:4, None] / np.arange(128, 256))[0] * 2).reshape(-1)
    likely = scales[_near_bfloat16(g[:32], scales) >= LIKELY]
    if not likely.size:
        return rule
    share, scale = max(zip(_near_bfloat16(g, likely).tolist(), likely.tolist(), strict=True))
    if share < GOOD:
        return rule
    for _ in range(3):
        whole = _rounded8(g / scale)
        right = np.abs(g / scale / whole - 1) < 2.0**-11
        if not right.any():
            return rule
        scale = float((g[right] * whole[right]).sum() / (whole[right] ** 2).sum())
    around = [float(x) for x in _neighbours(np.float32(scale), 12)]
    tried = [(x, form) for x in around for form in range(FORMS)]
    for some, kept in ((best, 6), (slice(0, 8192), 1)):
        few0, few1 = m0[some], m1[some]
        shares = [count_replayed(rule, x, form, few0, few1) / few1.size for x, form in tried]
        order = np.argsort(-np.array(shares), kind="stable")[:kept]
        tried, share = [tried[i] for i in order], shares[order[0]]
    scale, form = tried[0]
    return replace(rule, scale=scale, first_form=form) if share > 0.5 else rule


def fit_forms(rule: OptimizerStep, m0: Array, m1: Array, v0: Array, v1: Array) -> OptimizerStep:
    """The order of operations of the second moment, and of the first where gradients are known."""
    g = gradients_from_bits(rule, gradient_bits(rule, m0, m1)) if rule.scale else gradient(rule, m0, m1)
    forms = [replace(rule, second_form=form) for form in range(FORMS)]
    return max(forms, key=lambda one: _share(second_moment(one, v0, g), v1))


def _moments(sample: Sample) -> tuple[Array, Array, Array, Array]:
    before, after = sample.before, sample.after
    return before["exp_avg"], before["exp_avg_sq"], after["exp_avg"], after["exp_avg_sq"]


def _betas(options: Mapping[str, Any], m0: Array, m1: Array, v0: Array, v1: Array) -> tuple[float, float]:
    """Those of the options if they explain the second moments, else the usual ones that do best."""
    given = options.get("betas")
    listed = list(given) if isinstance(given, list | tuple) else [options.get("beta1"), options.get("beta2")]
    pair = [number({"beta": beta}, "beta") for beta in listed[:2]]
    asked = (
        [(a, b) for a, b in [tuple(pair)] if a is not None and b is not None and 0 <= a < 1 and 0 <= b < 1]
        if len(pair) == 2
        else []
    )

    def far(betas: tuple[float, float]) -> float:
        rule = OptimizerStep("torch", beta1=betas[0], beta2=betas[1])
        made = second_moment(rule, v0, gradient(rule, m0, m1))
        return _usual(np.abs(made.astype(np.float64) / v1 - 1))

    if asked and far(asked[0]) < 1e-4:
        return asked[0]
    return min([*asked, *BETAS], key=far)


def _adam_rules(base: OptimizerStep, step: StepInfo) -> Iterator[OptimizerStep]:
    """Every order of operations, with and without decay of the weights and corrections of the bias."""
    options = step.options
    rate, eps = number(options, "lr"), number(options, "eps")
    rate, eps = 1e-3 if rate is None else rate, 1e-8 if eps is None else eps
    pull = number(options, "weight_decay", "wd") or 0.0
    pull *= number(options, "wd_mult") or 1.0
    times = [min(step.after, MOST_STEPS)] if step.after is not None and step.after > 0 else []
    for t in [*times, None]:
        c1, c2 = (1.0, 1.0) if t is None else (1 - base.beta1**t, 1 - base.beta2**t)
        for decay in dict.fromkeys([_single(1 - rate * pull), float(np.nan_to_num(1 - rate * pull)), 1.0]):
            common = replace(base, decay=decay, eps=_single(eps))
            for order in ADAM[:2]:
                yield replace(common, rule=order, step=_single(-rate / c1), root=_single(c2**0.5))
            yield replace(common, rule="cpu-adam", step=_single(-rate / c1), root=_single(c2**-0.5))
        for decay in dict.fromkeys([_single(pull), 0.0]):
            numbers = replace(base, rule="apex", decay=decay, eps=_single(eps), step=-_single(rate))
            yield replace(numbers, root=_single(c2), correction=_single(c1))


def _descent_rules(base: OptimizerStep, step: StepInfo) -> Iterator[OptimizerStep]:
    rate = number(step.options, "lr")
    rate = 0.1 if rate is None else rate
    pull = number(step.options, "weight_decay") or 0.0
    for order in DESCENT:
        for decay in dict.fromkeys([1.0, _single(1 - rate * pull)]):
            yield replace(base, rule=order, step=_single(-rate), decay=decay)


def _least(rule: OptimizerStep, sample: Sample) -> OptimizerStep:
    """The rule with step and decay by least squares."""
    unit = _weights(replace(rule, step=1.0, decay=0.0), sample)
    known = np.stack([unit, sample.w0], 1).astype(np.float64)
    found = _least_squares(known, sample.w1.astype(np.float64) - sample.w0)
    return replace(rule, step=_single(found[0]), decay=_single(1 + found[1]))


def _distance(rule: OptimizerStep, sample: Sample) -> float:
    return _usual(np.abs(_weights(rule, sample).astype(np.float64) - sample.w1))


def _searched(rule: OptimizerStep, sample: Sample) -> tuple[OptimizerStep, float]:
    """Step and decay from the weights themselves: least squares, then every number near by."""
    fitted = _least(rule, sample)
    few = sample.part(4096)
    best, share = fitted, _matches(fitted, few)
    for _ in range(2):
        for name, reach in (("step", NEAR), ("decay", 4)):
            around = [float(x) for x in _neighbours(np.float32(getattr(best, name)), reach)] + [getattr(rule, name)]
            for value in around:
                one = replace(best, **{name: value})
                now = _matches(one, few)
                if now > share:
                    best, share = one, now
    return best, _matches(best, sample)


def _weights(rule: OptimizerStep, sample: Sample) -> Array:
    if rule.rule in DESCENT:
        return descent_weights(rule, sample.w0, sample.before["momentum_buffer"], sample.after["momentum_buffer"])
    return adam_weights(rule, sample.w0, sample.after["exp_avg"], _under(sample))


def _under(sample: Sample) -> Array:
    return sample.after.get(LARGEST, sample.after["exp_avg_sq"])


def _compared(rules: Iterator[OptimizerStep], sample: Sample) -> list[tuple[OptimizerStep, float]]:
    """Rules and the shares of weights that come out bit for bit: those that may be the best, by all of the sample."""
    few = sample.part(FEW)
    tried = [(rule, _matches(rule, few)) for rule in rules]
    best = max(share for _, share in tried)
    return [(rule, _matches(rule, sample) if share > best - CLOSE else share) for rule, share in tried]


def _matches(rule: OptimizerStep, sample: Sample) -> float:
    """The share of weights that come out bit for bit."""
    return _share(_weights(rule, sample), sample.w1)


def _greatest(values: Array, count: int) -> Array:
    """The places of the greatest values, these first."""
    if values.size <= count:
        return np.argsort(-values, kind="stable")
    places = np.flatnonzero(values >= np.partition(values, -count)[-count])
    return places[np.argsort(-values[places], kind="stable")[:count]]


def _share_of(pair: tuple[OptimizerStep, float]) -> float:
    return pair[1]


def _share(made: Array, true: Array) -> float:
    return np.count_nonzero(made.view(np.uint32) == true.view(np.uint32)) / true.size if true.size else 0.0


def _least_squares(known: Array, found: Array) -> list[float]:
    usable = np.isfinite(known).all(axis=1) & np.isfinite(found)
    if np.count_nonzero(usable) < 8:
        return [0.0] * known.shape[1]
    known, found = known[usable], found[usable]
    scale = np.sqrt(np.mean(np.square(known), axis=0)) + 1e-300
    made = np.linalg.lstsq(known / scale, found, rcond=None)[0] / scale
    return [float(x) if np.isfinite(x) else 0.0 for x in made]


def _slope(x: Array, y: Array) -> float:
    """What is left of the earlier values in the later ones."""
    weight = 1 / (np.square(y, dtype=np.float64) + np.square(x, dtype=np.float64) + 1e-300)
    slope = float(np.nansum(x.astype(np.float64) * y * weight) / np.nansum(np.square(x, dtype=np.float64) * weight))
    return min(max(slope, 0.0), 1.0) if np.isfinite(slope) else 0.0


def _neighbours(middle: np.float32, reach: int) -> Array:
    """The numbers of single precision around one, itself first."""
    word = int(np.float32(middle).view(np.int32))
    offsets = sorted(range(-reach, reach + 1), key=abs)
    made = np.array([word + offset for offset in offsets], np.int64).astype(np.int32).view(np.float32)
    return made[np.isfinite(made)]


def _rounded8(x: Array) -> Array:
    mantissa, exponent = np.frexp(x)
    made: Array = np.ldexp(np.round(mantissa * 256), exponent - 8)
    return made


def _near_bfloat16(g: Array, scales: Array) -> Array:
    """The share of the values that each scale makes numbers of 8 bits, nearly."""
    mantissa = np.frexp(g / scales[:, None])[0] * 256
    made: Array = np.mean(np.abs(mantissa - np.rint(mantissa)) < 0.02, axis=1)
    return made


def _usual(x: Array) -> float:
    """The median of what is finite."""
    finite = x[np.isfinite(x)]
    return float(np.median(finite)) if finite.size else np.inf


def _single(x: float) -> float:
    """In single precision; 0 where that has no such number."""
    made = float(np.float32(x))
    return made if np.isfinite(made) else 0.0
