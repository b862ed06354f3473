"""LAMB against numpy in fp64 and against timm's, and what its ratio does at zero."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import daypack

from ..conformance.scene import noise
from ..reference.layerwise import Lamb as Twin

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "decay": {"weight_decay": 0.2, "lr": 1e-2},
    "no decay": {"weight_decay": 0.0, "betas": (0.8, 0.9), "eps": 1e-3},
    "exempt": {"trust_ratio": False, "weight_decay": 0.2},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("shape", [(40, 24), (4, 6, 20), (50,), ()], ids=str)
def test_follows_the_paper_in_double_precision(shape: tuple[int, ...], options: dict[str, Any]) -> None:
    p = Parameter(noise(shape, "p"))
    optimizer, twin, expected = daypack.LAMB([p], **options), Twin(**options), p.detach().numpy().copy()
    for step in range(8):
        p.grad = noise(shape, "g", step)
        optimizer.step()
        expected = twin.step(expected, p.grad.numpy())
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-11, atol=1e-13)


def timm_lamb() -> Any:
    """timm's class, without the rest of timm, which wants torchvision."""
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        pytest.skip("timm is not installed")
    folder = Path(spec.origin).parent / "optim"
    package = importlib.util.module_from_spec(
        importlib.util.spec_from_loader("timm_optim_alone", None, is_package=True)
    )
    package.__path__ = [str(folder)]
    sys.modules["timm_optim_alone"] = package
    return importlib.import_module("timm_optim_alone.lamb").Lamb


def test_equals_timms() -> None:
    """timm clips the norm of all gradients at 1 by default, which is asked not to happen here."""
    lamb = timm_lamb()
    for decay in (0.0, 0.1):
        p, q = (Parameter(noise((40, 24), "p").float()) for _ in range(2))
        ours = daypack.LAMB([p], lr=1e-2, weight_decay=decay, eps=1e-6)
        theirs = lamb([q], lr=1e-2, weight_decay=decay, eps=1e-6, max_grad_norm=None, always_adapt=True)
        for step in range(10):
            p.grad = q.grad = noise((40, 24), "g", step).float()
            ours.step()
            theirs.step()
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_ratio_is_one_where_a_norm_is_zero() -> None:
    zero, still = Parameter(torch.zeros(8, 4)), Parameter(torch.ones(8, 4))
    optimizer = daypack.LAMB([zero, still], lr=0.1, weight_decay=0.0)
    zero.grad, still.grad = torch.ones(8, 4), torch.zeros(8, 4)
    optimizer.step()
    torch.testing.assert_close(zero.detach(), torch.full((8, 4), -0.1))
    assert torch.equal(still.detach(), torch.ones(8, 4))


def test_exemption_is_a_group_option_and_may_change() -> None:
    """An exempt group is AdamW; the option decides no layout, so it is read at each step."""
    p, q, r = (Parameter(torch.full((8, 4), 5.0)) for _ in range(3))
    lamb = daypack.LAMB([{"params": [p]}, {"params": [q], "trust_ratio": False}], lr=0.1)
    adamw = torch.optim.AdamW([r], lr=0.1)
    for step in range(3):
        p.grad = q.grad = r.grad = noise((8, 4), step).float()
        lamb.step()
        adamw.step()
    torch.testing.assert_close(q, r)
    assert (5 - p.detach()).norm() > 2 * (5 - q.detach()).norm()
    before = q.detach().clone()
    lamb.param_groups[1]["trust_ratio"] = True
    lamb.step()
    torch.testing.assert_close((before - q.detach()).norm(), 0.1 * before.norm())


TABLE = {(32, "dense"): 8.0, (32, "factored"): 4.0, (8, "dense"): 5.0, (8, "factored"): 1.0}


@pytest.mark.parametrize(("bits", "second_moment"), TABLE)
def test_every_choice_of_moments_follows_the_exact_one(bits: int, second_moment: Any) -> None:
    p = Parameter(noise((512, 1024), "p").float())
    optimizer = daypack.LAMB([p], lr=1e-2, bits=bits, second_moment=second_moment)
    twin, expected = Twin(lr=1e-2), p.detach().double().numpy()
    start = expected
    scale = torch.exp(noise((512, 1), "rows")) * torch.exp(noise((1, 1024), "columns"))  # g^2 of rank one on average
    for step in range(8):
        p.grad = (scale * noise((512, 1024), "g", step)).float()
        optimizer.step()
        expected = twin.step(expected, p.grad.double().numpy())
    error = 0.6 if second_moment == "factored" else 0.06 if bits == 8 else 1e-5
    moved, wanted = p.detach().double().numpy() - start, expected - start
    assert np.linalg.norm(moved - wanted) < error * np.linalg.norm(wanted)
    assert abs(np.linalg.norm(moved) / np.linalg.norm(wanted) - 1) < 0.05
    report = daypack.state_report(optimizer)
    assert TABLE[bits, second_moment] <= report.bytes_per_param < TABLE[bits, second_moment] + 0.03


def test_flat_partitions_are_warned_of_once() -> None:
    flat = torch.ones(4096, requires_grad=True)  # as ZeRO hands over
    flat.grad = torch.ones(4096)
    optimizer = daypack.LAMB([flat])
    with pytest.warns(UserWarning, match="ratio of the partition") as caught:
        optimizer.step()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
