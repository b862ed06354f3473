"""What storing the first moment in 8 bits does to it: nearest, dithered and independently random rounding.

A moving average of a gradient stream is kept exactly and through the codes. Printed: the relative error of the moment
that the update reads, and in brackets its radial bias <error, moment> / |moment|^2, over steps 21 to STEPS.

    python benchmarks/rounding.py
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from daypack.calibration import codebook
from daypack.formats import block_quantized
from daypack.formats.base import State
from daypack.formats.block_quantized import BlockQuantized
from daypack.geometry import geometry

SHAPE, STEPS, SKIPPED, BETA1 = (256, 1024), 120, 20, 0.9
EVERYTHING = (slice(None),) * 3


def streams() -> dict[str, Callable[[], Tensor]]:
    drift = 0.3 * torch.randn(SHAPE)
    student = torch.distributions.StudentT(3.0)
    return {
        "Gaussian": lambda: torch.randn(SHAPE),
        "Student t, 3 degrees": lambda: student.sample(SHAPE),
        "Gaussian with drift": lambda: 0.3 * torch.randn(SHAPE) + drift,
    }


def measure(form: BlockQuantized, draw: Callable[[], Tensor]) -> tuple[float, float]:
    """Relative error and radial bias of the moment kept through ``form``."""
    view = geometry(SHAPE)
    state: State = {
        "m" + spec.suffix: torch.zeros(spec.shape, dtype=spec.dtype) for spec in form.components(view, torch.float32)
    }
    exact, wrong, right, radial = torch.zeros(SHAPE), 0.0, 0.0, 0.0
    for step in range(1, STEPS + 1):
        grad = draw()
        if step == 1:
            state["m_codebook"].copy_(codebook.learn(codebook.histogram(grad, view, form.block_size), form.block_size))
        m = torch.lerp(form.decode(state, "m", view, EVERYTHING), grad[None], 1 - BETA1)
        exact = torch.lerp(exact, grad, 1 - BETA1)
        if step > SKIPPED:
            error = m[0] - exact
            wrong += float(error.square().sum())
            right += float(exact.square().sum())
            radial += float((error * exact).sum())
        form.encode_(state, "m", view, EVERYTHING, m, step)
    return (wrong / right) ** 0.5, radial / right


def main() -> None:
    torch.set_num_threads(1)
    dither = block_quantized.dither
    generator = torch.Generator().manual_seed(1)
    print("| gradients | block | nearest | dithered | random | dithered / nearest | random / nearest |")
    print("|---" * 7 + "|")
    for name in streams():
        for block in (64, 256):
            found = {}
            for rounding in ("nearest", "dithered", "random"):
                torch.manual_seed(0)
                block_quantized.dither = (
                    dither
                    if rounding != "random"
                    else lambda v, c, s, like: torch.randint(
                        -(2**31), 2**31, like.shape, dtype=torch.int32, generator=generator
                    )
                )
                form = BlockQuantized(block, "nearest" if rounding == "nearest" else "dithered")
                found[rounding] = measure(form, streams()[name])
            block_quantized.dither = dither
            cells = [f"{100 * error:.2f} % ({100 * bias:+.3f} %)" for error, bias in found.values()]
            ratios = [f"{found[kind][0] / found['nearest'][0]:.2f}" for kind in ("dithered", "random")]
            print(f"| {name} | {block} | {' | '.join(cells + ratios)} |")


if __name__ == "__main__":
    main()
