"""Update rules: pure functions on fp32 (fp64) tensors that read like the paper. They know nothing of storage."""

from __future__ import annotations

from torch import Tensor

from daypack.plan import Hyper


def adamw(m: Tensor, v: Tensor, hyper: Hyper) -> Tensor:
    """AdamW's direction (Loshchilov & Hutter 2017); decay and learning rate are applied at the write.

    Args:
        m: first moment after this step's gradient.
        v: second moment after this step's gradient, not negative.
        hyper: `Hyper` of this step.

    Returns:
        ``(m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)``, a new tensor.
    """
    denominator = (v / hyper.bias_correction2).sqrt_().add_(hyper.eps)
    return (m / hyper.bias_correction1).div_(denominator)
