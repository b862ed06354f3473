"""The contract between a step and the backends that do its arithmetic.

A backend takes parameters in a `Batch`, one for all that it steps. A step asks every batch to observe before any of
them changes anything, and to check before any of them applies:

    refresh -> observe -> [flags and shared statistics, added up over ranks] -> check -> measure -> [added up] -> apply

or, where nothing is decided between the passes, ``refresh -> step``. `attach` is called whenever state was created or
its layout changed. `observe` returns numbers to the host, which decides from them what is stepped; `measure` returns
tensors on the parameter's device. Nothing else may wait for a device. A batch computes what `daypack.kernels.reference`
computes, except for the order in which fp32 numbers are added.
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
        """Read the state again, after it was created or its layout changed."""

    def observe(self) -> NDArray[np.float64]:
        """Take the first pass over every gradient: fill the statistics and return each sum of g^2. Writes nothing else.

        A sum is not finite if the gradient is not, or if a statistic of it would overflow.
        """

    def shared_sums(self) -> list[list[Tensor]]:
        """Return, for each parameter, the 1-D statistics to be added up over ranks, in place, after `observe`."""

    def check(self, active: Mask) -> None:
        """Raise ValueError if a parameter of ``active`` cannot be stepped, as `apply` would. Changes nothing."""

    def measure(self, active: Mask) -> dict[int, Tensor]:
        """Count the step and bring statistics up to date. For plans that `measures`, return by index the squares of the
        parameter and of what its rule measures, fp64 ``[2]``.
        """

    def apply(self, active: Mask, squares: dict[int, Tensor], last: bool) -> None:
        """Take the second pass: bases where they are due, moments, rule, decay and parameters.

        Args:
            squares: by index, what `measure` returned, added up over all ranks.
            last: no other parameters of this step will follow.
        """

    def step(self) -> Mask:
        """Do all of the above at once, for every gradient that is finite, and return which ones are."""


class Backend(Protocol):
    """A way to do the arithmetic.

    Attributes:
        name: for `daypack.kernels.use` and reports.
        fused: whether ``fused=True`` may choose it, and ``fused=False`` must not.
    """

    name: ClassVar[str]
    fused: ClassVar[bool]

    def about(self) -> str | None:
        """Return what it runs on here, such as an instruction set; None if it cannot run here."""

    def refusal(self, item: ParamStep) -> str | None:
        """Say why it cannot step a parameter, in words that follow "but"; None if it can."""

    def batch(self, items: list[ParamStep]) -> Batch:
        """Return a batch of parameters that it does not refuse."""

    def tools(self, grad: Tensor) -> Tools | None:
        """Return its functions for calibrating from a gradient; None if it has none for this one."""
