"""The contract between a step and the backends that do its arithmetic.

A backend takes parameters in a `Batch`, one for all that it steps. A step asks every batch to observe before any of
them changes anything, and to check before any of them applies:

    refresh -> observe -> [flags and shared statistics, added up over ranks] -> check -> measure -> [added up] -> apply

or, where nothing is decided between the passes, ``refresh -> step``. `attach` follows whenever state was created or
laid out anew. `observe` returns numbers to the host, which decides with them what is stepped; `measure` returns tensors
where the parameter is. Nothing else may wait for a device. What a batch computes is what `daypack.kernels.reference`
does, but for the order in which fp32 numbers are added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from daypack.calibration.tools import Tools
from daypack.param import ParamStep

#: Which parameters of a batch are meant, one flag each.
Mask: TypeAlias = NDArray[np.bool_]
#: Squares that rules measured, by the id of their parameter's `ParamStep` -> the sums over all ranks.
AddUp: TypeAlias = Callable[[dict[int, Tensor]], dict[int, Tensor]]


class Batch(Protocol):
    """Parameters that one backend steps together, kept from step to step."""

    @property
    def items(self) -> Sequence[ParamStep]:
        """Its parameters, in the order of masks and indices."""

    def refresh(self) -> bool:
        """Take in this step's gradients; False if tensors or their layouts have changed: then build another batch."""

    def attach(self) -> None:
        """Take in state that was created or laid out anew."""

    def observe(self) -> NDArray[np.float64]:
        """First pass over every gradient: statistics, and the sum of g^2 of each. Writes nothing else.

        A sum is not finite if the gradient is not, or if a statistic of it would overflow.
        """

    def shared_sums(self) -> list[list[Tensor]]:
        """For each parameter the statistics that belong to all ranks, to be added up in place after `observe`; 1-D."""

    def check(self, active: Mask) -> None:
        """Raise ValueError if a parameter of ``active`` cannot be stepped, as `apply` would. Changes nothing."""

    def measure(self, active: Mask) -> dict[int, Tensor]:
        """Count the step, bring statistics up to date, and for plans that `measures` the squares, fp64 ``[2]``, of the
        parameter and of what its rule measures, by index."""

    def apply(self, active: Mask, squares: dict[int, Tensor], last: bool) -> None:
        """Second pass: new bases where they are due, moments, rule, decay and parameters.

        Args:
            squares: by index, what `measure` returned, added up over all ranks.
            last: no other parameters of this step will follow.
        """

    def step(self) -> Mask:
        """All of the above at once, over every gradient that is finite; which ones are."""


class Backend(Protocol):
    """A way to do the arithmetic.

    Attributes:
        name: for `daypack.kernels.use` and reports.
        fused: whether ``fused=True`` may choose it, and ``fused=False`` must not.
    """

    name: ClassVar[str]
    fused: ClassVar[bool]

    def about(self) -> str | None:
        """What it runs on here, such as an instruction set; None if it cannot run here."""

    def refusal(self, item: ParamStep) -> str | None:
        """Why it cannot step a parameter, in words that follow "but"; None if it can."""

    def batch(self, items: list[ParamStep]) -> Batch:
        """A batch of parameters that it does not refuse."""

    def tools(self, grad: Tensor) -> Tools | None:
        """Its functions for calibration from a gradient; None if it has none for this one."""
