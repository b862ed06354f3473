"""Polyak's and Nesterov's momentum as `torch.optim.SGD` has them."""

from __future__ import annotations

from torch import Tensor

from daypack.rules.base import Elements, Hyper, Meaning, Moment, Options, Rule


def _options(group: Options, step: int) -> Hyper:
    """Return SGD's options: ``beta1`` is the momentum; decay is part of the gradient."""
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    return Hyper(
        step,
        lr,
        float(group["momentum"]),
        weight_decay=decay,
        maximize=group["maximize"],
        coupled=decay,
        options=group,
    )


def _advance(x: Elements) -> Tensor:
    """Return ``m = momentum m + (1 - dampening) g``, and ``m = g`` at the first step."""
    if x.hyper.step == 1:
        return x.g
    return (x.old("exp_avg") * x.hyper.beta1).add_(x.g, alpha=1 - float(x.hyper.option("dampening")))


def _scale(options: Options, step: int) -> float:
    """Return the scale of momentum, which adds gradients up instead of averaging them."""
    momentum = float(options["momentum"])
    return (1 - momentum) / ((1 - momentum**step) * (1 - float(options["dampening"]) or 1.0))


def _direction(x: Elements) -> Tensor:
    """Return ``m``, or with Nesterov ``g + momentum m``; without a moment ``g``."""
    if not x.keeps("exp_avg"):
        return x.g
    m = x.new("exp_avg")
    return x.g.add(m, alpha=x.hyper.beta1) if x.hyper.option("nesterov") else m


def _steady(x: Elements) -> Tensor:
    m, hyper = x.old("exp_avg"), x.hyper
    return m if hyper.step == 1 else m * ((1 - hyper.beta1) / (1 - float(hyper.option("dampening"))))


SGD = Rule(
    "sgd",
    (Moment("exp_avg", _advance, Meaning("g", _scale)),),
    _direction,
    _options,
    ("lr", "momentum", "dampening", "nesterov", "weight_decay", "maximize"),
    steady=_steady,
)
