"""GaLore against numpy in fp64 and against galore-torch; its basis, its resume, and what is not projected."""

from __future__ import annotations

import importlib.util
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import daypack
from daypack.formats.low_rank import Projection, project

from ..conformance.scene import assert_same, clone, noise, state_of, through_file, values
from ..conformance.test_memory import CHUNK, LiveTemporaries
from ..processes import python
from ..reference.layerwise import GaLore as Twin


def gradient(shape: tuple[int, ...], step: int) -> Tensor:
    """Singular values that differ, so that leading vectors are well defined."""
    return torch.exp(noise((shape[-1],), "columns")) * noise(shape, "g", step) * torch.exp(noise((shape[0], 1), "r"))


@pytest.mark.parametrize("shape", [(40, 24), (24, 40), (30, 30), (64, 5)], ids=str)
def test_follows_the_paper_in_double_precision(shape: tuple[int, int]) -> None:
    options: dict[str, Any] = {"rank": 3, "scale": 0.7, "weight_decay": 0.1, "lr": 1e-2}
    p = Parameter(noise(shape, "p"))
    optimizer = daypack.GaLore([p], update_proj_gap=3, **options)
    twin, expected = Twin(gap=3, **options), p.detach().numpy().copy()
    for step in range(8):
        p.grad = gradient(shape, step)
        optimizer.step()
        expected = twin.step(expected, p.grad.numpy())
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-8, atol=1e-9)
        np.testing.assert_allclose(optimizer.state[p]["basis"], twin.basis, atol=1e-9)


def galore_torch(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Its AdamW, without the rest of it, which wants transformers and bitsandbytes."""
    spec = importlib.util.find_spec("galore_torch")
    if spec is None or spec.origin is None:
        pytest.skip("galore-torch is not installed")
    names = ("transformers", "transformers.utils", "transformers.utils.versions", "galore_torch_alone")
    modules: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    modules["transformers.utils.versions"].require_version = lambda _: None
    modules["galore_torch_alone"].__path__ = [str(Path(spec.origin).parent)]
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return importlib.import_module("galore_torch_alone.adamw").AdamW


@pytest.mark.parametrize("shape", [(40, 24), (24, 40)], ids=str)
def test_equals_galore_torch(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without decay, which it applies after the update; its signs may be others, which Adam does not see.

    Then its moments would not match after a refresh, so the second basis gets the signs of the first library's.
    """
    adamw = galore_torch(monkeypatch)
    p, q = (Parameter(noise(shape, "p").float()) for _ in range(2))
    ours = daypack.GaLore([p], rank=6, update_proj_gap=50, scale=0.25, weight_decay=0.0, lr=1e-2)
    group = {"params": [q], "rank": 6, "update_proj_gap": 50, "scale": 0.25, "proj_type": "std"}
    theirs = adamw([group], lr=1e-2, eps=1e-8, no_deprecation_warning=True)
    for step in range(30):
        p.grad = q.grad = gradient(shape, step).float()
        ours.step()
        theirs.step()
    moved = q.detach() - noise(shape, "p").float()
    assert (p.detach() - q.detach()).norm() < 1e-4 * moved.norm()


@pytest.mark.parametrize("inner", ["adamw", "gefen", "adafactor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_resume_is_exact_at_the_first_step_and_around_a_refresh(inner: str, dtype: torch.dtype) -> None:
    shapes: dict[str, tuple[int, ...]] = {"tall": (320, 48), "wide": (48, 320), "vector": (33,)}

    def start() -> dict[str, Parameter]:
        return {name: Parameter(noise(shape, name).to(dtype)) for name, shape in shapes.items()}

    def train(optimizer: Any, params: dict[str, Parameter], steps: range) -> None:
        for step in steps:
            for name, p in params.items():
                p.grad = (gradient if p.ndim == 2 else lambda s, t: noise(s, t))(shapes[name], step).to(dtype)
            optimizer.step()

    def create(params: dict[str, Parameter]) -> daypack.GaLore:
        options = {"beta1": 0.9} if inner == "adafactor" else None
        return daypack.GaLore(params.items(), rank=8, update_proj_gap=3, inner=inner, inner_options=options, lr=1e-2)

    whole = start()
    reference = create(whole)
    train(reference, whole, range(8))
    for saved in (0, 1, 2, 3, 4, 6, 7):
        params = start()
        first = create(params)
        train(first, params, range(saved))
        mine = clone(params)
        second = create(mine)
        second.load_state_dict(through_file(first.state_dict()))
        train(second, mine, range(saved, 8))
        assert_same(values(mine), values(whole), f"saved at {saved}")
        assert_same(state_of(second, mine), state_of(reference, whole), f"saved at {saved}")


def test_only_good_gradients_take_or_use_up_a_basis() -> None:
    p = Parameter(torch.ones(32, 16))
    optimizer = daypack.GaLore([p], rank=2, update_proj_gap=3, weight_decay=0.0)
    state = optimizer.state
    p.grad = torch.zeros(32, 16)
    optimizer.step()
    assert (state[p]["step"], state[p]["basis_left"], state[p]["basis"].any()) == (1, 0, False)
    assert torch.equal(p, torch.ones(32, 16))
    bad = torch.ones(32, 16)
    bad[3, 4] = torch.nan
    p.grad = bad
    with pytest.warns(UserWarning, match="not finite"):
        optimizer.step()
    assert (state[p]["step"], state[p]["basis_left"], state[p]["basis"].any()) == (1, 0, False)
    left = []
    for step in range(7):
        p.grad = torch.zeros(32, 16) if step == 2 else bad if step == 4 else gradient((32, 16), step).float()
        before = state[p]["basis"].clone()
        optimizer.step()
        left.append(int(state[p]["basis_left"]))
        assert torch.equal(before, state[p]["basis"]) == (step not in (0, 5))
    assert left == [2, 1, 1, 0, 0, 2, 1]


@pytest.mark.parametrize("kind", ["rank one", "identity", "huge", "tiny"])
def test_hard_decompositions(kind: str) -> None:
    """Repeated and vanishing singular values, squares that overflow fp32 or vanish in it: orthonormal all the same."""
    g = {
        "rank one": torch.outer(noise((48,), "a"), noise((20,), "b")),
        "identity": torch.eye(48, 20),
        "huge": 1e15 * noise((48, 20), "h"),
        "tiny": 1e-30 * noise((48, 20), "t"),
    }[kind].float()
    p = Parameter(torch.zeros(48, 20))
    optimizer = daypack.GaLore([p], rank=3)
    p.grad = g
    optimizer.step()
    basis = optimizer.state[p]["basis"].double()
    torch.testing.assert_close(basis.T @ basis, torch.eye(3, dtype=torch.float64), rtol=0, atol=1e-5)
    assert (basis.gather(0, basis.abs().argmax(0, keepdim=True)) > 0).all()
    assert p.isfinite().all()


def test_a_failing_decomposition_keeps_the_basis(monkeypatch: pytest.MonkeyPatch) -> None:
    p = Parameter(torch.ones(32, 16))
    optimizer = daypack.GaLore([("w", p)], rank=2, update_proj_gap=1)

    def fail(_: Tensor) -> None:
        raise torch.linalg.LinAlgError("no convergence")

    def step(index: int, failing: bool = False) -> None:
        p.grad = gradient((32, 16), index).float()
        if not failing:
            optimizer.step()
            return
        with monkeypatch.context() as patch:
            patch.setattr(torch.linalg, "eigh", fail)
            with pytest.warns(UserWarning, match="basis of parameter w"):
                optimizer.step()

    step(0, failing=True)
    assert not optimizer.state[p]["basis"].any()
    step(1)
    known = optimizer.state[p]["basis"].clone()
    assert known.any()
    step(2, failing=True)
    assert torch.equal(optimizer.state[p]["basis"], known)
    step(3)
    assert not torch.equal(optimizer.state[p]["basis"], known)


def test_what_is_projected() -> None:
    """Matrices in groups with a rank: no vectors, convolutions, experts; none that would take more, which is said."""
    shapes: dict[str, tuple[int, ...]] = {
        "matrix": (96, 64),
        "vector": (6000,),
        "conv": (64, 16, 3, 3),
        "experts": (4, 64, 64),
        "scalar": (),
        "empty": (0, 64),
        "small": (2, 2),
        "thin": (9000, 4),
    }
    params = {name: Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    rest = Parameter(torch.ones(96, 64))
    optimizer = daypack.GaLore([{"params": params.items(), "rank": 8}, {"params": [("rest", rest)]}])
    for p in (*params.values(), rest):
        p.grad = torch.ones_like(p)
    with pytest.warns(UserWarning, match="thin") as caught:
        optimizer.step()
    assert len(caught) == 1
    assert "small" not in str(caught[0].message)
    assert [name for name, p in params.items() if "basis" in optimizer.state[p]] == ["matrix"]
    assert "basis" not in optimizer.state[rest]


@pytest.mark.parametrize("rank", [16, 17, 10**6])
def test_rank_is_clamped_to_the_shorter_side(rank: int) -> None:
    """Through all directions a projection is a rotation that costs a basis: such matrices step whole."""
    p = Parameter(torch.ones(128, 16))
    optimizer = daypack.GaLore([p], rank=rank)
    p.grad = torch.ones(128, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert "basis" not in optimizer.state[p]
    assert project((128, 16), rank) == Projection((128, 16), 16)


def test_bytes_are_what_the_docstring_says() -> None:
    p = Parameter(torch.zeros(1024, 1024))
    for inner, rank, bound in (("adamw", 256, 3.0), ("adamw", 128, 1.5), ("gefen", 128, 0.64)):
        optimizer = daypack.GaLore([p], rank=rank, inner=inner)
        daypack.materialize_state(optimizer)
        assert daypack.state_report(optimizer).bytes_per_param == pytest.approx(bound, abs=0.011), inner


@pytest.mark.parametrize(("inner", "remedy"), [("adamw", "torch.optim.AdamW"), ("gefen", "daypack.create")])
def test_without_a_rank_one_warning_says_that_nothing_is_projected(inner: str, remedy: str) -> None:
    p = Parameter(torch.ones(64, 64))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        daypack.materialize_state(daypack.GaLore([p], inner=inner))
    (only,) = (str(warning.message) for warning in caught)
    assert "projects nothing: no group has a rank" in only
    assert remedy in only
    plan = daypack.plan([(64, 64)], optimizers=[f"galore:inner={inner}", f"galore:inner={inner}:rank=4"])
    said = [any("nothing is projected" in note for note in row.notes) for row in plan.rows]
    assert said == [True, False]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        daypack.GaLore([{"params": [p], "rank": 4}], inner=inner)


def test_inner_adamw_without_rank_is_adamw() -> None:
    p, q = (Parameter(noise((40, 24), "p").float()) for _ in range(2))
    ours, theirs = daypack.GaLore([p], lr=1e-2), torch.optim.AdamW([q], lr=1e-2)
    for step in range(10):
        p.grad = q.grad = gradient((40, 24), step).float()
        ours.step()
        theirs.step()
    torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_inner_adafactor_takes_the_rate_as_it_is() -> None:
    """An inner rule that scales by the parameter would scale by a stand-in of zeros."""
    p = Parameter(torch.full((64, 32), 7.0))
    optimizer = daypack.GaLore(
        [p], rank=1, scale=1.0, lr=5.0, weight_decay=0.0, inner="adafactor", inner_options={"beta1": 0.9}
    )
    p.grad = torch.ones(64, 32)
    optimizer.step()
    # One direction, 1/sqrt(32) in each column; its step is of RMS 1, a tenth of which enters the first moment.
    torch.testing.assert_close(7 - p.detach(), torch.full((64, 32), 0.5 / 32**0.5))


def test_inner_options_are_checked_and_used() -> None:
    p = Parameter(torch.ones(64, 512))
    optimizer = daypack.GaLore([p], rank=8, inner="gefen", inner_options={"block_size": 64})
    p.grad = torch.ones(64, 512)
    optimizer.step()
    assert optimizer.state[p]["exp_avg_scale"].shape == (8, 8)
    for wrong in ({"no_such": 1}, {"block_size": 0}, {"lr": 0.1}, {"betas": (0.9, 0.9)}, "block_size=64"):
        with pytest.raises(ValueError, match="inner_options"):
            daypack.GaLore([p], inner="gefen", inner_options=wrong)  # type: ignore[arg-type]
    for inner in ("galore", "lamb", "adam_mini"):
        with pytest.raises(ValueError, match=f"inner='{inner}' of GaLore does not fit: .*; take inner="):
            daypack.GaLore([p], inner=inner)
    for wrong_inner in ("sgd", "nothing", None):
        with pytest.raises(ValueError, match="inner of GaLore must be 'adamw' or 'gefen'"):
            daypack.GaLore([p], inner=wrong_inner)  # type: ignore[arg-type]
    for option, wrong in (("rank", 0), ("rank", 2.0), ("update_proj_gap", 0), ("scale", -1.0)):
        with pytest.raises(ValueError, match=option):
            daypack.GaLore([p], **{option: wrong})


def test_state_of_the_transposed_shape_is_refused() -> None:
    params = {shape: Parameter(torch.ones(shape)) for shape in ((16, 384), (384, 16), (24, 384))}
    made = {shape: daypack.GaLore([("w", p)], rank=4) for shape, p in params.items()}
    for optimizer in made.values():
        daypack.materialize_state(optimizer)
    for shape, optimizer in made.items():
        for other in params.keys() - {shape}:
            with pytest.raises(ValueError, match="parameter w"):
                optimizer.load_state_dict(made[other].state_dict())


def test_adapter_whose_first_gradient_is_zero_takes_its_basis_later() -> None:
    """LoRA with B = 0: A has no directions at first; with eight of sixteen it then trains nearly as with all."""
    x, target = noise((64, 96), "x").float(), noise((64, 48), "y").float()

    def run(rank: int | None) -> list[float]:
        a, b = Parameter(0.1 * noise((16, 96), "a").float()), Parameter(torch.zeros(48, 16))
        optimizer = daypack.GaLore([a, b], rank=rank, update_proj_gap=5, scale=1.0, lr=1e-2, weight_decay=0.0)
        losses = []
        for step in range(120):
            optimizer.zero_grad()
            loss = (x @ a.T @ b.T - target).square().mean()
            loss.backward()
            optimizer.step()
            if rank:
                assert bool(optimizer.state[a]["basis"].any()) == (step > 0)
            losses.append(float(loss.detach()))
        return losses

    full, low = run(None), run(8)
    assert low[0] - low[-1] > 0.5 * (full[0] - full[-1])


def test_a_step_needs_two_stand_ins_and_at_a_refresh_a_square() -> None:
    p = Parameter(torch.zeros(8192, 1024))
    optimizer = daypack.GaLore([p], rank=64)
    daypack.materialize_state(optimizer)
    p.grad = noise(p.shape, "g").float()
    stand_ins, square = 2 * 64 * 8192 * 4, 1024 * 1024 * 8
    for bound in (stand_ins + 3 * square, stand_ins):
        with LiveTemporaries() as meter:
            optimizer.step()
        assert meter.peak <= bound + 12 * CHUNK


def test_flat_partitions_are_warned_of_where_they_would_be_projected() -> None:
    flat = torch.ones(4096, requires_grad=True)  # as ZeRO hands over
    for options, message in (
        ({"rank": 8}, "GaLore does not project it"),
        ({"inner": "adafactor"}, "clips by the norm of the partition"),
        ({"inner": "gefen"}, "does not know the rows of a flat partition"),
    ):
        with pytest.warns(UserWarning, match=message):
            daypack.materialize_state(daypack.GaLore([flat], **options))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        other = torch.nn.Parameter(torch.ones(8, 8))
        daypack.materialize_state(daypack.GaLore([{"params": [flat], "rank": None}, {"params": [other], "rank": 2}]))


REPLICA = """
import sys, torch, daypack
torch.manual_seed(int(sys.argv[1]))
p = torch.nn.Parameter(torch.ones(96, 64))
optimizer = daypack.GaLore([p], rank=8, update_proj_gap=2)
for step in range(5):
    p.grad = torch.randn(96, 64, generator=torch.Generator().manual_seed(step))
    optimizer.step()
import hashlib
print(hashlib.sha256(p.detach().numpy().tobytes() + optimizer.state[p]["basis"].numpy().tobytes()).hexdigest())
"""


def test_processes_with_other_seeds_agree() -> None:
    first, second = (python(REPLICA, seed) for seed in "12")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert first.stdout == second.stdout != ""
