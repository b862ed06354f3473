"""The 8-bit optimizers as the papers put them, one parameter at a time, in fp64 numpy. Nothing is shared with ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .gefen import Array, blocks, matrices


def dynamic_levels(signed: bool) -> Array:
    """The dynamic tree map in exact arithmetic, from its bits: leading zeros give the decade, the rest is linear in it.

    A byte (less its sign) of ``n`` bits with ``k`` leading zeros before the indicator bit has ``n - 1 - k`` bits left
    to cut decade ``10^-k`` into equal parts, whose middles are the levels.
    """
    bits = 7 if signed else 8
    levels = [0.0, 1.0]
    for zeros in range(7):
        count = 2 ** (bits - 1 - zeros)
        for index in range(count):
            level = 10.0**-zeros * (0.1 + 0.9 * (index + 0.5) / count)
            levels += [level, -level] if signed else [level]
    return np.sort(np.array(levels))


def root_levels(kind: str, signed: bool) -> Array:
    """``linear`` and ``companded`` (power 2) levels; those of a second moment are squares: its root is spaced so."""
    power = {"linear": 1, "companded": 2}[kind]
    if not signed:
        return np.asarray((np.arange(256) / 255) ** (2 * power))
    k = np.sort(np.append(np.arange(-127, 128), 0.5)) / 127
    return np.asarray(np.sign(k) * np.abs(k) ** power)


def levels_of(kind: str, signed: bool) -> Array:
    return dynamic_levels(signed) if kind == "dynamic" else root_levels(kind, signed)


@dataclass
class Stored:
    """A moment as codes and scales; ``value`` is what they decode to. A value between two levels may get either code
    where thresholds are rounded: `adopt` goes on from the library's."""

    shape: tuple[int, ...]
    levels: Array
    block: int
    codes: NDArray[np.int64] = field(init=False)
    scale: Array = field(init=False)
    value: Any = 0.0

    def keep(self, fresh: Array) -> None:
        count, rows, cols = (1, 1, fresh.size) if len(self.shape) < 2 else matrices(self.shape)
        x = fresh.reshape(count, rows, cols)
        self.parts = blocks(cols, min(self.block, cols))
        self.codes = np.zeros(x.shape, np.int64)
        self.scale = np.stack([np.abs(x[:, :, part]).max(2) for part in self.parts], axis=2)
        for index, part in enumerate(self.parts):
            scale = self.scale[:, :, index, None]
            unit = np.divide(x[:, :, part], scale, out=np.zeros_like(x[:, :, part]), where=scale > 0)
            codes = np.abs(unit[..., None] - self.levels).argmin(-1)
            if self.levels[0] == 0:  # a second moment: what is not 0 stays so
                codes = np.where((codes == 0) & (x[:, :, part] > 0), 1, codes)
            self.codes[:, :, part] = codes

    def adopt(self, codes: NDArray[np.int64]) -> None:
        value = self.levels[codes]
        for index, part in enumerate(self.parts):
            value[:, :, part] *= self.scale[:, :, index, None]
        self.value = value.reshape(self.shape)


@dataclass
class EightBit:
    """``kind``: adam, adamw, sgd or lion. ``step`` returns the new parameter, `Stored.adopt` must follow.

    Args:
        levels: those of both moments; None: this file's own for ``map``.
    """

    kind: str
    shape: tuple[int, ...]
    options: dict[str, Any]
    map: str = "dynamic"
    block: int = 256
    levels: tuple[Array, Array] | None = None
    t: int = 0

    def __post_init__(self) -> None:
        signed, unsigned = self.levels or (levels_of(self.map, signed=True), levels_of(self.map, signed=False))
        self.m = Stored(self.shape, signed, self.block)
        self.v = Stored(self.shape, unsigned, self.block)

    def step(self, p: Array, g: Array) -> Array:
        self.t += 1
        o = self.options
        lr, decay = o["lr"], o["weight_decay"]
        g = -g if o["maximize"] else g
        if self.kind in ("adam", "sgd"):
            g, decay = g + decay * p, 0.0
        if self.kind == "sgd":
            m = g if self.t == 1 else o["momentum"] * self.m.value + (1 - o["dampening"]) * g
            direction = g + o["momentum"] * m if o["nesterov"] else m
        elif self.kind == "lion":
            b1, b2 = o["betas"]
            direction = np.sign(b1 * self.m.value + (1 - b1) * g)
            m = b2 * self.m.value + (1 - b2) * g
        else:
            b1, b2 = o["betas"]
            m = b1 * self.m.value + (1 - b1) * g
            v = b2 * self.v.value + (1 - b2) * g * g
            direction = (m / (1 - b1**self.t)) / (np.sqrt(v / (1 - b2**self.t)) + o["eps"])
            self.v.keep(v)
        self.m.keep(m)
        return np.asarray((1 - lr * decay) * p - lr * direction)
