"""Activations are measured without memory: against autograd's own account of what it saves, and against the formula."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

import daypack
from daypack.lab.models import Transformer, model_config
from daypack.planner.activations import ActivationPlanner, measure_activations
from daypack.planner.live_tensors import LiveTensors
from daypack.planner.model import from_module, from_shapes
from daypack.planner.transformer import TransformerShape, llama_like


def on_meta(build):
    with torch.device("meta"):
        return build()


def numbers(*shape):
    return lambda batch, sequence: (torch.zeros(batch, *shape, device="meta"),)


def ids(batch, sequence):
    return (torch.zeros(batch, sequence, dtype=torch.long, device="meta"),)


def perceptron():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8))


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Flatten())


def encoder():
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(64, 4, 128, batch_first=True), 2, enable_nested_tensor=False
    )


@pytest.mark.parametrize(
    ("build", "inputs"), [(perceptron, numbers(64)), (convolutions, numbers(3, 16, 16)), (encoder, numbers(10, 64))]
)
def test_what_is_alive_is_what_autograd_saved(build, inputs):
    module = on_meta(build).train()
    own = {t.untyped_storage()._cdata for t in (*module.parameters(), *module.buffers())}
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            saved[storage._cdata] = storage
        return tensor

    given = inputs(4, 10)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        output = module(*given)
    expected = sum(storage.nbytes() for storage in saved.values())
    found = measure_activations(module, inputs, 4, 10, flash=False)
    # The loss, and an input or output that nothing saved, are alive too.
    slack = output.untyped_storage().nbytes() + given[0].untyped_storage().nbytes() + 64
    assert expected <= found.saved <= expected + slack
    assert found.peak >= found.saved
    assert found.how == "measured"


def test_a_perceptron_by_hand():
    """Kept: the input, the outputs of ReLU and tanh, and the loss."""
    found = measure_activations(on_meta(perceptron), numbers(64), 5, 1)
    assert found.saved == 4 * (5 * (64 + 256 + 256) + 1)


def test_flash_attention_keeps_no_matrix_and_is_undone():
    before = nn.functional.scaled_dot_product_attention
    module = on_meta(lambda: Transformer(model_config("tiny")))
    planner = {flash: measure_activations(module, ids, 2, 512, flash=flash) for flash in (True, False)}
    assert nn.functional.scaled_dot_product_attention is before
    matrix = 4 * 2 * 512 * 512 * model_config("tiny").layers
    assert planner[False].saved - planner[True].saved > matrix


def test_live_tensors_counts_storages_not_views():
    x = torch.empty(100, device="meta")
    with LiveTensors([x]) as live:
        y = x + 1
        z = y.view(10, 10)[3:]
        x.mul_(2)
        assert live.bytes == 400
        del y
        assert live.bytes == 400
        del z
        assert live.bytes == 0
        assert bool((x == 0).all())  # answered for the model's short cuts
    assert live.peak == 400


def test_a_convolution_holds_another_copy_of_its_weight_while_it_runs():
    """Forward: output, weight once more. Backward: both gradients, and the weight's in the library's layout."""
    model, x = on_meta(lambda: nn.Conv2d(32, 48, 3, padding=1, bias=False)), torch.empty(2, 32, 4, 4, device="meta")
    weight, output, inputs = 4 * 48 * 32 * 9, 4 * 2 * 48 * 16, 4 * 2 * 32 * 16
    with LiveTensors([model.weight]) as live:
        y = model(x.requires_grad_())
        assert live.peak == output + weight
        assert live.bytes == output
        y.backward(torch.empty_like(y))
    assert live.peak == 2 * output + inputs + weight + weight


def test_a_module_that_cannot_be_copied_is_refused_in_one_line():
    model = nn.Linear(3, 3)
    model.lock = threading.Lock()
    for options in ({"lora_rank": 2}, {}):
        with pytest.raises(ValueError, match=r"Linear cannot be copied to plan for it .*lock"):
            daypack.plan(model, **options)


def test_between_measured_batches_a_line():
    spec = from_module(on_meta(perceptron), inputs=numbers(64))
    planner = ActivationPlanner(spec, sequence=1)
    for batch in (2, 37, 1000, 9000, 50000):
        line = planner.peak(batch)
        assert line >= planner.exactly(batch).peak - 1
        assert line == pytest.approx(planner.exactly(batch).peak, rel=0.05)


def test_a_module_that_does_not_run_says_why_and_takes_the_formula():
    class Stubborn(nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(x.sum())

    shape = TransformerShape(2, 64, 4, 4, 16, 128, 1000)
    spec = from_module(on_meta(lambda: Stubborn(8, 8)), inputs=numbers(8), transformer=shape)
    planner = ActivationPlanner(spec, sequence=16)
    assert planner.exactly(2).how == "formula"
    assert "meta tensors" in planner.problem
    assert ActivationPlanner(from_shapes([(4, 4)]), 16).exactly(1).how == "unknown"


def test_checkpointing_needs_a_module_that_can():
    planner = ActivationPlanner(from_module(on_meta(perceptron), inputs=numbers(64)), 1, checkpointing=True)
    with pytest.raises(ValueError, match="gradient_checkpointing_enable"):
        planner.exactly(1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("flash", "checkpointing"), [(True, False), (False, False), (True, True)])
def test_the_formula_is_within_its_stated_error(dtype, flash, checkpointing):
    pytest.importorskip("transformers", reason="builds Llama-like models with it")
    from daypack.planner.pretrained import from_config

    for hidden, kv in ((1024, 8), (2048, 4)):
        config = {
            "model_type": "llama", "hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "num_hidden_layers": 6,
            "num_attention_heads": hidden // 128, "num_key_value_heads": kv, "vocab_size": 16000,
        }  # fmt: skip
        spec = from_config(config, "llama")
        measured = ActivationPlanner(spec, 1024, dtype, flash, checkpointing).exactly(2)
        assert measured.how == "measured"
        assert spec.transformer is not None
        options = {"flash": flash, "checkpointing": checkpointing}
        formula = spec.transformer.peak_bytes(2, 1024, dtype.itemsize, **options)
        assert formula == pytest.approx(measured.peak, rel=0.2 if checkpointing else 0.1)
        formula = spec.transformer.saved_bytes(2, 1024, dtype.itemsize, **options)
        assert formula == pytest.approx(measured.saved, rel=0.2)


@pytest.mark.parametrize(
    ("parameters", "hidden", "layers"), [(350e6, 1536, 12), (7e9, 4096, 32), (13e9, 5120, 40), (70e9, 8192, 80)]
)
def test_the_stand_in_has_exactly_as_many_parameters_and_about_the_shape(parameters, hidden, layers):
    found, shape = llama_like(int(parameters))
    assert sum(torch.Size(size).numel() for _, size in found) == parameters
    assert shape.hidden == pytest.approx(hidden, rel=0.15)
    assert shape.layers == pytest.approx(layers, rel=0.2)
    assert sum(torch.Size(size).numel() for _, size in llama_like(1)[0]) == 1
