"""Adam-mini against its textbook twin, and beside the authors' package where that is installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import Parameter

import daypack
from daypack.lab.models import build_model

from ..reference.adam_mini import AdamMini, row_groups
from .scene import gradient, noise, parameters, train, values


def runs(*sizes: tuple[int, int]) -> list[list[int]]:
    """Groups of consecutive lines: (lines, lines per group), the last of a run shorter."""
    groups, start = [], 0
    for lines, size in sizes:
        groups += [list(range(first, min(first + size, start + lines))) for first in range(start, start + lines, size)]
        start += lines
    return groups


PARTITIONS: dict[str, tuple[str, list[list[int]], int]] = {
    "row": ("row", runs((24, 1)), 0),
    "head": ("head:8", runs((24, 8)), 0),
    "ragged": ("head:7", runs((24, 7)), 0),
    "tensor": ("tensor", runs((24, 24)), 0),
    "column": ("column", runs((30, 1)), 1),
    "transposed qkv": ("column:12x4,12x4,6x1", runs((12, 4), (12, 4), (6, 1)), 1),
    "qkv": ("row:12x4,6x3,6x1", runs((12, 4), (6, 3), (6, 1)), 0),
    "interleaved": ("row:4x4,2x2,2x1", runs(*[(4, 4), (2, 2), (2, 1)] * 3), 0),
}
HYPER: list[dict[str, Any]] = [{}, {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}]


@pytest.mark.parametrize("hyper", HYPER, ids=["defaults", "all-changed"])
@pytest.mark.parametrize("name", PARTITIONS)
def test_adam_mini_is_its_twin(name: str, hyper: dict[str, Any]) -> None:
    rule, groups, axis = PARTITIONS[name]
    params = parameters(torch.float64, {"w": (24, 30)})
    optimizer = daypack.AdamMini(params.items(), partition=[("w", rule)], **hyper)
    twin = AdamMini(row_groups((24, 30), groups, axis), **hyper)
    expected = values(params)["w"].numpy()
    for step in range(5):
        train(optimizer, params, [step])
        expected = twin.step(expected, gradient("w", (24, 30), step).numpy())
        np.testing.assert_allclose(params["w"].detach().numpy(), expected, rtol=1e-11)
    state = optimizer.state[params["w"]]
    stored = state["exp_avg_sq_row" if axis == 0 else "exp_avg_sq_col"]
    for group, v in zip(groups, twin.v, strict=True):
        np.testing.assert_allclose(stored[group].numpy(), v, rtol=1e-12)


def test_a_vector_and_a_dense_rule_are_adamw() -> None:
    ours, theirs = (parameters(torch.float64, {"w": (24, 30), "b": (24,)}) for _ in range(2))
    optimizer = daypack.AdamMini(ours.items(), partition=[("w", "dense")])
    reference = torch.optim.AdamW(theirs.values())
    train(optimizer, ours, range(5))
    train(reference, theirs, range(5))
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-12, atol=1e-14)


def test_first_moment_in_8_bits() -> None:
    """The second moment is the same to the bit, the path that of the dense first moment to 2 %."""
    dense, coded = parameters(shapes={"w": (64, 512)}), parameters(shapes={"w": (64, 512)})
    first = daypack.AdamMini(dense.values())
    second = daypack.AdamMini(coded.values(), bits=8)
    train(first, dense, range(10))
    train(second, coded, range(10))
    start = parameters(shapes={"w": (64, 512)})["w"]
    assert torch.equal(first.state[dense["w"]]["exp_avg_sq_row"], second.state[coded["w"]]["exp_avg_sq_row"])
    assert second.state[coded["w"]]["exp_avg_codes"].dtype == torch.uint8
    distance = (dense["w"] - coded["w"]).norm() / (dense["w"] - start).norm()
    assert 0 < distance < 0.02, distance


class Layer(nn.Module):
    """One layer under the names that the authors' package looks for; hidden size 32, 4 heads, 2 for key and value."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.q_proj = nn.Linear(32, 32)
        self.k_proj = nn.Linear(32, 16, bias=False)
        self.v_proj = nn.Linear(32, 16, bias=False)
        self.o_proj = nn.Linear(32, 32, bias=False)
        self.mlp = nn.Linear(32, 48, bias=False)
        self.norm = nn.LayerNorm(32)
        self.num_heads = 4
        for name, p in self.named_parameters():
            p.data = (0.1 * noise(p.shape, "layer", name)).double()


def test_beside_the_authors_package() -> None:
    """The same numbers; but norms, where it shares one second moment, need that rule, and are not decayed."""
    authors = pytest.importorskip("adam_mini", reason="adam-mini is not installed").Adam_mini
    ours, theirs = Layer(), Layer()
    decayed = {name: not ("norm" in name or "bias" in name) for name, _ in ours.named_parameters()}
    groups = [
        {"params": [(n, p) for n, p in ours.named_parameters() if decayed[n] == kind], "weight_decay": 0.1 * kind}
        for kind in (True, False)
    ]
    optimizer = daypack.AdamMini(groups, num_heads=4, partition=[("norm.weight", "tensor")])
    options: dict[str, Any] = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "weight_decay": 0.1, "verbose": False}
    reference = authors(theirs.named_parameters(), **options)
    for step in range(10):
        for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            p.grad = gradient(name, p.shape, step)
            q.grad = p.grad.clone()
        optimizer.step()
        reference.step()
    for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-11, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", ["adam_mini", "adamw8bit"])
def test_a_short_run_of_a_language_model_stays_near_adamw(name: str) -> None:
    """Forty steps of the demo's smallest model on a text with structure, the same batches for all."""

    def loss(which: str) -> float:
        model = build_model("tiny", seed=0)
        optimizer = daypack.create(which, daypack.param_groups(model, weight_decay=0.1), lr=3e-3)
        text = (torch.arange(4096) * 7 % 64 + 32 * (torch.arange(4096) % 3)) % 256
        for step in range(40):
            starts = torch.randint(0, 4000, (8,), generator=torch.Generator().manual_seed(step))
            value = model.loss(torch.stack([text[start : start + 65] for start in starts.tolist()]))
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
        return value.item()

    reference = loss("adamw")
    assert reference < 4.0
    assert loss(name) < reference + 0.35


def test_experts_step_like_separate_matrices() -> None:
    stack = Parameter(noise((3, 16, 40), "stack").double())
    apart = [Parameter(part.detach().clone()) for part in stack]
    together = daypack.AdamMini([("experts", stack)], partition=[("experts", "head:4")])
    each = daypack.AdamMini([(f"expert.{i}", p) for i, p in enumerate(apart)], partition=[("expert.*", "head:4")])
    for step in range(3):
        stack.grad = gradient("stack", stack.shape, step)
        for p, g in zip(apart, stack.grad, strict=True):
            p.grad = g.clone()
        together.step()
        each.step()
    torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in apart]), rtol=1e-12, atol=1e-14)
