"""Parameter groups: what decays, what does not, and which parameters are embeddings."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from daypack.optim.options import check_initialized, number

#: Last parts of the names of state-space models' decay rates and time steps: not decayed, whatever their shape.
_NEVER_DECAYED = ("A_log", "dt_bias")
_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


class ParamGroups(list[dict[str, Any]]):
    """Groups for any optimizer; ``str()`` of it is a report of what was put where, and why.

    Attributes:
        model: what the groups were made of, for optimizers that ask what a parameter is for (`daypack.AdamMini`).
    """

    def __init__(self, groups: list[dict[str, Any]], reasons: dict[str, str], model: nn.Module) -> None:
        super().__init__(groups)
        self.reasons, self.model = reasons, model

    def __str__(self) -> str:
        lines = []
        for group in self:
            # An optimizer that took the group has put plain parameters and their names in place of the pairs.
            names = group.get("param_names")
            params = list(zip(names, group["params"], strict=True)) if names else group["params"]
            elements = sum(p.numel() for _, p in params)
            lines.append(
                f"weight_decay={group['weight_decay']:g} embedding={group['embedding']}: "
                f"{len(params)} parameters, {elements:,} elements"
            )
            lines.extend(f"  {name} {tuple(p.shape)}: {self.reasons[name]}" for name, p in params)
        return "\n".join(lines)


def param_groups(model: nn.Module, weight_decay: float = 1e-2) -> ParamGroups:
    """Split the trainable parameters of ``model`` into groups of named parameters, in the order of the model.

    Decayed: parameters of two and more dims. Not decayed: vectors and scalars (biases, gains), every parameter of a
    norm module (by type, or by a type name that ends in "Norm"), and state-space parameters (``A_log``, ``dt_bias``).
    Embeddings get groups of their own, marked ``embedding=True``. A tied weight is listed once, under its first name.

    Args:
        weight_decay: decay of the decayed groups, >= 0; the others get 0.

    Returns:
        Non-empty groups only, each with ``params``, ``weight_decay`` and ``embedding``.

    Raises:
        ValueError: ``model`` is no module, ``weight_decay`` is negative or no number, or nothing can be trained.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"param_groups takes a torch.nn.Module, whose types say what decays, got {type(model).__name__}; give an "
            "optimizer parameters or groups as they are"
        )
    if number(weight_decay, "weight_decay", "param_groups") < 0:
        raise ValueError(f"weight_decay of param_groups must not be negative, got {weight_decay!r}")
    check_initialized(model.named_parameters())
    members: dict[tuple[bool, bool], list[tuple[str, Tensor]]] = {}
    reasons: dict[str, str] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for key, p in module.named_parameters(recurse=False):
            if id(p) in seen or not p.requires_grad:
                continue
            seen.add(id(p))
            name = f"{prefix}.{key}" if prefix else key
            decayed, reasons[name] = _decay(module, key, p)
            embedding = isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            members.setdefault((decayed, embedding), []).append((name, p))
    if not members:
        raise ValueError(f"{type(model).__name__} has no trainable parameter; set requires_grad before building groups")
    groups = [
        {"params": params, "weight_decay": weight_decay if decayed else 0.0, "embedding": embedding}
        for (decayed, embedding), params in members.items()
    ]
    return ParamGroups(groups, reasons, model)


def _decay(module: nn.Module, key: str, p: Tensor) -> tuple[bool, str]:
    """Return whether a parameter decays, and why."""
    kind = type(module).__name__
    if isinstance(module, _NORMS) or kind.endswith("Norm"):
        return False, f"parameter of a norm ({kind})"
    if p.ndim < 2:
        return False, f"{p.ndim}-dimensional"
    if key in _NEVER_DECAYED:
        return False, f"state-space parameter ({key})"
    return True, f"{p.ndim}-dimensional weight of {kind}"
