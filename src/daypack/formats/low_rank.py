"""GaLore's low-rank form of a matrix (Zhao et al. 2024, arXiv 2403.03507), and the basis of the projection."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from daypack.formats.base import ComponentSpec, State, StateFormat
from daypack.geometry import CHUNK_ELEMENTS, Geometry, accumulator


@dataclass(frozen=True)
class Projection(StateFormat):
    """A ``[long, short]`` matrix ``G`` (a parameter's or its transpose) through ``rank`` directions of the short side.

    The columns of the basis ``Q [short, rank]`` are the leading singular vectors of a gradient. A stand-in of zeros,
    whose gradient is ``G Q``, is stepped by any rule; its change ``q`` is applied to the parameter as ``q Q^T``. Its
    shape is ``[rows, rank]`` where the columns are the short side, else ``[rank, cols]``, which is ``(G Q)^T``.

    State: ``basis`` is ``Q``, zeros until the first gradient that is finite and not all zero; ``basis_left`` counts the
    gradients for which it will still be used (int64; at 0 the next gradient gives a new basis).

    Attributes:
        shape: the parameter's, two dims.
        rank: at most the shorter one.
    """

    shape: tuple[int, int]
    rank: int

    @property
    def low(self) -> tuple[int, int]:
        """Shape of the stand-in."""
        rows, cols = self.shape
        return (rows, self.rank) if rows >= cols else (self.rank, cols)

    def components(self, view: Geometry, dtype: torch.dtype) -> tuple[ComponentSpec, ...]:
        basis = ComponentSpec("", (min(self.shape), self.rank), accumulator(dtype))
        return basis, ComponentSpec("_left", (), torch.int64)

    def fault(self, state: State, name: str, view: Geometry, squares: bool) -> str | None:
        if not state[name].isfinite().all():
            return f"{name} holds a value that is not finite"
        left = int(state[name + "_left"])
        if left < 0 or (left and not state[name].any()):
            return f"{name}_left is {left}, which does not go with {name}"
        return None

    def _upright(self, matrix: Tensor) -> Tensor:
        """Return the parameter as ``[long, short]``, or the stand-in as ``[long, rank]``: a view."""
        return matrix if self.shape[0] >= self.shape[1] else matrix.T

    def _parts(self) -> Iterator[slice]:
        """Yield runs of rows of the upright matrix, at most a chunk each."""
        long, short = max(self.shape), min(self.shape)
        many = max(1, CHUNK_ELEMENTS // short)
        return (slice(i, min(i + many, long)) for i in range(0, long, many))

    def squared(self, grad: Tensor) -> Tensor:
        """Return the sum of g^2, 0-dim."""
        real, upright = accumulator(grad.dtype), self._upright(grad)
        total = torch.zeros((), dtype=real, device=grad.device)
        for part in self._parts():
            total += upright[part].to(real).square().sum()
        return total

    def leading(self, grad: Tensor) -> Tensor:
        """Return the basis for ``grad``: fp64 ``[short, rank]``, orthonormal, the largest entry of each column
        positive.

        Eigenvectors of the short side's Gram matrix in fp64, which resolve what an SVD in fp32 resolves, and take
        ``short^2`` numbers (three times, in the solver) whatever the long side.

        Raises:
            torch.linalg.LinAlgError: the solver did not converge.
        """
        upright, short = self._upright(grad), min(self.shape)
        gram = torch.zeros(short, short, dtype=torch.float64, device=grad.device)
        for part in self._parts():
            rows = upright[part].double()
            gram.addmm_(rows.T, rows)
        basis: Tensor = torch.linalg.eigh(gram)[1][:, -self.rank :].flip(1)
        largest = basis.gather(0, basis.abs().argmax(0, keepdim=True))
        return basis * torch.where(largest < 0, -1.0, 1.0)

    def down(self, grad: Tensor, basis: Tensor, real: torch.dtype) -> Tensor:
        """Return the gradient of the stand-in, in dtype ``real``."""
        low, upright = torch.empty(self.low, dtype=real, device=grad.device), self._upright(grad)
        for part in self._parts():
            self._upright(low)[part] = upright[part].to(real) @ basis
        return low

    def up_(self, param: Tensor, low: Tensor, basis: Tensor, kept: float, scale: float) -> None:
        """Set ``p <- kept p + scale q Q^T``, rounded once."""
        upright = self._upright(param)
        for part in self._parts():
            moved = upright[part].to(low.dtype) * kept
            upright[part] = moved.addmm_(self._upright(low)[part], basis.T, alpha=scale)


def project(shape: tuple[int, ...], rank: int | None) -> Projection | None:
    """Return the projection of a parameter of ``shape``; None if it is no matrix, or without a rank."""
    if rank is None or len(shape) != 2 or 0 in shape:
        return None
    return Projection((shape[0], shape[1]), min(rank, *shape))
