"""State that is complete in shape and still must not be loaded, beyond what the conformance suite covers."""

import copy
import warnings

import pytest
import torch

import daypack

NAMES = ("first", "second", "vector")


def trained(seed=0, steps=3):
    torch.manual_seed(seed)
    params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((64, 300), (64, 300), (50,))]
    optimizer = daypack.Gefen(zip(NAMES, params, strict=True), lr=1e-2)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
    return optimizer, params


def coupled(sd):
    sd["param_groups"][0].update(decoupled_weight_decay=False, weight_decay=0.1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda sd: sd["state"][2]["exp_avg_sq"].neg_(), "vector is damaged: exp_avg_sq holds a negative value"),
        (lambda sd: sd["state"][0].update(step=torch.tensor(0.0)), "first is damaged: step is 0 though"),
        (lambda sd: sd["state"][0].update(step="three"), "step of parameter first must be a whole number"),
        (lambda sd: sd["state"][0].update(step=torch.ones(2)), "step of parameter first must be a whole number"),
        (lambda sd: sd["state"][0].update(step=2.5), "step of parameter first must be a whole number"),
        (lambda sd: sd["param_groups"][0].update(params="abc"), "must be distinct, got 'abc'"),
        (lambda sd: sd["param_groups"][0].update(params=[0, 0, 2]), "must be distinct"),
        (coupled, "couples weight decay"),
    ],
)
def test_impossible_state_is_refused_and_nothing_changes(damage, message):
    saved = copy.deepcopy(trained()[0].state_dict())
    optimizer, _ = trained(seed=1)
    before = copy.deepcopy(optimizer.state_dict())
    damage(saved)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, entry in before["state"].items():
        assert all(torch.equal(after["state"][key][name], value) for name, value in entry.items())


@pytest.mark.parametrize("remove", [lambda s: s.pop(1), lambda s: s.update({1: None})])
def test_a_missing_entry_beside_others_is_warned_of(remove):
    saved = copy.deepcopy(trained()[0].state_dict())
    remove(saved["state"])
    optimizer, params = trained(seed=1)
    with pytest.warns(UserWarning, match="no state of parameter second; its moments restart"):
        optimizer.load_state_dict(saved)
    assert params[1] not in optimizer.state
    assert optimizer.state[params[0]]["step"] == 3


@pytest.mark.parametrize("steps", [0, 3])
def test_complete_state_and_state_before_the_first_step_load_quietly(steps):
    optimizer, _ = trained(seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(trained(steps=steps)[0].state_dict())


def test_a_coupled_group_without_decay_is_the_same_optimizer():
    saved = copy.deepcopy(trained()[0].state_dict())
    saved["param_groups"][0].update(decoupled_weight_decay=False, weight_decay=0.0)
    optimizer, params = trained(seed=1)
    optimizer.load_state_dict(saved)
    assert optimizer.state[params[2]]["step"] == 3


@pytest.mark.parametrize("name", ["gefen", "adamw8bit", "adam_mini", "adafactor", "lamb", "galore"])
def test_state_saved_on_another_device_goes_where_the_parameters_are(name):
    """Codebooks too; single numbers, such as the count of steps, stay on the CPU, where Python reads them."""
    params = [torch.nn.Parameter(torch.randn(64, 300))]
    options = {"rank": 4} if name == "galore" else {}
    optimizer = daypack.create(name, params, lr=1e-2, **options)
    params[0].grad = torch.randn_like(params[0])
    optimizer.step()
    other = daypack.create(name, [torch.nn.Parameter(params[0].detach().to("meta"))], lr=1e-2, **options)
    other.load_state_dict(optimizer.state_dict())
    (state,) = other.state.values()
    assert len(state) > 1
    assert {key: value.device.type for key, value in state.items()} == {
        key: "meta" if value.dim() else "cpu" for key, value in optimizer.state[params[0]].items()
    }
