"""The arithmetic of a step: `backend` is the contract, `dispatch` chooses, `reference` defines the result."""

from daypack.kernels.dispatch import available, use

__all__ = ["available", "use"]
