"""AdEMAMix (Pagliardini et al. 2024, arXiv 2409.03137): a slow moving average of gradients beside AdamW's fast one."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from torch import Tensor

from daypack.rules.base import (
    ADAMW_OPTIONS,
    Elements,
    Hyper,
    Options,
    Rule,
    decoupled,
    mean_of_gradients,
    mean_of_squares,
)


def alpha(options: Options, step: int) -> float:
    """Return the weight of the slow average: linear from 0 over ``alpha_warmup`` steps, then ``alpha``."""
    warmup = options["alpha_warmup"]
    return float(options["alpha"]) * (1.0 if warmup is None else min(1.0, step / warmup))


def beta3(options: Options, step: int) -> float:
    """Return the decay of the slow average: from beta1 to ``betas[2]`` over ``beta3_warmup`` steps, linear in
    half-lives.
    """
    beta1, _, last = map(float, options["betas"])
    warmup = options["beta3_warmup"]
    if warmup is None or step >= warmup or last == 0:
        return last
    share = step / warmup
    # A half-life is ln 0.5 / ln beta steps. That of 0 is 0.
    life = (1 - share) * (1 / math.log(beta1) if beta1 else 0.0) + share / math.log(last)
    return math.exp(1 / life)


@lru_cache(maxsize=1024)
def _product(betas: tuple[float, ...], warmup: int | None, step: int) -> float:
    """Return the product of `beta3` over all steps so far: the weight that the initial 0 still has in the average."""
    options = {"betas": betas, "beta3_warmup": warmup}
    rising = min(step, warmup or 0)
    return math.prod(beta3(options, t) for t in range(1, rising + 1)) * betas[2] ** (step - rising)


def _scale(options: Options, step: int) -> float:
    return 1 / (1 - _product(tuple(map(float, options["betas"])), options["beta3_warmup"], step))


def _beta3(hyper: Hyper) -> float:
    return beta3(hyper.options or {}, hyper.step)


def _direction(x: Elements) -> Tensor:
    """Return ``(m / (1 - b1^t) + alpha s) / (sqrt(v / (1 - b2^t)) + eps)``; the slow average ``s`` is not corrected."""
    denominator = (x.new("exp_avg_sq") / x.hyper.bias_correction2).sqrt_().add_(x.hyper.eps)
    weight = alpha(x.hyper.options or {}, x.hyper.step)
    fast = x.new("exp_avg") / x.hyper.bias_correction1
    return fast.add_(x.new("exp_avg_slow"), alpha=weight).div_(denominator)


_SLOW = replace(mean_of_gradients("exp_avg_slow", _beta3, _scale), title="slow first moment", symbol="s")
ADEMAMIX = Rule(
    "ademamix",
    (mean_of_gradients(), _SLOW, mean_of_squares()),
    _direction,
    decoupled,
    (*ADAMW_OPTIONS, "alpha", "alpha_warmup", "beta3_warmup"),
)
