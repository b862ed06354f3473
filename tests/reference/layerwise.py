"""Adafactor, LAMB and GaLore as the papers put them, one 2-D or 1-D parameter at a time, in fp64 numpy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def rms(x: Array) -> float:
    return float(np.sqrt(np.mean(x * x)))


@dataclass
class Adafactor:
    """Shazeer & Stern 2018, algorithm 4 (matrices) and 5 (vectors), with torch's reading of the two epsilons."""

    lr: float = 1e-2
    beta2_decay: float = -0.8
    eps: tuple[float, float] = (float(np.finfo(np.float64).eps), 1e-3)
    d: float = 1.0
    weight_decay: float = 0.0
    maximize: bool = False
    beta1: float | None = None
    relative_step: bool = True
    scale_parameter: bool = True
    t: int = 0
    v: list[Array] = field(default_factory=list)
    m: Array | float = 0.0

    def step(self, p: Array, g: Array) -> Array:
        self.t += 1
        g = -g if self.maximize else g
        decay = 1 - self.t**self.beta2_decay
        fresh = [(g**2).mean(1), (g**2).mean(0)] if g.ndim == 2 else [g**2]
        old = self.v or [np.zeros_like(x) for x in fresh]
        self.v = [decay * a + (1 - decay) * b for a, b in zip(old, fresh, strict=True)]
        v = np.outer(self.v[0], self.v[1]) / self.v[0].mean() if g.ndim == 2 else self.v[0]
        u = g / np.maximum(np.sqrt(v), self.eps[0])
        u = u / max(1.0, rms(u) / self.d)
        if self.beta1 is not None:
            u = self.m = self.beta1 * self.m + (1 - self.beta1) * u
        rho = min(self.lr, self.t**-0.5) if self.relative_step else self.lr
        alpha = rho * (max(self.eps[1], rms(p)) if self.scale_parameter else 1.0)
        return p * (1 - self.lr * self.weight_decay) - alpha * u


@dataclass
class Lamb:
    """You et al. 2019, algorithm 2, phi the identity."""

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    trust_ratio: bool = True
    t: int = 0
    m: Array | float = 0.0
    v: Array | float = 0.0

    def step(self, p: Array, g: Array) -> Array:
        self.t += 1
        b1, b2 = self.betas
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g**2
        u = (self.m / (1 - b1**self.t)) / (np.sqrt(self.v / (1 - b2**self.t)) + self.eps) + self.weight_decay * p
        norms = np.linalg.norm(p), np.linalg.norm(u)
        ratio = norms[0] / norms[1] if self.trust_ratio and all(norms) else 1.0
        return np.asarray(p - self.lr * ratio * u)


@dataclass
class GaLore:
    """Zhao et al. 2024, algorithm 2, around AdamW; the basis from an SVD of the gradient."""

    rank: int
    gap: int = 200
    scale: float = 0.25
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2
    t: int = 0
    m: Array | float = 0.0
    v: Array | float = 0.0
    basis: Array | None = None

    def step(self, p: Array, g: Array) -> Array:
        right = p.shape[0] >= p.shape[1]
        if self.t % self.gap == 0:
            left_vectors, _, right_vectors = np.linalg.svd(g, full_matrices=False)
            basis = right_vectors[: self.rank].T if right else left_vectors[:, : self.rank]
            peak = basis[np.abs(basis).argmax(0), np.arange(basis.shape[1])]
            self.basis = basis * np.sign(peak)
        self.t += 1
        b1, b2 = self.betas
        assert self.basis is not None
        low = g @ self.basis if right else self.basis.T @ g
        self.m = b1 * self.m + (1 - b1) * low
        self.v = b2 * self.v + (1 - b2) * low**2
        u = (self.m / (1 - b1**self.t)) / (np.sqrt(self.v / (1 - b2**self.t)) + self.eps)
        back = u @ self.basis.T if right else self.basis @ u
        return p * (1 - self.lr * self.weight_decay) - self.lr * self.scale * back
