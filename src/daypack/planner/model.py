"""What is planned for: parameters by name, shape, dtype and group, and the module itself where there is one."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from daypack.optim.groups import param_groups
from daypack.optim.options import check_initialized
from daypack.optim.size import tensor_bytes
from daypack.planner.transformer import TransformerShape

#: (micro-batch, sequence) -> the arguments of the module's forward, on the meta device.
Inputs: TypeAlias = "Callable[[int, int], Mapping[str, Any] | Sequence[Any]]"


@dataclass(frozen=True)
class ParamSpec:
    """One parameter.

    Attributes:
        shape: global shape.
        trainable: False for frozen ones, which have neither gradient nor state.
        options: keys of its parameter group that are not the optimizer's (``embedding``), as sorted pairs.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class ModelSpec:
    """A model as the planner sees it.

    Attributes:
        name: for the title of a plan.
        params: every parameter once; a tied weight under its first name.
        buffer_bytes: of the module's buffers.
        module: on the meta device; None where only shapes are known.
        transformer: sizes of a transformer, where they are known and the module cannot be run.
        inputs: how to call the module; None where it cannot be called.
        context: its longest sequence, tokens; None where it has none.
        called: who says how to call the module, if a user did; it is an error if it does not run then.
        notes: what was assumed.
    """

    name: str
    params: tuple[ParamSpec, ...]
    buffer_bytes: int = 0
    module: nn.Module | None = field(default=None, repr=False, compare=False)
    transformer: TransformerShape | None = None
    inputs: Inputs | None = field(default=None, repr=False, compare=False)
    context: int | None = None
    called: str = ""
    notes: tuple[str, ...] = ()

    @property
    def elements(self) -> int:
        return sum(p.elements for p in self.params)

    @property
    def trainable(self) -> tuple[ParamSpec, ...]:
        return tuple(p for p in self.params if p.trainable)

    @property
    def trainable_elements(self) -> int:
        return sum(p.elements for p in self.trainable)

    def blocks(self) -> tuple[tuple[ParamSpec, ...], ...]:
        """Return the parameters outside all layers, then those of each layer: what ``fully_shard`` gathers together.

        A layer is what stands below the first number in a name (``model.layers.7.``), as in a ModuleList.
        """
        layers: dict[str, list[ParamSpec]] = {"": []}
        for p in self.params:
            found = re.match(r"(?:[^.]+\.)*?\d+\.", p.name + ".") if "." in p.name else None
            layers.setdefault(found[0] if found else "", []).append(p)
        return tuple(map(tuple, layers.values()))


def from_module(
    module: nn.Module,
    *,
    name: str | None = None,
    inputs: Inputs | None = None,
    transformer: TransformerShape | None = None,
) -> ModelSpec:
    """Describe ``module``, on whatever device it is; its values are neither read nor copied, and it stays as it is.

    Parameters that share memory are one parameter. Groups are those of `daypack.param_groups`.

    Raises:
        ValueError: it has lazy parameters that have no shape yet.
    """
    check_initialized([*module.named_parameters(), *module.named_buffers()])
    options: dict[str, tuple[tuple[str, Any], ...]] = {}
    if any(p.requires_grad for p in module.parameters()):
        for group in param_groups(module):
            extra = tuple(sorted((key, value) for key, value in group.items() if key not in ("params", "weight_decay")))
            options |= {key: extra for key, _ in group["params"]}
    params = tuple(
        ParamSpec(key, tuple(p.shape), p.dtype, p.requires_grad, options.get(key, ()))
        for key, p in module.named_parameters()
    )
    return ModelSpec(
        name or type(module).__name__,
        params,
        tensor_bytes(*module.buffers()),
        meta_twin(module),
        transformer,
        inputs,
    )


def meta_twin(module: nn.Module) -> nn.Module:
    """Return ``module`` itself if it is on the meta device, else a copy there, for which nothing is allocated."""
    tensors = [*module.parameters(), *module.buffers()]
    if all(t.is_meta for t in tensors):
        return module
    twins: dict[int, Any] = {}
    for t in tensors:
        twin = t.detach().to("meta")
        twins[id(t)] = nn.Parameter(twin, t.requires_grad) if isinstance(t, nn.Parameter) else twin
    return copied(module, twins)


def copied(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Return a deep copy of ``module``; ``memo`` maps objects to what takes their place.

    Raises:
        ValueError: it holds something that cannot be copied, such as a lock.
    """
    try:
        return copy.deepcopy(module, memo or {})
    except Exception as error:  # whatever the module's attributes do
        problem = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"{type(module).__name__} cannot be copied to plan for it ({problem}); give its shapes instead"
        ) from None


def from_shapes(
    shapes: Iterable[Any],
    dtype: torch.dtype = torch.float32,
    *,
    name: str = "shapes",
    transformer: TransformerShape | None = None,
    notes: tuple[str, ...] = (),
) -> ModelSpec:
    """Describe a model of which only shapes are known.

    Args:
        shapes: shapes, tensors, or pairs of a name and either; tensors bring their own dtype and ``requires_grad``, and
            one that comes twice counts once.
        dtype: of what has no dtype of its own.

    Raises:
        ValueError: a size is negative.
    """
    params, seen = [], set()
    for i, entry in enumerate(shapes):
        key, shape = entry if isinstance(entry, tuple) and entry and isinstance(entry[0], str) else (str(i), entry)
        if isinstance(shape, Tensor):
            if id(shape) in seen:
                continue
            seen.add(id(shape))
            params.append(ParamSpec(key, tuple(shape.shape), shape.dtype, shape.requires_grad))
            continue
        size = tuple(int(n) for n in shape)
        if any(n < 0 for n in size):
            raise ValueError(f"a shape has sizes of at least 0, got {size}")
        params.append(ParamSpec(key, size, dtype))
    return ModelSpec(name, tuple(params), transformer=transformer, notes=notes)
