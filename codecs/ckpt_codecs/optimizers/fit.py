"""The fit of a step's numbers to states before and after it. A bad fit costs bytes, never exactness.

All arrays of a sample are (n,) float32; 0 stands for before and 1 for after the step.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ckpt_codecs.base import Array
from ckpt_codecs.delta import StepInfo
from ckpt_codecs.optimizers.sample import Sample
from ckpt_codecs.optimizers.state_names import LARGEST
from ckpt_codecs.optimizers.step import (
    ADAM,
    DESCENT,
    FORMS,
    SEVERAL_STEPS,
    FittedStep,
    adam_weights_by,
    count_first_moment_matches,
    descent_weights_by,
    extrapolated_weights,
    gradient,
    gradient_bits,
    gradients_from_bits,
    number_option,
    second_moment,
)

GOOD_SHARE = 0.9
"""The share of exactly predicted weights from which on numbers are not searched."""
MIN_SHARE = 0.3
"""The same below which a step is not used."""
USUAL_BETAS = ((0.9, 0.999), (0.9, 0.95), (0.9, 0.98), (0.95, 0.95), (0.9, 0.99), (0.8, 0.95))
LIKELY_SHARE = 0.7
"""The share of gradients near 8-bit multiples of a scale from which on the scale is tried on more gradients."""
QUICK_SIZE, CLOSE_SHARE = 2048, 0.02
"""Values on which all orders of operations are tried; those this close to the best are tried on all values."""
MAX_STEPS = 10**9
SEARCHED_STARTS = 2
"""Orders of operations from which numbers are searched."""
STEP_NEIGHBOURS, FACTOR_NEIGHBOURS = 192, 4
"""Neighbouring float32 numbers that are tried, in each direction."""
CLEAREST = 512
"""Gradients that a scale is fitted to: the largest relative to the moments, which have the fewest rounding errors."""


def fit_adam(sample: Sample, step: StepInfo) -> FittedStep:
    """Return the numbers of one step of Adam, or of several if there are several between the states."""
    m0, v0, m1, v1 = _moments(sample)
    count = None if step.before is None or step.after is None else step.after - step.before
    if count in (None, 1):
        beta1, beta2 = _fit_betas(step.options, m0, m1, v0, v1)
        start = FittedStep(ADAM[0], beta1=beta1, beta2=beta2, first_factor=beta1)
        candidates = _compare(_adam_candidates(start, step), sample)
        best, share = max(candidates, key=_share_of)
        if share < GOOD_SHARE:
            starts = {
                (fitted.optimizer, fitted.bias2_root): fitted
                for fitted, _ in candidates
                if fitted.optimizer != "adam-apex"
            }
            nearest = sorted(starts.values(), key=lambda start: _distance(_fit_linear(start, sample), sample))
            searched = [_search(start, sample) for start in nearest[:SEARCHED_STARTS]]
            best, share = max([(best, share), *searched], key=_share_of)
        if share > MIN_SHARE:
            return fit_second_form(fit_grad_scale(best, m0, m1), m0, m1, v0, v1)
    return fit_several_steps(sample)


def fit_descent(sample: Sample, step: StepInfo) -> FittedStep:
    """Return the numbers of one step of gradient descent with momentum."""
    b0, b1 = sample.before["momentum_buffer"], sample.after["momentum_buffer"]
    momentum = number_option(step.options, "momentum")
    start = FittedStep(DESCENT[0], beta1=0.9 if momentum is None else momentum, first_factor=_slope(b0, b1))
    best, share = max(_compare(_descent_candidates(start, step), sample), key=_share_of)
    if share < GOOD_SHARE:
        best, share = max((best, share), _search(best, sample), key=_share_of)
    return best if share > MIN_SHARE else FittedStep(first_factor=start.first_factor)


def fit_several_steps(sample: Sample) -> FittedStep:
    """Return the numbers by which several steps of Adam are predicted, from the first and the last update directions.

    Method: least squares.
    """
    m0, v0, m1, v1 = _moments(sample)
    tiny = np.float32(1e-12)
    directions = np.stack([m0 / (np.sqrt(v0) + tiny), m1 / (np.sqrt(v1) + tiny), sample.w0], 1).astype(np.float64)
    old, new, growth = _least_squares(directions, sample.w1.astype(np.float64) - sample.w0)
    fitted = FittedStep(
        SEVERAL_STEPS, old_direction=old, new_direction=new, weight_factor=1 + growth, first_factor=_slope(m0, m1)
    )
    predicted = extrapolated_weights(fitted, sample.w0, m0, v0, m1, v1)
    errors = [_finite_median(np.abs(sample.w1 - weights)) for weights in (predicted, sample.w0)]
    return (
        fitted if errors[0] <= errors[1] else replace(fitted, old_direction=0.0, new_direction=0.0, weight_factor=1.0)
    )


def fit_grad_scale(fitted: FittedStep, m0: Array, m1: Array) -> FittedStep:
    """Return the step with the scale of gradients that were bfloat16 times one number, if they were.

    Then all gradients are near multiples of the scale by 8-bit numbers. `m0`, `m1`: (n,) float32.
    """
    g = gradient(fitted, m0, m1).astype(np.float64)
    clarity = np.abs(g) / (np.abs(m0) + np.abs(m1))
    usable = np.isfinite(clarity) & (np.abs(g) > 1e-30) & (np.abs(g) < 1e30)
    clearest = np.flatnonzero(usable)[_largest(clarity[usable], CLEAREST)]
    if clearest.size < 16:
        return fitted
    g = np.abs(g[clearest])
    scales = (np.frexp(g[:4, None] / np.arange(128, 256))[0] * 2).reshape(-1)
    likely = scales[_share_near_bfloat16(g[:32], scales) >= LIKELY_SHARE]
    if not likely.size:
        return fitted
    share, scale = max(zip(_share_near_bfloat16(g, likely).tolist(), likely.tolist(), strict=True))
    if share < GOOD_SHARE:
        return fitted
    for _ in range(3):
        multiples = _round_to_8_bits(g / scale)
        close = np.abs(g / scale / multiples - 1) < 2.0**-11
        if not close.any():
            return fitted
        scale = float((g[close] * multiples[close]).sum() / (multiples[close] ** 2).sum())
    neighbours = [float(x) for x in _neighbours(np.float32(scale), 12)]
    candidates = [(x, form) for x in neighbours for form in range(FORMS)]
    for index, retained in ((clearest, 6), (slice(0, 8192), 1)):
        some0, some1 = m0[index], m1[index]
        shares = [count_first_moment_matches(fitted, x, form, some0, some1) / some1.size for x, form in candidates]
        order = np.argsort(-np.array(shares), kind="stable")[:retained]
        candidates, share = [candidates[i] for i in order], shares[order[0]]
    scale, form = candidates[0]
    return replace(fitted, grad_scale=scale, first_form=form) if share > 0.5 else fitted


def fit_second_form(fitted: FittedStep, m0: Array, m1: Array, v0: Array, v1: Array) -> FittedStep:
    """Return the step with the order of operations of the second moments. All arrays: (n,) float32."""
    g = gradients_from_bits(fitted, gradient_bits(fitted, m0, m1)) if fitted.grad_scale else gradient(fitted, m0, m1)
    candidates = [replace(fitted, second_form=form) for form in range(FORMS)]
    return max(candidates, key=lambda one: _equal_share(second_moment(one, v0, g), v1))


def _moments(sample: Sample) -> tuple[Array, Array, Array, Array]:
    before, after = sample.before, sample.after
    return before["exp_avg"], before["exp_avg_sq"], after["exp_avg"], after["exp_avg_sq"]


def _fit_betas(options: Mapping[str, Any], m0: Array, m1: Array, v0: Array, v1: Array) -> tuple[float, float]:
    """Return the betas of the options if they explain the second moments, else the best ones that are usual."""
    option = options.get("betas")
    values = list(option) if isinstance(option, list | tuple) else [options.get("beta1"), options.get("beta2")]
    pair = [number_option({"beta": beta}, "beta") for beta in values[:2]]
    stated = (
        [(a, b) for a, b in [tuple(pair)] if a is not None and b is not None and 0 <= a < 1 and 0 <= b < 1]
        if len(pair) == 2
        else []
    )

    def error(betas: tuple[float, float]) -> float:
        step = FittedStep(ADAM[0], beta1=betas[0], beta2=betas[1])
        predicted = second_moment(step, v0, gradient(step, m0, m1))
        return _finite_median(np.abs(predicted.astype(np.float64) / v1 - 1))

    if stated and error(stated[0]) < 1e-4:
        return stated[0]
    return min([*stated, *USUAL_BETAS], key=error)


def _adam_candidates(start: FittedStep, step: StepInfo) -> Iterator[FittedStep]:
    """Yield steps in every order of operations, with and without weight decay and bias correction."""
    options = step.options
    rate, eps = number_option(options, "lr"), number_option(options, "eps")
    rate, eps = 1e-3 if rate is None else rate, 1e-8 if eps is None else eps
    weight_decay = number_option(options, "weight_decay", "wd") or 0.0
    weight_decay *= number_option(options, "wd_mult") or 1.0
    counts = [min(step.after, MAX_STEPS)] if step.after is not None and step.after > 0 else []
    for count in [*counts, None]:
        bias1, bias2 = (1.0, 1.0) if count is None else (1 - start.beta1**count, 1 - start.beta2**count)
        factor, eps32 = 1 - rate * weight_decay, _to_float32(eps)
        for weight_factor in dict.fromkeys([_to_float32(factor), float(np.nan_to_num(factor)), 1.0]):
            common = replace(start, weight_factor=weight_factor, step_size=_to_float32(-rate / bias1), eps=eps32)
            for optimizer in ADAM[:2]:
                yield replace(common, optimizer=optimizer, bias2_root=_to_float32(bias2**0.5))
            yield replace(common, optimizer="adam-deepspeed-cpu", bias2_root=_to_float32(bias2**-0.5))
        for weight_factor in dict.fromkeys([_to_float32(weight_decay), 0.0]):
            common = replace(start, weight_factor=weight_factor, step_size=-_to_float32(rate), eps=eps32)
            apex = replace(common, optimizer="adam-apex")
            yield replace(apex, bias2_root=_to_float32(bias2), bias1_factor=_to_float32(bias1))


def _descent_candidates(start: FittedStep, step: StepInfo) -> Iterator[FittedStep]:
    rate = number_option(step.options, "lr")
    rate = 0.1 if rate is None else rate
    weight_decay = number_option(step.options, "weight_decay") or 0.0
    for order in DESCENT:
        for factor in dict.fromkeys([1.0, _to_float32(1 - rate * weight_decay)]):
            yield replace(start, optimizer=order, step_size=_to_float32(-rate), weight_factor=factor)


def _fit_linear(start: FittedStep, sample: Sample) -> FittedStep:
    """Return the step with step size and weight factor by least squares."""
    unit_update = _weights(replace(start, step_size=1.0, weight_factor=0.0), sample)
    inputs = np.stack([unit_update, sample.w0], 1).astype(np.float64)
    step_size, growth = _least_squares(inputs, sample.w1.astype(np.float64) - sample.w0)
    return replace(start, step_size=_to_float32(step_size), weight_factor=_to_float32(1 + growth))


def _distance(fitted: FittedStep, sample: Sample) -> float:
    return _finite_median(np.abs(_weights(fitted, sample).astype(np.float64) - sample.w1))


def _search(start: FittedStep, sample: Sample) -> tuple[FittedStep, float]:
    """Return the step with step size and weight factor by least squares and a search of their float32 neighbours.

    The second result is the share of weights that it predicts exactly.
    """
    best = _fit_linear(start, sample)
    some = sample.subsample(4096)
    weights, actual = _weights_by(start, some), some.w1.view(np.uint32)
    count = _count_equal(weights(best.weight_factor, best.step_size), actual)
    origins = dict[str, FittedStep]()
    for name, reach in 2 * (("step_size", STEP_NEIGHBOURS), ("weight_factor", FACTOR_NEIGHBOURS)):
        if origins.get(name) is best:  # its neighbours were tried, and nothing else has changed since then
            continue
        origins[name] = best
        neighbours = [float(x) for x in _neighbours(np.float32(getattr(best, name)), reach)]
        factor, size = best.weight_factor, best.step_size
        for value in [*neighbours, getattr(start, name)]:
            predicted = weights(factor, value) if name == "step_size" else weights(value, size)
            if (candidate_count := _count_equal(predicted, actual)) > count:
                best, count = replace(best, **{name: value}), candidate_count
    return best, _exact_share(best, sample)


def _weights(fitted: FittedStep, sample: Sample) -> Array:
    return _weights_by(fitted, sample)(fitted.weight_factor, fitted.step_size)


def _weights_by(fitted: FittedStep, sample: Sample) -> Callable[[float, float], Array]:
    """Return what gives the weights after a step by its weight factor and step size, until it is called again."""
    if fitted.optimizer in DESCENT:
        return descent_weights_by(fitted, sample.w0, sample.before["momentum_buffer"], sample.after["momentum_buffer"])
    divisors = sample.after.get(LARGEST, sample.after["exp_avg_sq"])
    return adam_weights_by(fitted, sample.w0, sample.after["exp_avg"], divisors)


def _compare(candidates: Iterator[FittedStep], sample: Sample) -> list[tuple[FittedStep, float]]:
    """Return steps with the share of weights that they predict exactly: of all values for those that may be best."""
    some = sample.subsample(QUICK_SIZE)
    quick = [(fitted, _exact_share(fitted, some)) for fitted in candidates]
    best = max(share for _, share in quick)
    return [(f, _exact_share(f, sample) if share > best - CLOSE_SHARE else share) for f, share in quick]


def _exact_share(fitted: FittedStep, sample: Sample) -> float:
    """Return the share of weights that are predicted bit for bit."""
    return _equal_share(_weights(fitted, sample), sample.w1)


def _largest(values: Array, count: int) -> Array:
    """Return the indices of the `count` largest values, the largest first."""
    if values.size <= count:
        return np.argsort(-values, kind="stable")
    indices = np.flatnonzero(values >= np.partition(values, -count)[-count])
    return indices[np.argsort(-values[indices], kind="stable")[:count]]


def _share_of(candidate: tuple[FittedStep, float]) -> float:
    return candidate[1]


def _equal_share(predicted: Array, actual: Array) -> float:
    if not actual.size:
        return 0.0
    return _count_equal(predicted, actual.view(np.uint32)) / actual.size


def _count_equal(predicted: Array, actual: Array) -> int:
    """Return how many values, (n,) float32, have the bits `actual`, (n,) uint32."""
    return int(np.count_nonzero(predicted.view(np.uint32) == actual))


def _least_squares(inputs: Array, outputs: Array) -> list[float]:
    """Return the factor of each column of `inputs`, (n, m) float64, whose sum is nearest `outputs`, (n,) float64."""
    usable = np.isfinite(inputs).all(axis=1) & np.isfinite(outputs)
    if np.count_nonzero(usable) < 8:
        return [0.0] * inputs.shape[1]
    inputs, outputs = inputs[usable], outputs[usable]
    scale = np.sqrt(np.mean(np.square(inputs), axis=0)) + 1e-300
    factors = np.linalg.lstsq(inputs / scale, outputs, rcond=None)[0] / scale
    return [float(x) if np.isfinite(x) else 0.0 for x in factors]


def _slope(x: Array, y: Array) -> float:
    """Return the factor from 0 to 1 by which `x` is nearest `y`, by weighted least squares."""
    weight = 1 / (np.square(y, dtype=np.float64) + np.square(x, dtype=np.float64) + 1e-300)
    slope = float(np.nansum(x.astype(np.float64) * y * weight) / np.nansum(np.square(x, dtype=np.float64) * weight))
    return min(max(slope, 0.0), 1.0) if np.isfinite(slope) else 0.0


def _neighbours(middle: np.float32, reach: int) -> Array:
    """Return the finite float32 numbers around one, the nearest first: (m,) float32."""
    bits = int(np.float32(middle).view(np.int32))
    offsets = sorted(range(-reach, reach + 1), key=abs)
    numbers = np.array([bits + offset for offset in offsets], np.int64).astype(np.int32).view(np.float32)
    return numbers[np.isfinite(numbers)]


def _round_to_8_bits(x: Array) -> Array:
    mantissa, exponent = np.frexp(x)
    rounded: Array = np.ldexp(np.round(mantissa * 256), exponent - 8)
    return rounded


def _share_near_bfloat16(g: Array, scales: Array) -> Array:
    """Return the share of gradients that each scale turns into 8-bit numbers, nearly: (m,) float64."""
    mantissa = np.frexp(g / scales[:, None])[0] * 256
    shares: Array = np.mean(np.abs(mantissa - np.rint(mantissa)) < 0.02, axis=1)
    return shares


def _finite_median(x: Array) -> float:
    finite = x[np.isfinite(x)]
    return float(np.median(finite)) if finite.size else np.inf


def _to_float32(x: float) -> float:
    """Return the number rounded to float32; 0 if that is not finite."""
    rounded = float(np.float32(x))
    return rounded if np.isfinite(rounded) else 0.0
