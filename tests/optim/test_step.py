"""Parameters at the edge of a step: frozen ones with a gradient, late ones, and replicas under DDP's rules."""

import warnings

import pytest
import torch

import daypack


@pytest.mark.parametrize("second_moment", ["factored", "blocks"])
def test_a_frozen_parameter_that_still_has_a_gradient_is_stepped_as_by_adamw(second_moment):
    moved = {}
    for build in (torch.optim.AdamW, lambda ps, **kw: daypack.Gefen(ps, second_moment=second_moment, **kw)):
        p = torch.nn.Parameter(torch.ones(40, 64))
        p.grad = torch.ones(40, 64)
        p.requires_grad_(False)
        build([p], lr=0.1).step()
        moved[build] = p.detach().clone()
    adamw, gefen = moved.values()
    assert torch.allclose(adamw, gefen, rtol=1e-5)
    assert (gefen < 1).all()


def test_a_late_parameter_takes_over_the_first_codebook():
    torch.manual_seed(0)
    early, late = (torch.nn.Parameter(torch.randn(64, 128)) for _ in range(2))
    optimizer = daypack.Gefen([late, early], lr=1e-3)
    early.grad = torch.randn(64, 128).pow(3)
    optimizer.step()
    learned = optimizer.state[early]["exp_avg_codebook"].clone()
    assert not optimizer.state[late]["exp_avg_codebook"].any()
    early.grad, late.grad = torch.randn(64, 128), torch.rand(64, 128)
    optimizer.step()
    assert torch.equal(optimizer.state[late]["exp_avg_codebook"], learned)
    assert torch.equal(optimizer.state[early]["exp_avg_codebook"], learned)
    assert (optimizer.state[late]["step"], optimizer.state[early]["step"]) == (1, 2)


def test_replicas_with_equal_gradients_stay_equal_whatever_the_global_seed():
    replicas = []
    for seed in (1, 2):
        p = torch.nn.Parameter(torch.ones(50, 300, dtype=torch.bfloat16))
        optimizer = daypack.Gefen([p], lr=1e-2)
        gradients = torch.Generator().manual_seed(0)
        torch.manual_seed(seed)
        for _ in range(5):
            torch.rand(seed)  # moves the global generator differently on each replica
            p.grad = torch.randn(50, 300, generator=gradients).to(torch.bfloat16)
            optimizer.step()
        replicas.append((p.detach(), optimizer.state[p]))
    (p, state), (q, other) = replicas
    assert torch.equal(p, q)
    assert all(torch.equal(state[key], other[key]) for key in state)


@pytest.mark.parametrize("second_moment", ["factored", "blocks"])
@pytest.mark.parametrize("magnitude", [1e-40, 1e40, 1e100])
def test_fp64_gradients_beyond_the_range_of_fp32_are_stepped(second_moment, magnitude):
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(64, 320, dtype=torch.float64))
    p.grad = torch.randn(64, 320, dtype=torch.float64) * magnitude
    daypack.Gefen([p], lr=1e-2, eps=0.0, weight_decay=0.0, second_moment=second_moment).step()
    assert (p.sign() == -p.grad.sign()).all()
    assert 1e-3 < p.abs().mean() < 3e-2  # the step does not depend on the gradient's scale


@pytest.mark.parametrize(
    "change",
    [
        lambda group, p: group.update(block_size=64),
        lambda group, p: group.update(second_moment="blocks"),
        lambda group, p: setattr(p, "data", p.data.double()),
    ],
    ids=["block size", "second moment", "float64"],
)
def test_a_changed_layout_is_refused_before_anything_moves(change):
    torch.manual_seed(0)
    vector, matrix = torch.nn.Parameter(torch.randn(50)), torch.nn.Parameter(torch.randn(64, 300))
    optimizer = daypack.Gefen([{"params": [("vector", vector)]}, {"params": [("matrix", matrix)]}], lr=1e-2)
    for p in (vector, matrix):
        p.grad = torch.randn_like(p)
    optimizer.step()
    change(optimizer.param_groups[1], matrix)
    vector.grad, matrix.grad = torch.randn_like(vector), torch.randn_like(matrix)
    before = vector.detach().clone(), matrix.detach().clone()
    with pytest.raises(ValueError, match="state of parameter matrix is not laid out"):
        optimizer.step()
    assert torch.equal(vector, before[0])
    assert torch.equal(matrix, before[1])
    assert optimizer.state[vector]["step"] == optimizer.state[matrix]["step"] == 1


def test_skips_are_counted_under_the_parameters_own_name():
    p = torch.nn.Parameter(torch.ones(3, 4))
    optimizer = daypack.Gefen([("encoder.weight", p)])
    p.grad = torch.full((3, 4), float("nan"))
    with pytest.warns(UserWarning, match=r"encoder\.weight"):
        optimizer.step()
    optimizer.step()
    assert optimizer.skipped == {"encoder.weight": 2}


def test_a_diagonal_gradient_moves_at_most_by_the_root_of_its_width():
    """The rank-1 estimate's worst case: n times too small a v on the diagonal, so steps of sqrt(n) lr."""
    n = 64
    p = torch.nn.Parameter(torch.zeros(n, n))
    optimizer = daypack.Gefen([p], lr=1.0, weight_decay=0.0)
    for _ in range(3):
        before = p.detach().clone()
        p.grad = torch.eye(n)
        optimizer.step()
        move = (p.detach() - before).abs()
        assert torch.allclose(move.diagonal(), torch.full((n,), n**0.5), rtol=0.02)
        assert not move.fill_diagonal_(0).any()


@pytest.mark.parametrize(("name", "bound"), [("gefen", 1.06), ("adam_mini", 4.05), ("adamw8bit", 2.05)])
def test_a_flat_partition_as_zero_hands_over_is_compressed(name, bound):
    """A plain vector of many parameters: flat blocks, said once; saved, loaded and continued."""
    flat = torch.randn(100_003, generator=torch.Generator().manual_seed(1))
    adamw = torch.nn.Parameter(flat.clone())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours, theirs = daypack.create(name, [flat]), torch.optim.AdamW([adamw])
        for step in range(20):
            g = torch.randn(100_003, generator=torch.Generator().manual_seed(step)) * 0.01
            flat.grad, adamw.grad = g, g.clone()
            ours.step()
            theirs.step()
    assert len([w for w in caught if "flat partition" in str(w.message)]) == (name != "adamw8bit")
    held = sum(v.numel() * v.element_size() for v in ours.state[flat].values())
    assert held <= bound * flat.numel()
    moved = (adamw.detach() - torch.randn(100_003, generator=torch.Generator().manual_seed(1))).norm()
    assert (flat - adamw.detach()).norm() < 0.4 * moved
    again = flat.clone()
    other = daypack.create(name, [again])
    other.load_state_dict(ours.state_dict())
    again.grad = flat.grad.clone()
    ours.step()
    other.step()
    assert torch.equal(flat, again)
