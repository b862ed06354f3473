"""State is planned from shapes by the code that allocates it, so the plan is what training takes, to the byte."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import daypack
from daypack.lab.models import Transformer, build_model, model_config
from tests.planner import shapes

#: Bytes of state per parameter, everything counted. The table in docs/memory.md shows the same numbers.
ARCHITECTURES = {
    "GPT-2 (124 M)": (shapes.gpt2(), 124_439_808, 1.0215),
    "Llama 7 B": (shapes.llama(), 6_738_415_616, 1.0096),
    "Llama-like with 8 of 32 key-value heads": (shapes.llama(kv=1024), 5_933_109_248, 1.0098),
    "Mixture of experts, 8 x 2048 x 1408 a layer": (shapes.mixture(), 1_441_597_440, 1.0123),
    "ResNet-50": (shapes.resnet50(), 25_557_032, 1.0379),
    "LoRA r = 4": (shapes.lora(4), 4_194_304, 2.3176),
    "LoRA r = 8": (shapes.lora(8), 8_388_608, 1.6613),
    "LoRA r = 16": (shapes.lora(16), 16_777_216, 1.3331),
    "LoRA r = 64": (shapes.lora(64), 67_108_864, 1.0869),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_known_architectures(name):
    architecture, parameters, bytes_per_param = ARCHITECTURES[name]
    estimate = daypack.estimate_state(architecture)
    assert estimate.parameters == parameters
    assert estimate.bytes_per_param == pytest.approx(bytes_per_param, abs=6e-5)


#: The same for the other optimizers, all parameters in 8 bits where there is a choice (embeddings as well).
OTHERS = {
    "GPT-2 (124 M)": (2.0371, 1.0185, 4.0082, 1.0194),
    "Llama 7 B": (2.0315, 1.0157, 4.001, 1.009),
    "Mixture of experts, 8 x 2048 x 1408 a layer": (2.0323, 1.0161, 4.0024, 1.0106),
    "ResNet-50": (2.0446, 1.0223, 4.0128, 1.0293),
    "LoRA r = 4": (3.0159, 1.5081, 4.5007, 1.8171),
    "LoRA r = 16": (2.2657, 1.1329, 4.1255, 1.2076),
    "LoRA r = 64": (2.0781, 1.0391, 4.0318, 1.0552),
}
OPTIMIZERS = (("adamw8bit", {}), ("sgd8bit", {}), ("adam_mini", {}), ("adam_mini", {"bits": 8}))


@pytest.mark.parametrize("name", OTHERS)
def test_the_other_optimizers_on_known_architectures(name):
    shapes_ = ARCHITECTURES[name][0]
    found = [daypack.estimate_state(shapes_, optimizer=which, **options) for which, options in OPTIMIZERS]
    assert [estimate.bytes_per_param for estimate in found] == pytest.approx(OTHERS[name], abs=6e-5)
    assert daypack.estimate_state(shapes_, optimizer="adam8bit") == found[0]
    assert daypack.estimate_state(shapes_, optimizer="lion8bit") == found[1]


@pytest.mark.parametrize("optimizer", ["adamw8bit", "adam8bit", "sgd8bit", "lion8bit", "adam_mini"])
def test_plans_of_the_other_optimizers_equal_allocation_to_the_byte(optimizer):
    shapes_ = [(64, 300), (5000,), (70,), (), (4, 24, 64), (64, 1, 4), (4096, 1), (0, 8), (300, 17)]
    live = daypack.create(optimizer, [torch.zeros(shape) for shape in shapes_])
    for p in live.param_groups[0]["params"]:
        p.requires_grad_(True)
    live.materialize_state()
    planned = daypack.estimate_state(shapes_, optimizer=optimizer)
    assert planned.total_bytes == daypack.state_report(live).total_bytes


@pytest.mark.parametrize(("preset", "hidden", "bound"), [("large", 1024, 1.02), ("medium", 256, 1.06)])
def test_the_demo_architecture_keeps_the_promise(preset, hidden, bound):
    config = model_config(preset)
    assert config.hidden == hidden
    with torch.device("meta"):
        model = Transformer(config)
    assert daypack.estimate_state([p.shape for p in model.parameters()]).bytes_per_param <= bound


@pytest.mark.parametrize("second_moment", ["factored", "blocks"])
def test_large_matrices_keep_the_promise_on_any_shape(second_moment):
    """Both dims of 64 or more in 99 % of the elements: at most 1.12 bytes per parameter."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        big = [tuple(torch.randint(64, 3000, (2,), generator=generator).tolist()) for _ in range(8)]
        big = [shape for shape in big if shape[0] * shape[1] >= 64 * 500] or [(64, 500)]
        vectors = [(sum(rows * cols for rows, cols in big) // 200,)]
        assert daypack.estimate_state(big, second_moment=second_moment).bytes_per_param <= 1.12
        assert daypack.estimate_state(big + vectors, second_moment=second_moment).bytes_per_param <= 1.12 + 8 / 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("second_moment", ["factored", "blocks"])
def test_plan_equals_allocation_to_the_byte(dtype, second_moment):
    model = nn.Sequential(
        nn.Conv2d(3, 16, 5),
        nn.Linear(300, 70),
        nn.LayerNorm(70),
        nn.Embedding(211, 96),
        nn.Linear(2, 2),
        nn.Conv1d(64, 64, 4, groups=64),
    ).to(dtype)
    optimizer = daypack.Gefen(model.parameters(), second_moment=second_moment)
    daypack.materialize_state(optimizer)
    planned = daypack.estimate_state([p.shape for p in model.parameters()], dtype, second_moment=second_moment)
    report = daypack.state_report(optimizer)
    assert planned.total_bytes == report.total_bytes
    assert planned.parameters == report.parameters


def test_plan_equals_measurement_after_training():
    model = build_model("tiny", seed=0)
    optimizer = daypack.create("gefen", daypack.param_groups(model))
    for step in range(3):
        model.loss(torch.randint(256, (2, 33), generator=torch.Generator().manual_seed(step))).backward()
        optimizer.step()
    planned = daypack.estimate_state([p.shape for p in model.parameters()])
    assert planned.total_bytes == daypack.state_report(optimizer).total_bytes


def test_a_matrix_is_never_stored_in_more_bytes_than_adamw_takes():
    for shape in [(2, 2), (1, 5), (16, 16), (12, 12), (3, 700), (700, 1), (5, 3, 3, 3), (40, 40)]:
        assert daypack.estimate_state([shape]).total_bytes <= 4 + 8 * torch.Size(shape).numel()


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="block_size"):
        daypack.estimate_state([(4, 4)], block_size=0)
    with pytest.raises(ValueError, match=r"at least 0, got \(64, -300\)"):
        daypack.estimate_state([(64, -300)])
    with pytest.raises(ValueError, match="torch's own"):
        daypack.estimate_state([(4, 4)], optimizer="adamw")
    with pytest.raises(ValueError, match="unknown optimizer 'adamini'"):
        daypack.estimate_state([(4, 4)], optimizer="adamini")
    for wrong in (7, [3, 4], ["ab"], torch.nn.Linear(2, 2), None):
        with pytest.raises(ValueError, match=r"takes shapes, such as \[p\.shape for p in model\.parameters\(\)\], got"):
            daypack.estimate_state(wrong)
    with pytest.raises(ValueError, match=r"dtype of estimate_state must be a torch\.dtype, got 'bf16'"):
        daypack.estimate_state([(4, 4)], "bf16")
    with pytest.raises(ValueError, match="at most 1,048,576, got 1,000,000,000,000"):
        daypack.estimate_state([(4, 4)], block_size=10**12)
    with pytest.raises(TypeError, match="no_such"):
        daypack.estimate_state([(4, 4)], no_such=1)
