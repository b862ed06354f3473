"""Optimizers by name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from daypack.optim.adafactor import Adafactor
from daypack.optim.adam_mini import AdamMini
from daypack.optim.ademamix import AdEMAMix
from daypack.optim.adopt import ADOPT
from daypack.optim.base import CompressedOptimizer
from daypack.optim.eight_bit import Adam8bit, AdamW8bit, Lion8bit, SGD8bit
from daypack.optim.galore import GaLore
from daypack.optim.gefen import Gefen
from daypack.optim.lamb import LAMB
from daypack.optim.muon import Muon

REGISTRY: dict[str, type[Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "gefen": Gefen,
    "adam8bit": Adam8bit,
    "adamw8bit": AdamW8bit,
    "sgd8bit": SGD8bit,
    "lion8bit": Lion8bit,
    "adam_mini": AdamMini,
    "adafactor": Adafactor,
    "lamb": LAMB,
    "galore": GaLore,
    "adopt": ADOPT,
    "ademamix": AdEMAMix,
    "muon": Muon,
}


def names() -> tuple[str, ...]:
    """Return the names that `create` knows."""
    return tuple(REGISTRY)


def create(name: str, params: Iterable[Any], **options: Any) -> Optimizer:
    """Build the optimizer registered as ``name`` over ``params`` (parameters, named parameters or groups).

    Args:
        options: its constructor's own arguments.

    Raises:
        ValueError: no optimizer has this name.
    """
    if name not in REGISTRY:
        raise ValueError(f"unknown optimizer {name!r}; choose one of {', '.join(REGISTRY)}")
    return REGISTRY[name](params, **options)


def materialize_state(optimizer: Optimizer) -> None:
    """Call `CompressedOptimizer.materialize_state`; refuse torch's own optimizers and say what to do instead.

    Raises:
        ValueError: ``optimizer`` is not one of daypack's.
    """
    if not isinstance(optimizer, CompressedOptimizer):
        raise ValueError(
            f"{type(optimizer).__name__} creates its state only in step(); for one of torch's own optimizers use "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
        )
    optimizer.materialize_state()
