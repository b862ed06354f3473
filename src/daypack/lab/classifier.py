"""What the models of all tasks share: they predict one class per byte, image or node."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Classifier(nn.Module, ABC):
    """A model from inputs to logits `[..., classes]`; a batch is one tensor that holds inputs and targets."""

    @abstractmethod
    def split(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return the inputs of `batch`, and its targets `[...]`: a class for each row of logits."""

    def loss(self, batch: Tensor, *, reduction: str = "mean") -> Tensor:
        """Compute the cross-entropy of the targets of `batch` in nats, in at least fp32.

        Args:
            batch: what `split` takes.
            reduction: "mean" or "sum" over the targets.
        """
        logits, targets = self._predict(batch)
        return F.cross_entropy(logits, targets, reduction=reduction)

    def score(self, batch: Tensor) -> tuple[float, int, int]:
        """Return the summed loss of the targets of `batch`, how many have the largest logit, and their number."""
        logits, targets = self._predict(batch)
        loss = F.cross_entropy(logits, targets, reduction="sum")
        return float(loss), int((logits.argmax(-1) == targets).sum()), targets.numel()

    def _predict(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits `[n, classes]` and targets `[n]`."""
        inputs, targets = self.split(batch)
        logits = self(inputs).flatten(0, -2)
        return logits if logits.dtype == torch.float64 else logits.float(), targets.flatten()


def built(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build the model that `make` describes, on the CPU in fp32; its weights depend on `make` and `seed` alone.

    Vectors are 0, gains of norms 1, the rest normal with variance 2 / fan-in. The global random state is not touched.
    """
    with torch.device("meta"):  # no storage and no random numbers: torch's own initial weights are never wanted
        model = make()
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
            else:
                parameter.normal_(0.0, (2 / parameter[0].numel()) ** 0.5, generator=generator)
    return model
