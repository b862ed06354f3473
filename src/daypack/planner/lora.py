"""Low-rank adapters: what training with them would have, without a library that adds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from daypack.planner.model import ModelSpec, ParamSpec, copied, from_module

#: Every matrix of a linear layer but the output head.
ALL_LINEAR = "all-linear"
_NOT_LINEAR = ("embed", "wte", "wpe", "lm_head", "head", "norm", "router", "gate.weight", "shared")


class Adapted(nn.Module):
    """``y = base(x) + B A x`` with a frozen base, as PEFT computes it: A and B in fp32 whatever the base has."""

    def __init__(self, base: nn.Module, rank: int, inner: int, outer: int) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(inner, rank, bias=False, device="meta", dtype=torch.float32)
        self.lora_B = nn.Linear(rank, outer, bias=False, device="meta", dtype=torch.float32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        low: Tensor = self.lora_B(self.lora_A(x.to(self.lora_A.weight.dtype))) * 2.0
        return y + low if y.dtype == low.dtype else (y + low).to(y.dtype)


def with_lora(model: ModelSpec, rank: int, targets: Sequence[str] = (ALL_LINEAR,)) -> ModelSpec:
    """Return ``model`` with everything frozen and adapters of ``rank`` on the matrices that ``targets`` name.

    Args:
        targets: module names, or their last parts, with ``*`` (``q_proj``, ``*.mlp.*``); ``all-linear`` is every linear
            layer but the output head.

    Raises:
        ValueError: the rank is not positive, or nothing is named.
    """
    if rank < 1:
        raise ValueError(f"the rank of LoRA must be at least 1, got {rank}")
    adapted = _module(model, rank, targets) if model.module is not None else _shapes(model, rank, targets)
    if not adapted.trainable:
        raise ValueError(f"no matrix of {model.name} is named by the LoRA targets {', '.join(targets)}")
    return adapted


def _named(name: str, targets: Sequence[str]) -> bool:
    return any(fnmatchcase(name, target) or fnmatchcase(name.rpartition(".")[2], target) for target in targets)


def _module(model: ModelSpec, rank: int, targets: Sequence[str]) -> ModelSpec:
    assert model.module is not None
    module = copied(model.module)
    module.requires_grad_(False)
    head = getattr(module, "get_output_embeddings", lambda: None)()
    for name, layer in list(module.named_modules()):
        weight = getattr(layer, "weight", None)
        # transformers' Conv1D is a linear layer whose weight is [in, out].
        linear, transposed = isinstance(layer, nn.Linear), type(layer).__name__ == "Conv1D"
        if not name or layer is head or not (linear or transposed) or not isinstance(weight, Tensor):
            continue
        if ALL_LINEAR in targets or _named(name, targets):
            outer, inner = weight.shape if linear else reversed(weight.shape)
            parent, _, key = name.rpartition(".")
            setattr(module.get_submodule(parent), key, Adapted(layer, rank, inner, outer))
    described = from_module(module, name=f"{model.name}, LoRA of rank {rank}", inputs=model.inputs)
    kept = {key: getattr(model, key) for key in ("transformer", "context", "called", "notes")}
    return replace(described, **kept)


def _shapes(model: ModelSpec, rank: int, targets: Sequence[str]) -> ModelSpec:
    """Add adapters where only shapes are known: to every matrix whose name does not say that it is something else."""
    params = [replace(p, trainable=False) for p in model.params]
    for p in model.params:
        name = p.name.removesuffix(".weight")
        linear = len(p.shape) == 2 and not any(part in p.name for part in _NOT_LINEAR)
        if linear and (ALL_LINEAR in targets or _named(name, targets)):
            for key, shape in (("A", (rank, p.shape[1])), ("B", (p.shape[0], rank))):
                params.append(ParamSpec(f"{name}.lora_{key}.weight", shape, torch.float32))
    return replace(model, name=f"{model.name}, LoRA of rank {rank}", params=tuple(params))
