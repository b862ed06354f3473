"""Update rules: pure functions on fp32 (fp64) tensors that read like their papers. They know nothing of storage.

A rule's ``hyper`` reads the options of a group, its ``direction`` turns old first moment, new second moment and
gradient into what is subtracted, times the learning rate. See `daypack.update.Rule` and `daypack.update.Elements`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from daypack.update import Elements, Hyper, Rule


def _decoupled(group: Mapping[str, Any], step: int) -> Hyper:
    """AdamW's options; decay shrinks the parameter by ``lr * weight_decay``."""
    beta1, beta2 = map(float, group["betas"])
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    return Hyper(step, lr, beta1, beta2, float(group["eps"]), decay, group["maximize"], shrink=lr * decay)


def _adamw(x: Elements, hyper: Hyper, _: float = 1.0) -> tuple[Tensor, Tensor]:
    """``(m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``."""
    m = torch.lerp(cast(Tensor, x.m), x.g, 1 - hyper.beta1)
    denominator = (cast(Tensor, x.v) / hyper.bias_correction2).sqrt_().add_(hyper.eps)
    return (m / hyper.bias_correction1).div_(denominator), m


#: Loshchilov & Hutter 2017.
ADAMW = Rule("adamw", _adamw, _decoupled)
