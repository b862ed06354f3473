"""Measured state of live optimizers."""

import pytest
import torch
from torch import nn

import daypack


def stepped(name, model, **options):
    optimizer = daypack.create(name, model.named_parameters(), lr=1e-3, **options)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    return optimizer


def test_torch_optimizers_are_measured_too():
    model = nn.Linear(30, 20)
    n = 620
    assert daypack.state_report(stepped("adamw", model)).total_bytes == 8 * n + 2 * 4
    assert daypack.state_report(stepped("sgd", model, momentum=0.9)).total_bytes == 4 * n
    assert daypack.state_report(stepped("sgd", model)).total_bytes == 0
    assert daypack.state_report(stepped("sgd", model)).bytes_per_param == 0


def test_components_add_up_and_the_table_names_everything():
    model = nn.Sequential(nn.Linear(512, 300), nn.LayerNorm(300))
    report = daypack.state_report(stepped("gefen", model))
    assert [entry.name for entry in report.entries] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert report.entries[0].components == {
        "step": 4,
        "exp_avg_codes": 300 * 512,
        "exp_avg_scale": 2 * 300 * 2,
        "exp_avg_codebook": 1024,
        "exp_avg_sq_row": 4 * 300,
        "exp_avg_sq_col": 4 * 512,
    }
    assert sum(report.components.values()) == report.total_bytes == sum(entry.total_bytes for entry in report.entries)
    assert report.parameters == sum(p.numel() for p in model.parameters())
    text = str(report)
    for word in ("0.weight", "300x512", "exp_avg_codes", f"{report.total_bytes:,}", f"{report.bytes_per_param:.3f}"):
        assert word in text


def test_shared_storage_is_counted_once_and_frozen_parameters_not_at_all():
    model = nn.Linear(4, 3)
    model.bias.requires_grad_(False)
    optimizer = stepped("adamw", model)
    del optimizer.state[model.bias]
    optimizer.state[model.weight]["alias"] = optimizer.state[model.weight]["exp_avg"]
    report = daypack.state_report(optimizer)
    assert [entry.name for entry in report.entries] == ["weight"]
    assert report.total_bytes == 2 * 48 + 4


@pytest.mark.parametrize("wrong", [nn.Linear(2, 2), {}, None, [torch.ones(2)]])
def test_only_optimizers_are_measured(wrong):
    with pytest.raises(ValueError, match=r"takes a torch\.optim\.Optimizer, got (Linear|dict|NoneType|list)"):
        daypack.state_report(wrong)


def test_materialize_names_the_remedy_for_other_optimizers():
    with pytest.raises(ValueError, match="get_optimizer_state_dict"):
        daypack.materialize_state(torch.optim.AdamW([torch.zeros(2, requires_grad=True)]))
