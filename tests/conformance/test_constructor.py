"""Constructors, options and groups: torch's contract, honoured per group and checked."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from typing import Any

import pytest
import torch

import daypack
from daypack import kernels

from .scene import assert_same, clone, noise, parameters, set_gradients, snapshot, state_of, train, values
from .specs import CASES, Case, crossed

OURS = [case for case in CASES if case.spec.ours]
ours = pytest.mark.parametrize("case", OURS, ids=str)


def keywords(function: Any) -> dict[str, inspect.Parameter]:
    return {name: p for name, p in inspect.signature(function).parameters.items() if name not in ("self", "params")}


@crossed
def test_signature_is_the_namesakes(case: Case) -> None:
    """Every argument of the namesake, same kind, order and default; what we add is keyword-only."""
    cls = type(case.create(parameters().values()))
    mine, theirs = keywords(cls.__init__), keywords(case.spec.namesake.__init__)
    theirs.pop("decoupled_weight_decay", None)
    assert list(mine)[: len(theirs)] == list(theirs)
    for name, parameter in theirs.items():
        assert mine[name].kind == parameter.kind, name
        assert mine[name].default == parameter.default, name
    for name in list(mine)[len(theirs) :]:
        assert mine[name].kind is inspect.Parameter.KEYWORD_ONLY, name


def test_positional_arguments_mean_what_they_mean_in_torch() -> None:
    params = parameters()
    ours = daypack.Gefen(params.values(), 0.02, (0.7, 0.8), 1e-5, 0.3, False)
    theirs = torch.optim.AdamW(params.values(), 0.02, (0.7, 0.8), 1e-5, 0.3, False)
    for key in ("lr", "betas", "eps", "weight_decay", "amsgrad"):
        assert ours.param_groups[0][key] == theirs.param_groups[0][key]


@crossed
def test_true_is_refused_while_unsupported(case: Case) -> None:
    for option in filter(case.takes, ("amsgrad", "capturable", "differentiable")):
        with pytest.raises(ValueError, match=option):
            case.create(parameters().values(), **{option: True})
        case.create(parameters().values(), **{option: False})
        optimizer = case.create(parameters().values())
        with pytest.raises(ValueError, match=option):
            optimizer.add_param_group({"params": parameters(seed=1).values(), option: True})


@ours
def test_fused_true_is_a_fused_kernel_or_an_error(case: Case) -> None:
    """Where there is none, the constructor or the first step says so, and nothing has changed."""
    params, others = parameters(), parameters()
    reference = case.create(others.values(), fused=False)
    train(reference, others, range(1))
    try:
        optimizer = case.create(params.values(), fused=True)
        train(optimizer, params, range(1))
    except ValueError as error:
        assert "fused" in str(error)  # noqa: PT017 - both are allowed
        assert_same(values(params), values(parameters()))
        return
    for name in params:
        torch.testing.assert_close(params[name], others[name], rtol=1e-5, atol=1e-6)


@ours
def test_fused_false_is_the_reference_and_foreach_changes_nothing(case: Case) -> None:
    def run(**options: Any) -> dict[str, torch.Tensor]:
        params = parameters()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = case.create(params.values(), **options)
        train(optimizer, params, range(3))
        return values(params)

    with kernels.use("reference"):
        reference = run()
    assert_same(run(fused=False), reference)
    default = run()
    for foreach in (False, True):
        assert_same(run(foreach=foreach), default)


@crossed
def test_unknown_options_and_names_are_refused(case: Case) -> None:
    with pytest.raises((TypeError, ValueError), match="learning_rate"):
        case.create(parameters().values(), learning_rate=0.1)


@crossed
def test_every_option_is_a_group_key(case: Case) -> None:
    optimizer = case.create(parameters().values())
    options = set(keywords(type(optimizer).__init__))
    assert options == set(optimizer.defaults)
    assert options <= set(optimizer.param_groups[0])


@crossed
def test_rebuilds_from_its_defaults(case: Case) -> None:
    """Frameworks make an optimizer anew as ``type(o)(groups, **o.defaults)``: nothing may be lost."""
    named = list(parameters().items())
    optimizer = case.create(
        [{"params": named[:3], "lr": 0.5}, {"params": named[3:], "weight_decay": 0.0}], maximize=True, lr=3e-3
    )
    rebuilt = type(optimizer)(optimizer.param_groups, **optimizer.defaults)
    assert rebuilt.defaults == optimizer.defaults
    for a, b in zip(optimizer.param_groups, rebuilt.param_groups, strict=True):
        assert a.keys() == b.keys()
        assert all(p is q for p, q in zip(a["params"], b["params"], strict=True))
        assert {k: v for k, v in a.items() if k != "params"} == {k: v for k, v in b.items() if k != "params"}


BAD: dict[str, list[Any]] = {
    "lr": [-1.0, math.nan, math.inf],
    "betas": [(1.0, 0.999), (0.9, 1.0), (-0.1, 0.999), (0.9, math.nan)],
    "eps": [-1e-8, math.nan],
    "weight_decay": [-0.1, math.nan],
}
OWN: dict[str, list[Any]] = {
    "second_moment": ["row", "", None],
    "block_size": [0, -1, 2.5],
    "nonfinite": ["ignore", None],
    "bits": [4, 0, 16, "8"],
    "betas": [(0.9,), 0.9],
}


@crossed
def test_bad_values_are_refused_by_the_constructor(case: Case) -> None:
    known = keywords(type(case.create(parameters().values())).__init__)
    checked = 0
    bad = BAD if case.spec.ours else {"lr": [-1.0], "betas": BAD["betas"][:3], "eps": [-1e-8], "weight_decay": [-0.1]}
    for option, wrongs in bad.items():
        for wrong in wrongs if option in known else ():
            with pytest.raises(ValueError, match=option.removesuffix("s") if case.spec.ours else None):
                case.create(parameters().values(), **{option: wrong})
            checked += 1
    assert checked >= 2


@pytest.mark.parametrize("option", OWN)
@ours
def test_bad_values_of_our_options_are_refused(case: Case, option: str) -> None:
    if option not in keywords(type(case.create(parameters().values())).__init__):
        return  # An optimizer without the option refuses it as unknown, which another scenario checks.
    for wrong in OWN[option]:
        with pytest.raises(ValueError, match=option):
            case.create(parameters().values(), **{option: wrong})


@crossed
def test_strings_are_refused(case: Case) -> None:
    """Launchers pass what they read from a command line: a clear refusal at construction, not an error in a step."""
    wrong = {"lr": "1e-3", "betas": "(0.9, 0.99)", "eps": "1e-8", "weight_decay": "0", "maximize": "False"}
    for option, text in wrong.items():
        if not case.takes(option):
            continue
        with pytest.raises(ValueError, match=option):
            case.create(parameters().values(), **{option: text})


@crossed
def test_bad_values_set_later_are_refused(case: Case) -> None:
    """A scheduler pushes a beta to 1, someone types a rate: the step says so and changes nothing."""
    wrongs = [(key, value) for key, list_ in BAD.items() for value in list_]
    wrongs += [("lr", "0.1"), ("betas", "(0.9, 0.99)"), ("amsgrad", True), ("capturable", True)]
    for key, wrong in [(key, wrong) for key, wrong in wrongs if case.takes(key)]:
        params = parameters(shapes={"matrix": (24, 520), "vector": (9,)})
        vector = params.pop("vector")
        optimizer = case.create([{"params": params.items()}, {"params": [("vector", vector)]}])
        params["vector"] = vector
        train(optimizer, params, range(1))
        optimizer.param_groups[1][key] = wrong
        before = snapshot(optimizer, params)
        set_gradients(params, 1)
        with pytest.raises(ValueError, match=key.removesuffix("s")):
            optimizer.step()
        assert_same(repr(snapshot(optimizer, params)), repr(before))


@crossed
def test_options_are_honoured_per_group(case: Case) -> None:
    """Each of two groups goes the way of an optimizer that has its options alone."""
    options: list[dict[str, Any]] = [
        {"lr": 0.3, "weight_decay": 0.2},
        {"maximize": True, "weight_decay": 0.0},
    ]
    options[0] |= {"betas": case.betas(0.5, 0.9)} if case.takes("betas") else {}
    options[0] |= {"eps": 1e-3} if isinstance(case.create([torch.zeros(1)]).defaults.get("eps"), float) else {}
    if case.spec.name == "gefen":
        options[0] |= {"second_moment": "blocks", "block_size": 64}
        options[1] |= {"second_moment": "factored", "block_size": 512}
    together, apart = [parameters(seed=seed) for seed in (0, 1)], [parameters(seed=seed) for seed in (0, 1)]
    groups = [{"params": params.values(), **o} for params, o in zip(together, options, strict=True)]
    joint = case.create(groups)
    # One step: the codebook, which later steps read, is learned over all parameters at once.
    for params in together:
        set_gradients(params, 0)
    joint.step()
    for params, o in zip(apart, options, strict=True):
        train(case.create(params.values(), **o), params, [0])
    for a, b in zip(together, apart, strict=True):
        assert_same(values(a), values(b))
    for group, o in zip(joint.param_groups, options, strict=True):
        assert {key: group[key] for key in o} == o


@pytest.mark.parametrize("case", [c for c in CASES if c.spec.name == "gefen"], ids=str)
def test_every_option_of_gefen_has_an_effect(case: Case) -> None:
    def outcome(**options: Any) -> Any:
        params = parameters(shapes={"matrix": (24, 768), "vector": (9,)})
        optimizer = case.create(params.values(), **options)
        train(optimizer, params, range(3))
        return values(params), state_of(optimizer, params)

    plain = outcome()
    other = {"factored": "blocks", "blocks": "factored"}[case.options["second_moment"]]
    for options in (
        {"lr": 0.02},
        {"betas": (0.8, 0.999)},
        {"betas": (0.9, 0.99)},
        {"eps": 1e-4},
        {"weight_decay": 0.5},
        {"maximize": True},
        {"second_moment": other},
        {"block_size": 128},
    ):
        assert not torch.equal(outcome(**options)[0]["matrix"], plain[0]["matrix"]), options
    scale = outcome(block_size=128)[1]["matrix"]["exp_avg_scale"]
    assert scale.shape == (24, 6)


@crossed
def test_maximize_is_the_negated_gradient(case: Case) -> None:
    """To the bit at the first step, before any rounding of stored moments, and the caller's gradient keeps its sign."""
    up, down = parameters(), parameters()
    ascent = case.create(up.values(), maximize=True, weight_decay=0.0)
    descent = case.create(down.values(), weight_decay=0.0)
    set_gradients(up, 0)
    set_gradients(down, 0)
    for p in down.values():
        p.grad.neg_()
    ascent.step()
    descent.step()
    assert_same(values(up), values(down))
    assert not torch.equal(up["matrix"], parameters()["matrix"])
    assert all(torch.equal(up[n].grad, -down[n].grad) for n in up)


@crossed
def test_named_parameters_change_messages_only(case: Case) -> None:
    params, named = parameters(), parameters()
    plain, other = case.create(params.values()), case.create(named.items())
    train(plain, params, range(3))
    train(other, named, range(3))
    assert_same(values(named), values(params))
    assert other.param_groups[0]["param_names"] == list(named)
    assert other.state_dict()["param_groups"][0]["param_names"] == list(named)
    with pytest.raises(ValueError):
        other.add_param_group({"params": parameters(seed=3).values()})
    assert len(other.param_groups) == 1


@crossed
def test_groups_stay_the_callers(case: Case) -> None:
    """As many groups as given, with their extras, in their order; never one per tensor."""
    params = list(parameters().values())
    optimizer = case.create([{"params": params[:2], "label": "a"}, {"params": params[2:], "lr": 0.5, "label": "b"}])
    reference = case.namesake([{"params": params[:2], "label": "a"}, {"params": params[2:], "lr": 0.5, "label": "b"}])
    train(optimizer, dict(zip(parameters(), params, strict=True)), range(2))
    assert [len(g["params"]) for g in optimizer.param_groups] == [len(g["params"]) for g in reference.param_groups]
    assert [(g["label"], g["lr"]) for g in optimizer.param_groups] == [("a", case.spec.lr), ("b", 0.5)]
    assert isinstance(optimizer, torch.optim.Optimizer)


@crossed
def test_odd_parameter_lists_are_refused(case: Case) -> None:
    (p, *_) = parameters().values()
    for wrong in ([], p, [p, "weight"], [{"params": {p}}], [p.detach().clone().requires_grad_() * 2]):
        with pytest.raises((ValueError, TypeError)):
            case.create(wrong)
    with pytest.raises(ValueError):
        case.create([{"params": [p]}, {"params": [p]}])


@crossed
def test_bad_group_leaves_the_optimizer_as_it_was(case: Case) -> None:
    params = parameters()
    optimizer = case.create(params.values())
    train(optimizer, params, range(2))
    before = snapshot(optimizer, params)
    new = torch.nn.Parameter(noise((4, 300), "new").float())
    (old, *_) = params.values()
    for group in (
        {"params": [new], "lr": -1.0},
        {"params": [new], "betas": (1.0, 0.9)},
        {"params": [new], "eps": "1e-8"},
        {"params": [new, old]},
        {"params": {new}},
        {"params": [new], "amsgrad": True},
    ):
        if not all(map(case.takes, group)):
            continue
        with pytest.raises((ValueError, TypeError)):
            optimizer.add_param_group(copy.copy(group))
        assert_same(snapshot(optimizer, params), before)
    optimizer.add_param_group({"params": [new]})
    assert len(optimizer.param_groups) == 2


@crossed
def test_tensor_options(case: Case) -> None:
    """A tensor as learning rate or beta is the number in it, is read at each step, and stays the caller's tensor."""
    numbers, others = parameters(), parameters()
    lr, beta = torch.tensor(0.015625), torch.tensor(0.5)
    betas = case.takes("betas")
    tensor = case.create(numbers.values(), lr=lr, **({"betas": case.betas(beta, 0.875)} if betas else {}))
    number = case.create(others.values(), lr=0.015625, **({"betas": case.betas(0.5, 0.875)} if betas else {}))
    train(tensor, numbers, range(2))
    train(number, others, range(2))
    assert_same(values(numbers), values(others))
    lr.fill_(0.25)
    number.param_groups[0]["lr"] = 0.25
    train(tensor, numbers, [2])
    train(number, others, [2])
    assert_same(values(numbers), values(others))
    assert tensor.param_groups[0]["lr"] is lr


@crossed
def test_learning_rate_is_read_at_every_step(case: Case) -> None:
    params = parameters()
    optimizer = case.create(params.values(), lr=0.0, weight_decay=0.1)
    train(optimizer, params, range(2))
    assert_same(values(params), values(parameters()))
    twin = case.create(clone(params).values())
    assert twin.param_groups[0]["lr"] == case.spec.lr
    optimizer.param_groups[0]["lr"] = 0.1
    train(optimizer, params, [2])
    assert not torch.equal(params["matrix"], parameters()["matrix"])
