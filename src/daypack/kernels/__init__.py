"""The arithmetic of a step: `dispatch` picks a kernel, `reference` defines what each of them must compute."""

from daypack.kernels.dispatch import use

__all__ = ["use"]
