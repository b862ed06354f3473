"""The step and the bookkeeping that every daypack optimizer shares; a subclass says how each parameter is planned."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from daypack import sharding
from daypack.formats.base import State
from daypack.kernels import dispatch
from daypack.kernels.backend import Mask
from daypack.kernels.dispatch import Work
from daypack.optim import state_dict as saved
from daypack.optim.admission import admit
from daypack.optim.calibrate import Calibration
from daypack.optim.exchange import Exchange
from daypack.optim.options import Group, check_gradient, check_param, check_spill_dir, param_name
from daypack.param import ParamPlan, ParamStep
from daypack.placement.schedule import Placements
from daypack.rules.base import Rule

#: After this many steps without a gradient, the optimizer warns that it may hold the wrong parameters.
_STEPS_BEFORE_IDLE_WARNING = 10


class CompressedOptimizer(Optimizer):
    """A `torch.optim.Optimizer` whose moments are stored in the formats that `plan` chooses.

    State is created at the first step, for every trainable parameter; ``step`` counts a parameter's own steps. All that
    training needs stands in ``state`` and ``param_groups`` and is saved by `state_dict`.

    Attributes:
        partition_caveat: what this optimizer does differently with a flat piece of other parameters (ZeRO, FSDP1), if
            it needs whole parameters; None if it treats every element alike.
        structural: options that decide how state is stored; with a loaded checkpoint they come from it.
        skipped: how often each parameter was passed over because its gradient was not finite, in this process.
    """

    structural: tuple[str, ...] = ()
    partition_caveat: str | None = None
    skipped: Counter[str]

    def plan(self, shape: torch.Size, dtype: torch.dtype, group: Group, name: str) -> ParamPlan:
        """Return how a parameter of this global shape and dtype is stored and stepped under the options of ``group``.

        Args:
            name: the parameter's name where it has one, for optimizers that know rules for names.
        """
        raise NotImplementedError

    def plan_partition(self, shape: torch.Size, dtype: torch.dtype, group: Group, name: str) -> ParamPlan:
        """Return how a flat piece of many parameters (ZeRO's) is stored and stepped; by default, as a vector."""
        return self.plan(shape, dtype, group, name)

    def plan_of(self, param: Tensor, group: Group, name: str) -> ParamPlan:
        """Return `plan` of a parameter, or `plan_partition` of a flat piece."""
        plan = self.plan_partition if sharding.is_bare_partition(param) else self.plan
        return plan(param.shape, param.dtype, group, name)

    def main_rule(self, group: Group) -> Rule:
        """Return the rule that steps the parameters of ``group``, or most of them."""
        return self.plan(torch.Size((0,)), torch.float32, group, "").rule

    def caveat(self, param: Tensor, group: Group, name: str) -> str | None:
        """Return what to warn the user of before a parameter's state is created; None if nothing is unexpected."""
        return self.partition_caveat if sharding.is_flat_partition(param) else None

    def check_options(self, group: Group, where: str) -> None:
        """Raise ValueError if an option in ``group`` cannot be used; ``where`` says whose options they are."""
        raise NotImplementedError

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        if defaults.get("foreach"):
            warnings.warn(
                f"foreach=True has no effect on {type(self).__name__}; fused chooses its kernel", stacklevel=3
            )
        if isinstance(params, (nn.Module, set)):
            raise ValueError(
                f"{type(self).__name__} takes parameters in an order: model.named_parameters(), a list or "
                f"daypack.param_groups(model); got {type(params).__name__}"
            )
        self.skipped = Counter()
        self._reset()
        self.check_options(defaults, type(self).__name__)
        super().__init__(params, defaults)
        if defaults["spill_dir"] is not None and not self._placements.away(self.param_groups):
            raise ValueError(f"spill_dir={defaults['spill_dir']!r} is for placement='paged'; set that, or leave it out")

    def _reset(self) -> None:
        """Forget what was derived from the state, because the state may have been replaced."""
        self._calibration = Calibration()
        self._work: Work | None = None
        self._work_key: tuple[Any, ...] = ()
        self._idle_steps = 0
        self._placements = Placements()

    # ---------------------------------------------------------------- groups

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; it is checked whole first, so that a refused group leaves the optimizer as it was."""
        where = f"parameter group {len(self.param_groups)}"
        options = {**self.defaults, **param_group}
        self.check_options(options, where)
        check_spill_dir(options, where)
        params = param_group["params"]
        if not isinstance(params, (Tensor, set)):  # torch wraps the one and refuses the other
            params = param_group["params"] = list(params)
            for i, entry in enumerate(params):
                name, p = entry if isinstance(entry, tuple) else (f"{i} of {where}", entry)
                if isinstance(p, Tensor):
                    check_param(p, str(name))
                    self.plan(p.shape, p.dtype, options, str(name))
        super().add_param_group(param_group)
        # Saved with the group, so that state of another rule is refused even if its layout is the same.
        param_group["rule"] = self.main_rule(param_group).name

    def _params(self) -> Iterator[tuple[Group, str, Tensor]]:
        """Yield group, name and tensor of every parameter. Read at each step, because wrappers replace parameters."""
        for g, group in enumerate(self.param_groups):
            for i, p in enumerate(group["params"]):
                yield group, param_name(group, g, i), p

    # ------------------------------------------------------------------ step

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch._disable_dynamo  # type: ignore[attr-defined]
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step.

        Args:
            closure: evaluates the model and returns the loss; called once, first, with gradients enabled.

        Raises:
            ValueError: an option or a gradient cannot be used. Nothing has changed then.
        """
        with torch.enable_grad():
            loss = None if closure is None else closure()
        away = self._placements.away(self.param_groups)
        members = self._sharded()
        if members:
            self._step_together(Exchange(members, away))
            return loss
        work = self._collect()
        if work.settled and not away and not self._decides_between_passes():
            self._admit(work, work.step())
            return loss
        admitted = self._admit(work, np.isfinite(work.observe()))
        if not work.settled and self._settle(work, admitted):
            work.observe()
        if away:
            self._placements.apply(work, admitted)
        else:
            work.apply(admitted)
        return loss

    def _sharded(self) -> list[tuple[Tensor, ParamPlan]]:
        """Return the trainable parameters of which every rank holds a part."""
        if not sharding.any_distributed(p for group in self.param_groups for p in group["params"]):
            return []
        return [
            (p, self.plan_of(p, group, name))
            for group, name, p in self._params()
            if sharding.groups_of(p) and (p.requires_grad or p.grad is not None)
        ]

    def _step_together(self, exchange: Exchange) -> None:
        """Take a step in which all ranks share what they know of the gradients, and so decide alike."""
        work, error = None, None
        self._work = None  # parts of parameters may be others at every step
        try:
            work = self._collect()
        except ValueError as problem:
            error = problem

        def observe() -> tuple[NDArray[np.float64], Mask]:
            return exchange.first(work, work.observe() if work else np.zeros(0), self._unsure, error)

        totals, present = observe()
        assert work is not None  # else the exchange has raised
        admitted = self._admit(work, np.isfinite(totals), present)
        if self._settle(work, admitted):
            observe()
        if self._placements.away(self.param_groups):
            self._placements.apply(work, admitted)
        else:
            work.apply(admitted, add_up=lambda squares: exchange.second(squares, work.items))

    def _admit(self, work: Work, finite: Mask, present: Mask | None = None) -> Mask:
        return admit(work.items, finite, self.skipped, self._any_rate_is_zero(), present)

    def _any_rate_is_zero(self) -> bool:
        return any(float(group["lr"]) == 0 for group in self.param_groups)

    def _unsure(self, item: ParamStep) -> bool:
        """Return whether it matters that the item's gradient may be all zeros."""
        return item.steps == 0 or not self._calibration.is_done(item)

    def _decides_between_passes(self) -> bool:
        """Return whether one parameter's gradient may stop others from being stepped, or be the zero-gradient probe."""
        return self._any_rate_is_zero() or any(group["nonfinite"] == "raise" for group in self.param_groups)

    def _collect(self) -> Work:
        """Return the parameters with a gradient, after checking every option and every gradient.

        Most steps see the same tensors in the same layout as the step before, only with other values. What was derived
        from the layout is cached until it changes.
        """
        for g, group in enumerate(self.param_groups):
            self.check_options(group, f"parameter group {g}")
        key = self._key()
        if self._work is None or key != self._work_key or not self._work.refresh():
            self._work = None
            idle = [p for _, _, p in self._params() if p.grad is None]
            self._work, self._work_key = Work(self._items(), idle), key
        self._warn_if_idle(self._work.items)
        return self._work

    def _key(self) -> tuple[Any, ...]:
        """Return what the cached work depends on besides the tensors' own layouts: parameters, states, options."""
        params = [p for group in self.param_groups for p in group["params"]]
        options = [
            [group.get(name) for name in ("fused", "placement", "spill_dir", *self.structural)]
            for group in self.param_groups
        ]
        sizes = [len(group["params"]) for group in self.param_groups]
        kept = [list(map(id, things)) for things in (params, self.param_groups, self.state.values())]
        return kept, sizes, options, dispatch.forced()

    def _items(self) -> list[ParamStep]:
        """Return a `ParamStep` for each parameter with a gradient, after checking all of them."""
        items = []
        for group, name, p in self._params():
            parted = bool(p.requires_grad and sharding.groups_of(p))  # another rank may have a gradient
            if p.grad is None and not parted:
                continue
            if p.grad is not None:
                check_gradient(p, p.grad, name)
            plan = self.plan_of(p, group, name)
            state, view = saved.part_of(p, plan, self.state.get(p, {})), sharding.local_view(p, plan)
            if state:
                saved.check_layout(self, name, p, plan, state)
            for key, form in plan.stored if state else ():
                form.load_(state, key, view)  # some wrappers put saved state here themselves
            self._placements.of(group, p.device).adopt_(state)
            part = sharding.to_local_gradient(p) if sharding.is_distributed(p) else None
            items.append(ParamStep(name, sharding.to_local(p), group, state, plan, view, whole=p, part=part))
        return items

    def _warn_if_idle(self, items: list[ParamStep]) -> None:
        """Say once that no parameter ever had a gradient: the optimizer may hold tensors that nothing trains."""
        self._idle_steps = _STEPS_BEFORE_IDLE_WARNING if items else self._idle_steps + 1
        if not items and self._idle_steps == _STEPS_BEFORE_IDLE_WARNING:
            warnings.warn(
                f"{type(self).__name__}: no parameter had a gradient in {self._idle_steps} steps; if the model was "
                "wrapped or moved after the optimizer was built, build the optimizer again",
                stacklevel=4,
            )

    @torch.no_grad()
    def materialize_state(self) -> None:
        """Create the state of every trainable parameter that has none: zeros, step 0 (never stepped). No step is taken.

        `torch.distributed.checkpoint` needs it before it can load into a fresh optimizer.
        """
        caveats: dict[str, list[str]] = defaultdict(list)
        for group, name, p in self._params():
            if (p.requires_grad or p.grad is not None) and not self.state.get(p):
                caveats[self.caveat(p, group, name) or ""].append(name)
                plan = self.plan_of(p, group, name)
                whole, here = plan.view(p.shape), sharding.local_view(p, plan)
                state: State = self.state[p]
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                for moment, form in plan.stored:
                    for spec, part in zip(form.components(whole, p.dtype), form.components(here, p.dtype), strict=True):
                        zeros = self._placements.create(part, group, p.device)
                        state[moment + spec.suffix] = sharding.wrap(p, zeros, spec)
        for caveat, names in caveats.items():
            if caveat:
                warnings.warn(f"{type(self).__name__} {caveat}: {', '.join(names)}", stacklevel=3)

    def _settle(self, work: Work, admitted: Mask) -> bool:
        """Create the state that first steps need, and learn from their gradients.

        Returns:
            Whether statistics must be taken once more, because what they are taken over has changed.
        """
        self.materialize_state()
        for item in work.items:
            item.state = saved.part_of(item.whole, item.plan, self.state[item.whole])
        fresh = [item for item, on in zip(work.items, admitted.tolist(), strict=True) if on]
        changed = self._calibration.run(fresh, self._plans())
        for item in fresh if changed else ():
            self._placements.of(item.group, item.param.device).adopt_(item.state)
        work.attach()
        self._work_key = self._key()  # with the states just created
        work.settled = all(map(self._calibration.is_done, work.items))
        return changed

    def _plans(self) -> Iterator[tuple[ParamPlan, State]]:
        """Yield plan and state of every parameter that has state."""
        return ((self.plan_of(p, group, name), self.state[p]) for group, name, p in self._params() if self.state.get(p))

    def wait(self) -> None:
        """Wait until paged state that a step is still copying back can be read (``placement="paged"``)."""
        self._placements.wait()

    def kernels(self) -> dict[Tensor, str]:
        """Return the name of the backend that took each parameter at the last step."""
        work = self._work
        return {item.whole: name for item, name in zip(work.items, work.backends, strict=True)} if work else {}

    # ------------------------------------------------------------ state dict

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch does. Shapes follow from the parameters' shapes, and
        ``torch.load(weights_only=True)`` reads the saved file.
        """
        self.wait()
        live = self.state
        reachable = [p for _, _, p in self._params() if p in live]
        # Entries of tensors that a wrapper took out of the groups cannot be named, and torch would fail on them.
        self.state = defaultdict(dict, {p: live[p] for p in reachable})
        try:
            packed = super().state_dict()
        finally:
            self.state = live
        keys = [key for group in packed["param_groups"] for key in group["params"]]
        for key, (group, name, p) in zip(keys, self._params(), strict=True):
            if p in live:
                # Another dict than the live one, which torch hands out.
                packed["state"][key] = {**live[p], **saved.shown(p, self.plan_of(p, group, name), live[p])}
        return packed

    @torch._disable_dynamo  # type: ignore[attr-defined]
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, all of it or nothing. No tensor is cast or shared with ``state_dict``.

        Parameters are matched by name where both sides have names, else by position. Options come from the
        ``state_dict``; ones that it lacks keep their values.

        Raises:
            ValueError: something does not fit; names the parameter. The optimizer is unchanged then.
        """

        def prepare(_: Optimizer, loaded: dict[str, Any]) -> dict[str, Any]:
            return saved.prepare(self, loaded)

        saved.require_dict(state_dict)
        hook = self.register_load_state_dict_pre_hook(prepare)  # the last one: it sees what the user's hooks return
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def __getstate__(self) -> dict[str, Any]:
        self._placements.wait()
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over loaded or unpickled state: unwrap its tensors, place them, and give them their live shapes."""
        if "_placements" in self.__dict__:
            self._placements.wait()
        self._reset()
        for g, group in enumerate(state["param_groups"]):
            for i, p in enumerate(group["params"]):
                entry = state["state"].get(p)
                if not entry:
                    continue
                part = saved.unpack_(p, self.plan_of(p, group, param_name(group, g, i)), entry)
                self._placements.of(group, p.device).adopt_(part)
        self.__dict__.setdefault("skipped", Counter())
        defaults = dict(state.get("defaults") or self.defaults)
        super().__setstate__(state)
        self.defaults = defaults  # torch adds an option that a constructor may not have
