"""What is expected of each registered optimizer: a short declaration each, read by every scenario.

A new optimizer joins by registering in `daypack`: without a declaration here it is one of ours with no exceptions.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
import torch

import daypack

from ..reference.lion import Lion

Test = TypeVar("Test", bound=Callable[..., None])


@dataclass(frozen=True)
class Spec:
    """One optimizer.

    Attributes:
        name: in the registry.
        variants: constructor options to cross with every scenario, under the label that test ids show.
        namesake: class of torch whose constructor, defaults and meaning it must keep.
        ours: False for torch's own classes, to which we add nothing.
        otherwise: scenario (test name without ``test_``) -> why it is not expected of this optimizer; with ``@label``
            behind it, of that variant.
        alike: optimizers whose moments mean the same: where the layout is the same too, their state may be loaded.
        lr: a learning rate at which it moves visibly in a few steps.
        fit_lr: one at which it fits a small regression in 150 steps, and `adapter_lr` a LoRA pair in 60.
        shares_v: whether elements share a second moment so that one of them may step by another size than the rate.
        bytes_per_param: upper bound on a layer of hidden size 1024, everything counted, for each variant.
    """

    name: str
    namesake: type[torch.optim.Optimizer]
    variants: Mapping[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    ours: bool = True
    otherwise: Mapping[str, str] = field(default_factory=dict)
    alike: tuple[str, ...] = ()
    lr: float = 1e-2
    fit_lr: float = 3e-3
    adapter_lr: float = 1e-2
    shares_v: bool = False
    bytes_per_param: Mapping[str, float] = field(default_factory=lambda: {"": 1.02})


# What torch's own classes do otherwise, and why the scenario says nothing about us then.
TORCH = {
    "state_dtypes_follow_the_design": "torch keeps moments in the dtype of the parameter",
    "gradient_of_another_dtype_than_the_parameter": "torch's kernels want one dtype for parameter and gradient",
    "loading_shares_no_memory": "torch keeps the tensors of the loaded dict",
    "missing_group_options_are_refilled": "torch refills only the options it once added",
    "state_is_matched_by_name": "torch matches by position",
    "names_that_differ_are_listed": "torch matches by position",
    "state_of_another_shape_is_refused": "torch does not check shapes at load",
    "one_bad_tensor_leaves_everything_as_it_was": "torch does not check state at load",
    "damaged_state_is_refused": "torch does not check state at load",
    "state_of_another_optimizer_is_refused": "torch does not check state at load",
    "materialized_state_is_never_stepped": "torch's classes can only create state by a step",
    "materialize_leaves_training_unchanged": "torch's classes can only create state by a step",
    "checkpoint_loads_in_place_into_materialized_state": "torch's classes can only create state by a step",
    "probing_for_state_leaves_training_unchanged": "torch counts the step at learning rate 0 that creates its state",
    "probing_with_zero_eps_makes_no_nan": "torch divides 0 by 0 there",
    "unused_parameter_has_state_and_trains_later": "torch creates state at the first gradient",
    "rebuilds_from_its_defaults": "torch's AdamW has a default that its constructor does not take",
    "strings_are_refused": "torch does not check types",
    "bad_values_set_later_are_refused": "torch checks only in its constructor",
    "bad_group_leaves_the_optimizer_as_it_was": "torch checks only in its constructor",
    "true_is_refused_while_unsupported": "torch supports them",
    "tensor_options": "torch takes them with restrictions of its own",
    "every_option_is_a_group_key": "torch's AdamW has a default that its constructor does not take",
    "nonfinite_gradient_skips_its_parameter_alone": "torch lets it through",
    "nonfinite_gradient_teaches_nothing": "torch lets it through",
    "nonfinite_raise_changes_nothing": "torch lets it through",
    "huge_and_tiny_gradients": "torch lets an overflow of g^2 freeze the parameter",
    "half_precision_is_rounded_once": "torch computes in the dtype of the parameter",
    "half_precision_survives_zero_and_small_gradients": "eps rounds to 0 in fp16",
    "unusable_gradient_changes_nothing": "torch finds it midway",
    "complex_parameter_is_refused": "torch supports complex parameters",
    "optimizer_that_never_sees_a_gradient_says_so": "torch steps nothing in silence",
    "step_leaves_the_gradient_alone": "torch's Adam may add weight decay in place",
    "step_needs_chunks_not_copies_of_the_parameter": "torch's temporaries are as large as the parameter",
}

ADAFACTOR = {
    "probing_with_zero_eps_makes_no_nan": "its eps is a pair, and refuses 0",
    "true_is_refused_while_unsupported": "its namesake has none of these options",
    "state_of_another_shape_is_refused@": "one factor names one dim alone; tests/optim/test_adafactor.py",
    "adapter_whose_first_gradient_is_zero_trains@coded": "its namesake keeps no first moment",
    "zero_gradient_at_rate_zero_is_a_step_once_training_began": "the decay of its second moment depends on the step",
    "half_precision_survives_zero_and_small_gradients": "its steps are relative to the parameter",
    "huge_and_tiny_gradients@coded": "its first moment starts from 0 without correction",
    "rows_and_columns_of_very_different_size": "a parameter of zeros steps by eps[1] times the rate",
    "decay_means_what_it_means_in_the_namesake@coded": "its namesake keeps no first moment",
}
LAMB = {
    "adapter_whose_first_gradient_is_zero_trains@": "a factor that starts at 0 grows with its norm",
    "coordinates_without_gradient_do_not_drift@": "the trust ratio scales the decay too",
    "half_precision_survives_zero_and_small_gradients@": "its steps are relative to the parameter",
    "decay_means_what_it_means_in_the_namesake@": "the trust ratio scales the decay too",
    "long_run_with_heavy_tails_stays_stable@": "its steps are relative to the parameter, and want another rate",
    "loss_goes_down_as_with_the_namesake@": "its steps are relative to the parameter, and want another rate",
}
GALORE = {
    "training_is_quiet@whole": "it says that nothing is projected; tests/optim/test_galore.py",
    "state_of_another_shape_is_refused@low": "a low shape has one dim of two; tests/optim/test_galore.py",
    "adapter_whose_first_gradient_is_zero_trains@low": "four directions; tests/optim/test_galore.py",
    "coordinates_without_gradient_do_not_drift@low": "a direction of the basis moves whole rows",
    "half_precision_survives_zero_and_small_gradients@low": "an element steps by its share of the directions",
    "rows_and_columns_of_very_different_size@low": "an element steps by its share of the directions",
    "long_run_with_heavy_tails_stays_stable@low": "four directions of sixteen in each two steps",
    "loss_goes_down_as_with_the_namesake@low": "four directions; tests/optim/test_galore.py",
    "step_needs_chunks_not_copies_of_the_parameter@low": "a basis needs a square of the short side",
}

NO_SECOND_MOMENT = {
    "zero_gradient_at_rate_zero_is_a_step_once_training_began": "there is no second moment to see decay",
}
PROPORTIONAL = {
    "half_precision_survives_zero_and_small_gradients": "a step is as small as its gradient",
    "huge_and_tiny_gradients": "a step is as large as its gradient",
}

FIRST = "its first step only takes in the second moment"
ADOPT = {
    "adapter_whose_first_gradient_is_zero_trains": FIRST,
    "coordinates_without_gradient_do_not_drift": FIRST,
    "decay_in_low_precision_is_not_lost": FIRST,
    "decay_means_what_it_means_in_the_namesake": FIRST,
    "groups_work_in_every_optimizer": FIRST,
    "maximize_is_the_negated_gradient": FIRST,
    "rows_and_columns_of_very_different_size": FIRST,
    "unused_parameter_has_state_and_trains_later": FIRST,
    "warm_up_from_zero_advances_state_and_moves_nothing": FIRST,
    "signature_is_the_namesakes": "betas, eps and decay default to what its authors publish",
    "zero_gradient_at_rate_zero_is_a_step_once_training_began": "its second moment decays by 0.9999",
    "half_precision_survives_zero_and_small_gradients": "its eps of 1e-6 is larger than these gradients",
    "huge_and_tiny_gradients": "its eps of 1e-6 is larger than the tiny ones",
}
ADEMAMIX = {
    "decay_means_what_it_means_in_the_namesake": "its slow average adds to what AdamW does",
    "long_run_with_heavy_tails_stays_stable@warm": "its slow average adds to what AdamW does",
    "signature_is_the_namesakes": "it has three betas",
}
MATRICES = "its namesake takes nothing but matrices"
MIXED = "rows and columns of a matrix move together"
MUON = NO_SECOND_MOMENT | {
    "adapter_whose_first_gradient_is_zero_trains": MIXED,
    "coordinates_without_gradient_do_not_drift": MIXED,
    "decay_means_what_it_means_in_the_namesake": MATRICES,
    "groups_stay_the_callers": MATRICES,
    "half_precision_survives_zero_and_small_gradients": MIXED,
    "loss_goes_down_as_with_the_namesake": MATRICES,
    "rows_and_columns_of_very_different_size": MIXED,
    "signature_is_the_namesakes": "adjust_lr_fn defaults to the one with which AdamW's rate serves all",
    "step_needs_chunks_not_copies_of_the_parameter": "a matrix is made orthogonal as a whole",
    "tiny_parameters_train": "a matrix of one element moves by a fifth of the rate",
}

SPECS = {
    spec.name: spec
    for spec in (
        Spec(
            "gefen",
            namesake=torch.optim.AdamW,
            variants={"factored": {"second_moment": "factored"}, "blocks": {"second_moment": "blocks"}},
            # Blocks of 256 cost 4 + 2 bytes a block: 1.023, and their kind is not the default.
            bytes_per_param={"factored": 1.02, "blocks": 1.03},
        ),
        Spec("adamw8bit", namesake=torch.optim.AdamW, bytes_per_param={"": 2.05}),
        Spec("adam8bit", namesake=torch.optim.Adam, bytes_per_param={"": 2.05}),
        Spec(
            "sgd8bit",
            namesake=torch.optim.SGD,
            variants={"": {"momentum": 0.9}},
            otherwise=NO_SECOND_MOMENT | PROPORTIONAL,
            lr=1e-1,
            fit_lr=0.3,
            adapter_lr=0.5,
            bytes_per_param={"": 1.03},
        ),
        Spec(
            "lion8bit",
            namesake=Lion,
            otherwise=NO_SECOND_MOMENT,
            fit_lr=3e-4,
            adapter_lr=3e-3,
            bytes_per_param={"": 1.03},
        ),
        Spec(
            "adam_mini",
            namesake=torch.optim.AdamW,
            variants={"": {}, "8bit": {"bits": 8}},
            shares_v=True,
            bytes_per_param={"": 4.02, "8bit": 1.03},
        ),
        Spec(
            "adafactor",
            namesake=torch.optim.Adafactor,
            variants={"": {}, "coded": {"beta1": 0.9, "bits": 8}},
            otherwise=ADAFACTOR,
            bytes_per_param={"": 0.02, "coded": 1.02},
        ),
        Spec(
            "lamb",
            namesake=torch.optim.AdamW,
            variants={"": {}, "coded": {"bits": 8, "second_moment": "factored", "trust_ratio": False}},
            otherwise=LAMB,
            alike=("adamw", "adam"),
            bytes_per_param={"": 8.01, "coded": 1.02},
        ),
        Spec(
            "galore",
            namesake=torch.optim.AdamW,
            variants={
                "whole": {"inner": "gefen", "placement": "paged"},
                "low": {"rank": 4, "update_proj_gap": 2, "scale": 1.0},
            },
            otherwise=GALORE,
            alike=("gefen", "adamw", "adam"),
            bytes_per_param={"whole": 1.02, "low": 0.2},
        ),
        Spec(
            "adopt",
            namesake=torch.optim.AdamW,
            variants={"": {}, "dense": {"bits": 32, "second_moment": "dense"}},
            otherwise=ADOPT,
            bytes_per_param={"": 1.02, "dense": 8.01},
        ),
        Spec(
            "ademamix",
            namesake=torch.optim.AdamW,
            variants={"": {}, "warm": {"alpha_warmup": 20, "beta3_warmup": 20, "second_moment": "dense"}},
            otherwise=ADEMAMIX,
            bytes_per_param={"": 2.04, "warm": 6.03},
        ),
        Spec(
            "muon",
            namesake=torch.optim.Muon,
            variants={"": {}, "beside": {"beside": "adamw8bit", "bits": 32}},
            otherwise=MUON,
            bytes_per_param={"": 1.02, "beside": 4.01},
        ),
        Spec("adamw", namesake=torch.optim.AdamW, ours=False, otherwise=TORCH, bytes_per_param={"": 8.01}),
        Spec("adam", namesake=torch.optim.Adam, ours=False, otherwise=TORCH, bytes_per_param={"": 8.01}),
        Spec(
            "sgd",
            namesake=torch.optim.SGD,
            variants={"plain": {}, "momentum": {"momentum": 0.9}},
            ours=False,
            otherwise=TORCH
            | {"state_travels_through_getter_and_setter": "torch's setter wants at least one state tensor"},
            lr=1e-1,
            fit_lr=0.3,
            adapter_lr=0.5,
            bytes_per_param={"plain": 0.0, "momentum": 4.01},
        ),
    )
}


@dataclass(frozen=True)
class Case:
    """An optimizer with one variant of its options."""

    spec: Spec
    label: str
    options: dict[str, Any]

    def __str__(self) -> str:
        return "-".join(filter(None, (self.spec.name, self.label)))

    def create(self, params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
        return daypack.create(self.spec.name, params, **{"lr": self.spec.lr, **self.options, **options})

    def namesake(self, params: Iterable[Any], **options: Any) -> torch.optim.Optimizer:
        """The namesake with the same options, as far as it has them."""
        known = inspect.signature(self.spec.namesake.__init__).parameters
        shared = {key: value for key, value in self.options.items() if key in known}
        return self.spec.namesake(params, **{"lr": self.spec.lr, **shared, **options})

    def takes(self, option: str) -> bool:
        """Whether the constructor has this option."""
        return option in inspect.signature(type(self.create([torch.zeros(1)])).__init__).parameters

    def betas(self, *values: Any) -> tuple[Any, ...]:
        """``values`` as this optimizer takes betas: with a third one where it has three."""
        count = len(self.create([torch.zeros(1)]).defaults["betas"])
        return (*values, *[0.9999] * (count - len(values)))

    @property
    def dense_bytes(self) -> int:
        """Bytes per element of fp32 moments: of AdamW's two, or of all that its rule has if these are more."""
        optimizer = self.create([torch.zeros(1)])
        rule = optimizer.main_rule(optimizer.param_groups[0])  # type: ignore[attr-defined]
        return 4 * max(2, len(rule.moments))

    @property
    def coupled(self) -> bool:
        """Whether weight decay is part of the gradient."""
        return self.spec.namesake in (torch.optim.Adam, torch.optim.SGD)

    @property
    def shares_v(self) -> bool:
        return self.spec.shares_v or self.label == "blocks"


def _cases() -> list[Case]:
    specs = [SPECS.get(name) or Spec(name, namesake=torch.optim.AdamW) for name in daypack.names()]
    return [Case(spec, label, options) for spec in specs for label, options in spec.variants.items()]


CASES = _cases()


def crossed(test: Test) -> Test:
    """Run ``test(case, ...)`` for every optimizer of which the scenario is expected."""
    scenario = test.__name__.removeprefix("test_")
    cases = [case for case in CASES if not {scenario, f"{scenario}@{case.label}"} & set(case.spec.otherwise)]
    return pytest.mark.parametrize("case", cases, ids=str)(test)
