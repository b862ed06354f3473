"""LAMB (You et al. 2019, arXiv 1904.00962)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from daypack.rules.adamw import MOMENTS, adamw
from daypack.rules.base import ADAMW_OPTIONS, Elements, Hyper, Options, Rule, decoupled


def _options(group: Options, step: int) -> Hyper:
    """Return AdamW's options; decay is part of the direction, so that the trust ratio scales it too."""
    return replace(decoupled(group, step), shrink=0.0)


def _measured(x: Elements) -> Tensor:
    """Return AdamW's direction plus ``weight_decay * p``."""
    return adamw(x).add_(x.p, alpha=x.hyper.weight_decay)


def _direction(x: Elements) -> Tensor:
    """Return the decayed direction ``u`` times ``|p| / |u|``, or ``u`` if either norm is 0 or the group is exempt."""
    direction, norms = _measured(x), x.norms
    if norms.param > 0 and norms.measured > 0 and x.hyper.option("trust_ratio"):
        direction.mul_(norms.param / norms.measured)
    return direction


LAMB = Rule("lamb", MOMENTS, _direction, _options, (*ADAMW_OPTIONS, "trust_ratio"), measured=_measured)
