"""Activations: measured by running a module's forward and backward pass on the meta device, else by a formula."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from daypack.planner.live_tensors import LiveTensors
from daypack.planner.model import Inputs, ModelSpec, copied
from daypack.planner.pretrained import quiet
from daypack.planner.substitutes import substitutes

#: Micro-batches at which a module is measured; in between, the line through its neighbours.
KNOTS: tuple[int, ...] = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


@dataclass(frozen=True)
class Activations:
    """Bytes of one micro-batch.

    Attributes:
        saved: alive at the end of the forward pass, for the backward pass.
        peak: alive at the worst moment of forward and backward, gradients of parameters not counted (one that is just
            being added to the parameter's is).
        how: ``"measured"`` on the module, ``"formula"``, or ``"unknown"`` (then 0).
    """

    saved: int
    peak: int
    how: Literal["measured", "formula", "unknown"]


@dataclass
class ActivationPlanner:
    """Activations of a model at any micro-batch.

    Attributes:
        compute: dtype of the arithmetic.
        flash: whether attention runs in a kernel that keeps no attention matrix.
        problem: why the module could not be measured; empty if it was, or if there is none.
    """

    model: ModelSpec
    sequence: int
    compute: torch.dtype = torch.float32
    flash: bool = True
    checkpointing: bool = False
    problem: str = field(default="", init=False)
    _at: dict[int, Activations] = field(default_factory=dict, init=False)

    def exactly(self, batch: int) -> Activations:
        """Return the activations at a micro-batch of ``batch``, measured at that very size if the module can be run."""
        if batch not in self._at:
            self._at[batch] = self._measure(batch)
        return self._at[batch]

    def peak(self, batch: int) -> float:
        """Return the peak bytes at ``batch``: between two measured sizes, on the line through them.

        The peak is the largest of several functions that rise in straight lines, so such a line never lies below it.
        """
        if batch in self._at or self.exactly(1).how == "formula":
            return self.exactly(batch).peak
        low, high = next(((a, b) for a, b in pairwise(KNOTS) if batch <= b), (KNOTS[-2], KNOTS[-1]))
        start, end = self.exactly(low).peak, self.exactly(high).peak
        return start + (end - start) * (batch - low) / (high - low)

    def _measure(self, batch: int) -> Activations:
        if self.model.module is not None and self.model.inputs is not None and not self.problem:
            self._require_checkpointing(self.model.module)
            try:
                module, inputs = self._prepared
                return measure_activations(module, inputs, batch, self.sequence, flash=self.flash)
            except Exception as error:  # whatever a module does with tensors that have no values
                self.problem = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        shape = self.model.transformer
        if shape is None:
            return Activations(0, 0, "unknown")
        options = {"flash": self.flash, "checkpointing": self.checkpointing}
        sizes = batch, self.sequence, self.compute.itemsize
        return Activations(shape.saved_bytes(*sizes, **options), shape.peak_bytes(*sizes, **options), "formula")

    def _require_checkpointing(self, module: nn.Module) -> None:
        if self.checkpointing and _checkpointing(module) is None:
            raise ValueError(
                f"{type(module).__name__} has no gradient_checkpointing_enable(); leave --gradient-checkpointing out "
                "and checkpoint inside the module"
            )

    @cached_property
    def _prepared(self) -> tuple[nn.Module, Inputs]:
        """The module in the dtype of the arithmetic, and how to call it."""
        assert self.model.module is not None
        assert self.model.inputs is not None
        module, inputs = copied(self.model.module).train(), self.model.inputs
        if self.checkpointing:
            _checkpointing(module)()
        _cast(module, self.compute)
        return module, inputs


def _checkpointing(module: nn.Module) -> Any:
    """Return the module's own method that turns checkpointing on; None if it has none."""
    return getattr(
        module,
        "activation_checkpointing_enable",  # its name from transformers 6 on
        getattr(module, "gradient_checkpointing_enable", None),
    )


def measure_activations(
    module: nn.Module, inputs: Inputs, batch: int, sequence: int, *, flash: bool = True
) -> Activations:
    """Run forward and backward on the meta device, and count what is alive.

    Every tensor that an operation creates counts for as long as its storage lives: what autograd saves, what
    checkpoints keep, temporaries, gradients of activations; inputs too. Parameters, their gradients and buffers do not.

    Args:
        module: on the meta device, in the mode and dtype to be measured.
        inputs: gives the arguments of its forward.
        flash: count attention as in a kernel that keeps its output and log-sum-exp only.

    Raises:
        ValueError: the module returns nothing that a gradient can start from.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    for p in trainable:
        p.grad = torch.empty_like(p)
    given = inputs(batch, sequence)
    known = [*module.parameters(), *module.buffers(), *(p.grad for p in trainable if p.grad is not None)]
    with quiet(), LiveTensors(known) as live, substitutes(flash):
        live.note(value for value in tree_leaves(given) if isinstance(value, Tensor))
        output = module(**given) if isinstance(given, Mapping) else module(*given)
        loss = _loss(output)
        del output
        saved = live.bytes
        loss.backward()  # type: ignore[no-untyped-call]
    return Activations(saved, live.peak, "measured")


def _loss(output: Any) -> Tensor:
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    leaves = [value for value in tree_leaves(_plain(output)) if isinstance(value, Tensor) and value.requires_grad]
    if not leaves:
        raise ValueError("the module returns no tensor that a gradient can start from")
    return leaves[0] if leaves[0].ndim == 0 else leaves[0].sum()


def _plain(output: Any) -> Any:
    """Return the tensors of a model output that is a mapping, else the output itself."""
    return list(output.values()) if isinstance(output, Mapping) else output


def _cast(module: nn.Module, dtype: torch.dtype) -> None:
    """Convert floating-point parameters, trainable and frozen, to ``dtype``, except adapters."""
    for name, p in module.named_parameters():
        if p.is_floating_point() and "lora_" not in name:
            p.data = p.data.to(dtype)
