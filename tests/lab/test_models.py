from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from daypack.lab.models import (
    TransformerConfig,
    build_model,
    model_config,
    presets,
    rotary_table,
    rotate,
)


def elements(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_weights_depend_on_the_seed_only_and_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    one, same, other = build_model("tiny", 3), build_model("tiny", 3), build_model("tiny", 4)
    assert torch.equal(before, torch.get_rng_state())
    for name, weight in one.state_dict().items():
        assert torch.equal(weight, same.state_dict()[name])
        assert weight.ndim == 1 or not torch.equal(weight, other.state_dict()[name])


@pytest.mark.parametrize(
    ("name", "low", "high"),
    [("tiny", 0.1e6, 0.2e6), ("small", 0.7e6, 0.9e6), ("medium", 5e6, 7e6), ("large", 1e8, 2e8)],
)
def test_presets_have_the_sizes_they_promise(name: str, low: float, high: float) -> None:
    from daypack.lab.models import Transformer

    with torch.device("meta"):
        assert low < elements(Transformer(presets()[name])) < high


def test_every_preset_has_fewer_key_heads_than_query_heads_and_an_untied_head() -> None:
    for config in presets().values():
        assert config.kv_heads < config.heads
        assert not config.tied


def test_a_token_sees_only_what_precedes_it() -> None:
    model, text = build_model("tiny", 0), tokens(2, 12)
    changed = text.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    before, after = model(text), model(changed)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_rotary_positions_are_relative() -> None:
    cos, sin = rotary_table(20, 8, 10_000.0, torch.device("cpu"))
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def score(i: int, j: int) -> float:
        return float(rotate(query, cos[i], sin[i]) @ rotate(key, cos[j], sin[j]))

    assert score(3, 1) == pytest.approx(score(17, 15), rel=1e-5)
    assert score(3, 1) != pytest.approx(score(3, 2), rel=1e-3)


def test_initial_loss_is_that_of_a_uniform_guess() -> None:
    assert float(build_model("tiny", 0).loss(tokens(8, 33)).detach()) == pytest.approx(math.log(256), abs=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_loss_is_the_cross_entropy_of_the_next_token(dtype: torch.dtype) -> None:
    model, text = build_model("tiny", 0, dtype=dtype), tokens(2, 9)
    logits = model(text)[:, :-1].double()
    expected = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
    loss = model.loss(text)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(loss.double(), expected, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=0)
    loss.backward()
    assert all(p.grad is not None and p.grad.dtype == dtype and bool(p.grad.any()) for p in model.parameters())


def test_a_tied_head_is_the_embedding() -> None:
    model = build_model(model_config("tiny", tied=True), 0)
    assert model.head.weight is model.embedding.weight
    assert elements(model) == elements(build_model("tiny", 0)) - 256 * 64


def test_bad_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="unknown model 'huge'; choose one of tiny, small"):
        build_model("huge", 0)
    with pytest.raises(ValueError, match="heads=4 must be a multiple of kv_heads=3"):
        TransformerConfig(layers=1, hidden=64, heads=4, kv_heads=3, mlp_hidden=8)
    with pytest.raises(ValueError, match="hidden=60"):
        TransformerConfig(layers=1, hidden=60, heads=4, kv_heads=2, mlp_hidden=8)
    with pytest.raises(ValueError, match="at least 1"):
        TransformerConfig(layers=0, hidden=64, heads=4, kv_heads=2, mlp_hidden=8)
