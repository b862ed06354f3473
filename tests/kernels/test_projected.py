"""GaLore's projections in the native kernels against the torch reference, from the same state at each step.

Sums over the shorter side are added in another order, so a projected gradient differs by a few units in the last place
of its largest elements; AdamW divides by a root of about the same size, so the update differs as much relative to
itself where that gradient is not small. Hence the bounds: relative to the largest step and to the largest moment.
"""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import daypack
from daypack import kernels

from ..conformance.scene import noise
from .pairs import TYPES, Pair, compare, cpu, needs_native, parameters
from .test_equal import places

__all__ = ["cpu"]
pytestmark = needs_native

#: Tall, wide, square, ragged in every way, deeper than one piece of the shorter side, wider than a block of columns.
SHAPES: dict[str, tuple[int, ...]] = {
    "tall": (203, 40),
    "wide": (37, 419),
    "square": (96, 96),
    "deep": (300, 530),
    "vector": (130,),
    "convolution": (16, 16, 3, 3),
}
INNERS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "gefen": {"inner": "gefen"},
    "gefen-blocks": {"inner": "gefen", "inner_options": {"second_moment": "blocks"}},
    "adamw8bit": {"inner": "adamw8bit", "inner_options": {"min_8bit_size": 1}},
    "adam8bit": {"inner": "adam8bit", "inner_options": {"min_8bit_size": 1}},
    "sgd8bit": {"inner": "sgd8bit", "inner_options": {"momentum": 0.9, "min_8bit_size": 1}},
    "lion8bit": {"inner": "lion8bit", "inner_options": {"min_8bit_size": 1}},
    "adafactor": {"inner": "adafactor", "inner_options": {"beta1": 0.9, "bits": 8}},
}


def graded(name: str, shape: tuple[int, ...], step: int) -> Tensor:
    """Directions that differ in length, so that a projected gradient has no element that is all rounding."""
    return noise(shape, name, step) * torch.exp(noise(shape[-1:], name, "columns"))


def assert_near(pair: Pair, share: float = 2e-4) -> None:
    """Parameters within ``share`` of the largest step or a rounding; moments within it of the largest one."""
    step = float((pair.theirs.float() - pair.before.float()).abs().max())
    distance = (pair.ours.float() - pair.theirs.float()).abs()
    if pair.ours.dtype == torch.float32:
        assert (distance <= 4 * 2.0**-23 * pair.theirs.abs() + share * step).all(), pair.name
    else:
        apart = (places(pair.ours) - places(pair.theirs)).abs()
        apart[distance <= share * step] = 0
        assert apart.max() <= 1, pair.name
        assert int((apart > 0).sum()) <= 2 + 1e-2 * apart.numel(), pair.name
    assert pair.state.keys() == pair.reference.keys()
    for key, ours in pair.state.items():
        theirs, what = pair.reference[key], f"{pair.name} {key}"
        if key.endswith("_codes"):
            off = (ours.int() - theirs.int()).abs()
            assert int((off > 0).sum()) <= 2 + 1e-2 * off.numel(), what
        elif key.startswith("exp_avg") and ours.is_floating_point():
            torch.testing.assert_close(
                ours.float(), theirs.float(), rtol=2.0**-7, atol=share * float(theirs.float().abs().max()), msg=what
            )
        else:
            assert torch.equal(ours, theirs), what


@pytest.mark.parametrize("inner", INNERS)
def test_every_inner_optimizer(cpu: str, inner: str) -> None:
    options = {"name": "galore", "rank": 7, "update_proj_gap": 2, "weight_decay": 0.1, "lr": 1e-2, **INNERS[inner]}
    for maximize in (False, True):
        params = parameters(torch.float32, SHAPES)
        for pair in compare(params, torch.float32, {**options, "maximize": maximize}, 4, graded):
            assert_near(pair)


@pytest.mark.parametrize("grad_dtype", TYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_storage_type(cpu: str, dtype: torch.dtype, grad_dtype: torch.dtype) -> None:
    options = {"name": "galore", "rank": 9, "update_proj_gap": 2, "lr": 1e-2, "scale": 1.0}
    for pair in compare(parameters(dtype, SHAPES), grad_dtype, options, 3, graded):
        assert_near(pair)


@pytest.mark.parametrize("rank", [1, 3, 4, 5, 8, 12, 13, 16, 17, 31, 32, 33, 63, 64, 65, 100])
def test_every_rank(cpu: str, rank: int) -> None:
    """Whole strips and panels and what is left of them, where the low-rank state is worth it and where it is not."""
    shapes = {"tall": (601, 200), "wide": (200, 397), "odd": (263, 257)}
    options = {"name": "galore", "rank": rank, "update_proj_gap": 2, "lr": 1e-2}
    for pair in compare(parameters(torch.float32, shapes), torch.float32, options, 2, graded):
        assert_near(pair)


def optimizer_of(p: Parameter, **options: Any) -> daypack.GaLore:
    return daypack.GaLore([p], **{"rank": 5, "update_proj_gap": 3, "lr": 1e-2, **options})


@pytest.mark.parametrize("fused", [False, None, True])
def test_zero_and_nonfinite_gradients_between_others(cpu: str, fused: bool | None) -> None:
    """A zero gradient neither uses the basis up nor replaces it; one that is not finite moves nothing."""
    p = Parameter(noise((64, 40), "p").float())
    optimizer, left = optimizer_of(p, fused=fused), []
    for step in range(9):
        p.grad = graded("g", (64, 40), step).float()
        if step in (1, 4):
            p.grad.zero_()
        if step == 2:
            p.grad[63, 39] = torch.inf
        before, basis = p.detach().clone(), optimizer.state[p]["basis"].clone() if step else None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
        assert torch.equal(before, p) == (step == 2)
        left.append(int(optimizer.state[p]["basis_left"]))
        if basis is not None:
            assert torch.equal(basis, optimizer.state[p]["basis"]) == (step != 6)
    assert left == [2, 2, 2, 1, 1, 0, 2, 1, 0]
    assert optimizer.kernels()[p] == ("reference" if fused is False else "native")


def test_squares_that_vanish_are_no_zero_gradient(cpu: str) -> None:
    p = Parameter(torch.ones(64, 40))
    optimizer = optimizer_of(p)
    for left in (2, 1, 0, 2):
        p.grad = 1e-30 * noise((64, 40), "g", left).float()
        optimizer.step()
        assert optimizer.state[p]["basis_left"] == left


@pytest.mark.parametrize("shape", [(700, 300), (300, 700), (40, 64)], ids=str)
def test_the_number_of_threads_changes_nothing(cpu: str, shape: tuple[int, int]) -> None:
    results = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            p = Parameter(noise(shape, "p").bfloat16())
            optimizer = optimizer_of(p, rank=33 if min(shape) > 64 else 5)
            for step in range(4):
                p.grad = graded("g", shape, step).bfloat16()
                optimizer.step()
        finally:
            torch.set_num_threads(1)
        results.append((p.detach(), optimizer.state[p]["exp_avg"]))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_groups_with_different_inner_rules(cpu: str) -> None:
    """One call steps them all: what only one rule measures must reach that rule's parameters and no other's."""
    shapes = {"a": (300, 200), "b": (200, 300), "c": (64, 64), "d": (300, 200)}

    def run(kernel: Any) -> list[Tensor]:
        params = {name: Parameter(noise(shape, name).float()) for name, shape in shapes.items()}
        groups = [
            {"params": [params["a"]], "inner": "adamw", "rank": 4},
            {"params": [params["b"]], "inner": "adafactor", "rank": None},
            {"params": [params["c"]], "inner": "lion8bit", "rank": None},
            {"params": [params["d"]], "inner": "gefen", "rank": None},
        ]
        optimizer = daypack.GaLore(groups, lr=1e-2)
        for step in range(3):
            for name, p in params.items():
                p.grad = graded(name, shapes[name], step).float()
            with kernels.use(kernel):
                optimizer.step()
        return [p.detach() for p in params.values()]

    for ours, theirs in zip(run("native"), run("reference"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@pytest.mark.parametrize("refreshed", [True, False])
def test_a_damaged_codebook_leaves_bases_and_all_other_state(refreshed: bool) -> None:
    """It is refused before anything changes, also at a step that takes new bases."""
    params = {"matrix": Parameter(torch.randn(64, 48)), "double": Parameter(torch.randn(6, 40, dtype=torch.float64))}
    optimizer = daypack.GaLore(
        [{"params": params.values(), "rank": 8, "update_proj_gap": 2 if refreshed else 9}], inner="gefen"
    )
    for step in range(2):
        for name, p in params.items():
            p.grad = noise(p.shape, name, step).to(p.dtype)
        optimizer.step()
    assert optimizer.kernels() == {params["matrix"]: "native", params["double"]: "reference"}
    state = optimizer.state[params["matrix"]]
    assert int(state["basis_left"]) == (0 if refreshed else 7)
    state["exp_avg_codebook"][100] = 2
    before = {(name, key): value.clone() for name, p in params.items() for key, value in optimizer.state[p].items()}
    held = [p.detach().clone() for p in params.values()]
    with pytest.raises(ValueError, match="codebook"):
        optimizer.step()
    for (name, key), value in before.items():
        assert torch.equal(optimizer.state[params[name]][key], value), (name, key)
    assert all(map(torch.equal, params.values(), held))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc and limits addresses")
def test_without_memory_for_the_stand_ins_nothing_changes() -> None:
    """One piece is asked for before the first change; a failure within a task would end the process."""
    code = """
import resource, torch, daypack
from daypack import kernels
torch.set_num_threads(2)
params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((130,), (1024, 512), (64, 48))]
groups = [{"params": params[:1]}, {"params": params[1:2], "rank": 256}, {"params": params[2:], "rank": 8}]
optimizer = daypack.GaLore(groups)
torch.manual_seed(0)
for p in params:
    p.grad = torch.randn(p.shape)
with kernels.use("native"):
    optimizer.step()
    optimizer.step()
    held = [t for s in optimizer.state.values() for t in s.values()] + [p.data for p in params]
    before = [t.clone() for t in held]
    pages = int(open("/proc/self/statm").read().split()[0])
    unlimited = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 20), unlimited[1]))
    try:
        optimizer.step()
    except MemoryError as error:
        print(error)
    resource.setrlimit(resource.RLIMIT_AS, unlimited)
    print(all(map(torch.equal, held, before)))
    optimizer.step()
    print([torch.equal(p.data, t) for p, t in zip(params, before[-3:])])
"""
    # Pieces of more than 64 KiB come from the system and go back to it: no memory that is free by chance.
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    message, same, moved = done.stdout.splitlines()
    assert message.startswith("no memory for the stand-ins of projected parameters; nothing was updated")
    assert (same, moved) == ("True", "[False, False, False]")
