"""Loading what does not fit: refused whole, with the parameter named, and nothing changed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import daypack

from .scene import (
    assert_same,
    clone,
    parameters,
    snapshot,
    state_of,
    through_file,
    train,
    values,
)
from .specs import CASES, Case, crossed

LAYERS = {"first.weight": (16, 320), "second.weight": (320, 16), "last.weight": (24, 320), "bias": (24,)}


def trained(case: Case, shapes: dict[str, tuple[int, ...]] = LAYERS, **options: Any) -> tuple[Any, Any]:
    params = parameters(torch.float32, shapes)
    optimizer = case.create(params.items(), **options)
    train(optimizer, params, range(3))
    return optimizer, params


def refuse(optimizer: torch.optim.Optimizer, params: Any, file: dict[str, Any], *named: str) -> str:
    before, given = snapshot(optimizer, params), copy.deepcopy(file)
    with pytest.raises(ValueError) as error:
        optimizer.load_state_dict(file)
    for part in named:
        assert part in str(error.value), f"{part!r} is not in: {error.value}"
    assert_same(snapshot(optimizer, params), before, "after a refused load")
    assert_same(file, given, "the refused dict")
    train(optimizer, params, [7])  # It still works.
    return str(error.value)


@crossed
def test_state_of_another_shape_is_refused(case: Case) -> None:
    for shape, other in [((16, 384), (384, 16)), ((1, 1100), (1100, 1)), ((40,), (41,)), ((8, 640), (16, 320))]:
        optimizer, params = trained(case, {"head.weight": shape})
        file = through_file(trained(case, {"head.weight": other})[0].state_dict())
        # Numbers of both shapes, however they are punctuated.
        refuse(optimizer, params, file, "head.weight", *map(str, {*shape, *other}))


@crossed
def test_groups_that_do_not_match_are_refused(case: Case) -> None:
    optimizer, params = trained(case)
    split = list(params.items())
    other = case.create([{"params": split[:2]}, {"params": split[2:]}])
    refuse(optimizer, params, through_file(other.state_dict()))


def damages(state: dict[str, Any]) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Ways to spoil a parameter's saved state: one per stored tensor and kind of damage."""
    ways: dict[str, Callable[[dict[str, Any]], Any]] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            continue
        ways[f"{key} missing"] = lambda s, key=key: s.pop(key)
        ways[f"{key} is text"] = lambda s, key=key: s.update({key: "12"})
        if value.dim():
            ways[f"{key} one longer"] = lambda s, key=key: s.update({key: torch.cat([s[key], s[key][:1]])})
            ways[f"{key} flat"] = lambda s, key=key: s.update({key: s[key].reshape(1, -1, 1)})
            wrong = torch.float64 if value.dtype != torch.float64 else torch.float32
            ways[f"{key} of another dtype"] = lambda s, key=key, wrong=wrong: s.update({key: s[key].to(wrong)})
    return ways


@crossed
def test_one_bad_tensor_leaves_everything_as_it_was(case: Case) -> None:
    """Every stored tensor of a matrix and of a vector, each spoilt in turn, in a file that is fine otherwise."""
    source, _ = trained(case)
    saved = source.state_dict()
    optimizer, params = trained(case, lr=0.5)
    count = 0
    for index, name in enumerate(LAYERS):
        if name not in ("last.weight", "bias"):
            continue
        for damage in damages(saved["state"][index]).values():
            file = through_file(saved)
            damage(file["state"][index])
            refuse(optimizer, params, file, name)
            count += 1
    assert count >= (19 if case.spec.name not in ("sgd8bit", "lion8bit") else 12)  # one moment only


@crossed
def test_damaged_state_is_refused(case: Case) -> None:
    """Right shapes and dtypes, impossible content: it would give wrong numbers without an error."""
    source, _ = trained(case)
    saved = source.state_dict()
    matrix = saved["state"][2]
    optimizer, params = trained(case)

    def spoil(key: str, change: Callable[[torch.Tensor], Any]) -> None:
        file = through_file(saved)
        change(file["state"][2][key])
        refuse(optimizer, params, file, "last.weight")

    spoil("step", lambda t: t.fill_(-1))
    spoil("step", lambda t: t.fill_(float("nan")))
    for key in matrix:
        if key.endswith("_block_size"):
            for wrong in (0, -16, 7, 10**9):
                spoil(key, lambda t, wrong=wrong: t.fill_(wrong))
        elif key.endswith("_codebook"):
            spoil(key, lambda t: t.copy_(t.flip(0)))
            spoil(key, lambda t: t[3].fill_(float("nan")))
            spoil(key, lambda t: t.zero_())  # "Not learned yet" beside codes that were.
        elif (key.endswith("_scale") or "_sq" in key) and matrix[key].is_floating_point():
            spoil(key, lambda t: t.view(-1)[0].fill_(-1))
            spoil(key, lambda t: t.view(-1)[-1].fill_(float("nan")))


@pytest.mark.filterwarnings("ignore:parameter group 0. .* comes with the loaded state:UserWarning")
@crossed
def test_state_of_another_optimizer_is_refused(case: Case) -> None:
    """Otherwise it would go on with an empty moment at a late step. Converting is an explicit act."""
    optimizer, params = trained(case)
    for other in CASES:
        if other.spec.name == case.spec.name or other.label == "plain":  # SGD without momentum has no state.
            continue
        if other.spec.name in case.spec.alike or case.spec.name in other.spec.alike:
            continue
        message = refuse(optimizer, params, through_file(trained(other)[0].state_dict()))
        # The parameter, or the group with an option that this optimizer cannot have.
        assert "first.weight" in message or "parameter group 0 of the state_dict" in message


@crossed
def test_missing_group_options_are_refilled(case: Case) -> None:
    """Files of older versions lack options that came later: they get the live optimizer's value."""
    source, params = trained(case)
    saved = source.state_dict()
    reference = case.create(clone(params).items())
    for key in saved["param_groups"][0]:
        if key in ("params", "param_names", "lr", "betas", "eps", "weight_decay"):
            continue
        file = through_file(saved)
        del file["param_groups"][0][key]
        mine, theirs = clone(params), clone(params)
        optimizer, reference = case.create(mine.items()), case.create(theirs.items())
        optimizer.load_state_dict(file)
        reference.load_state_dict(through_file(saved))
        assert optimizer.param_groups[0].keys() >= {key}, key
        assert_same(optimizer.param_groups[0][key], reference.param_groups[0][key], key)
        assert "differentiable" not in optimizer.param_groups[0] or "differentiable" in saved["param_groups"][0]
        train(optimizer, mine, range(3, 5))
        train(reference, theirs, range(3, 5))
        assert_same(values(mine), values(theirs), f"without {key}")


@crossed
def test_state_is_matched_by_name(case: Case) -> None:
    """Two layers of one shape, listed in the other order: each finds its own state, or the load is refused."""
    shapes = {"a.weight": (24, 320), "b.weight": (24, 320), "c": (5,)}
    source, params = trained(case, shapes)
    reordered = {name: clone(params)[name] for name in ("b.weight", "c", "a.weight")}
    optimizer = case.create(reordered.items())
    try:
        optimizer.load_state_dict(through_file(source.state_dict()))
    except ValueError as error:
        assert "a.weight" in str(error)  # noqa: PT017 - refusing is as good as matching
        return
    assert optimizer.param_groups[0]["param_names"] == ["b.weight", "c", "a.weight"]
    assert_same(state_of(optimizer, reordered), {n: state_of(source, params)[n] for n in reordered})
    train(optimizer, reordered, range(3, 5))
    train(source, params, range(3, 5))
    assert_same({n: values(reordered)[n] for n in params}, values(params))


@crossed
def test_names_that_differ_are_listed(case: Case) -> None:
    """Another set of trainable parameters (adapters without their head): the names that differ are in the message."""
    source, params = trained(case)
    less = {name: p for name, p in clone(params).items() if name != "second.weight"}
    refuse(case.create(less.items()), less, through_file(source.state_dict()), "second.weight")
    more = {**clone(params), "adapter.weight": parameters(shapes={"x": (8, 320)})["x"]}
    refuse(case.create(more.items()), more, through_file(source.state_dict()), "adapter.weight")


@pytest.mark.parametrize("case", [case for case in CASES if case.spec.name == "gefen"], ids=str)
def test_structure_of_the_file_wins_or_is_refused(case: Case) -> None:
    """Another block size or kind of second moment than the constructor's: never read half with one, half with other."""
    other = {"factored": "blocks", "blocks": "factored"}[case.options["second_moment"]]
    for options in ({"block_size": 128}, {"block_size": 512}, {"second_moment": other}):
        source, params = trained(case, **options)
        mine = clone(params)
        optimizer = case.create(mine.items())
        before = snapshot(optimizer, mine)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                optimizer.load_state_dict(through_file(source.state_dict()))
            except ValueError as error:
                assert next(iter(options)) in str(error)  # noqa: PT017 - refusing is as good as adopting
                assert_same(snapshot(optimizer, mine), before)
                continue
        train(optimizer, mine, range(3, 5))
        train(source, params, range(3, 5))
        assert_same(values(mine), values(params), str(options))
        assert_same(state_of(optimizer, mine), state_of(source, params), str(options))


@pytest.mark.parametrize("case", [case for case in CASES if case.spec.name == "gefen"], ids=str)
def test_codes_without_their_codebook_are_refused(case: Case) -> None:
    """Codes read against a codebook learned anew would be noise."""
    source, params = trained(case)
    file = through_file(source.state_dict())
    coded = [state for state in file["state"].values() if "exp_avg_codes" in state]
    assert coded or case.spec.bytes_per_param[case.label] < 1 or case.spec.bytes_per_param[case.label] > 8
    if not coded:
        return
    for state in coded:
        del state["exp_avg_codebook"]
    fresh = clone(params)
    refuse(case.create(fresh.items()), fresh, file, "first.weight")


@crossed
def test_load_hooks_fire_once(case: Case) -> None:
    source, params = trained(case)
    optimizer = case.create(clone(params).items())
    calls: list[str] = []
    dtypes: list[Any] = []

    def before(optimizer: Any, state_dict: dict[str, Any]) -> None:
        calls.append("before")
        dtypes.extend(v.dtype for s in state_dict["state"].values() for v in s.values() if isinstance(v, torch.Tensor))

    optimizer.register_load_state_dict_pre_hook(before)
    optimizer.register_load_state_dict_post_hook(lambda optimizer: calls.append("after"))
    source.register_state_dict_pre_hook(lambda optimizer: calls.append("saving"))
    optimizer.load_state_dict(state_dict=source.state_dict())
    assert calls == ["saving", "before", "after"]
    assert dtypes == [v.dtype for s in source.state_dict()["state"].values() for v in s.values() if torch.is_tensor(v)]


def test_registry_knows_its_names_and_no_others() -> None:
    assert {"adamw", "adam", "sgd", "gefen"} <= set(daypack.names())
    with pytest.raises(ValueError, match="gefen"):
        daypack.create("gefenn", parameters().values())
    for name, cls in (("adamw", torch.optim.AdamW), ("adam", torch.optim.Adam), ("sgd", torch.optim.SGD)):
        assert type(daypack.create(name, parameters().values(), lr=0.1)) is cls
    assert (daypack.AdamW, daypack.Adam, daypack.SGD) == (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
    assert type(daypack.create("gefen", parameters().values())) is daypack.Gefen
