"""Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum whose matrix is made orthogonal."""

from __future__ import annotations

import torch
from torch import Tensor

from daypack.rules.base import Elements, Hyper, Options, Rule, mean_of_gradients


def _options(group: Options, step: int) -> Hyper:
    """Return Muon's options: ``beta1`` is the momentum; decay shrinks the parameter by ``lr * weight_decay``."""
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    momentum = float(group["momentum"])
    return Hyper(step, lr, momentum, weight_decay=decay, maximize=group["maximize"], shrink=lr * decay, options=group)


def _scale(options: Options, step: int) -> float:
    """Return the scale of a moving average from 0 with decay ``momentum``."""
    return 1 / (1 - float(options["momentum"]) ** step)


def _direction(x: Elements) -> Tensor:
    """Return the momentum, or with Nesterov the gradient averaged into it once more."""
    m = x.new("exp_avg")
    return torch.lerp(x.g, m, x.hyper.beta1) if x.hyper.option("nesterov") else m


def orthogonalized(u: Tensor, hyper: Hyper) -> Tensor:
    """Bring the singular values of ``u [rows, cols]`` close to 1 by Newton-Schulz; singular vectors stay; fp32 (fp64).

    Each step is ``x <- a x + (b s + c s^2) x`` with ``s = x x^T`` on the shorter side, from ``u`` over its norm.
    """
    a, b, c = map(float, hyper.option("ns_coefficients"))
    tall = u.shape[0] > u.shape[1]
    x = (u.T if tall else u) / u.norm().clamp_(min=float(hyper.option("eps")))
    low = torch.bfloat16 if hyper.option("ns_dtype") == "bfloat16" else torch.float32
    x = x.to(torch.float64 if u.dtype == torch.float64 else low)
    for _ in range(hyper.option("ns_steps")):
        s = x @ x.T
        x = torch.addmm(x, torch.addmm(s, s, s, beta=b, alpha=c), x, beta=a)
    orthogonal: Tensor = x.T if tall else x
    return orthogonal.to(u.dtype)


def _whole(u: Tensor, hyper: Hyper) -> Tensor:
    """Orthogonalise ``u``, times ``sqrt(max(1, rows / cols))``, or times ``0.2 sqrt(max(rows, cols))``, which gives the
    RMS of AdamW's updates (Liu et al. 2025, arXiv 2502.16982).
    """
    rows, cols = u.shape
    original = hyper.option("adjust_lr_fn") == "original"
    factor = max(1.0, rows / cols) ** 0.5 if original else 0.2 * max(rows, cols) ** 0.5
    return orthogonalized(u, hyper).mul_(factor)


MUON = Rule(
    "muon",
    (mean_of_gradients(scale=_scale),),
    _direction,
    _options,
    (
        *("lr", "momentum", "nesterov", "weight_decay", "maximize"),
        *("ns_coefficients", "ns_steps", "ns_dtype", "eps", "adjust_lr_fn"),
    ),
    whole=_whole,
)
