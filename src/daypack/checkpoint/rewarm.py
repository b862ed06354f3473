"""Continuing without optimizer state: a short warm-up of the learning rate, so that the loss does not jump."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer


class Rewarm:
    """Scales the learning rate during the next steps of ``optimizer``, whatever scheduler sets it, then removes itself.

    Without state, Adam's first updates are signs of single gradients, each element moving by the whole learning rate:
    this is harmless at the start of training but raises the loss for a while in the middle of it. The rate returns
    linearly over ``rise`` steps. In the ``observe`` steps before them the rate is 0: moments are gathered and
    parameters do not move, which by itself helps little (docs/resume.md has the figures).

    Args:
        optimizer: any optimizer of torch's interface; its groups' ``lr`` are restored after every step.
        observe: steps at learning rate 0.
        rise: steps of linear rise after them.

    Raises:
        ValueError: a number of steps is negative.
    """

    def __init__(self, optimizer: Optimizer, observe: int = 0, rise: int = 50) -> None:
        if min(observe, rise) < 0:
            raise ValueError(f"observe and rise are numbers of steps, got {observe} and {rise}")
        self._observe, self._rise, self._step = observe, rise, 0
        self._rates: list[Any] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]

    @property
    def factor(self) -> float:
        """What the learning rate of the next step is multiplied by."""
        risen = self._step + 1 - self._observe
        return 0.0 if risen <= 0 else min(1.0, risen / (self._rise + 1))

    def _before(self, optimizer: Optimizer, *_: Any) -> None:
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor

    def _after(self, optimizer: Optimizer, *_: Any) -> None:
        for group, lr in zip(optimizer.param_groups, self._rates, strict=True):
            group["lr"] = lr
        self._step += 1
        if self._step >= self._observe + self._rise:
            for hook in self._hooks:
                hook.remove()
