"""The step and the bookkeeping that every daypack optimizer shares; a subclass says how each parameter is planned."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from daypack.formats.base import State, geometry
from daypack.formats.block_mean import BlockMean
from daypack.formats.block_quantized import BlockQuantized
from daypack.kernels import dispatch, reference
from daypack.kernels.dispatch import Work
from daypack.optim import state_dict as saved
from daypack.optim.options import Group, check_gradient, check_param, param_name
from daypack.plan import ParamPlan, Update

#: After this many steps in which no parameter had a gradient, the optimizer says that it may hold the wrong ones.
_STEPS_BEFORE_IDLE_WARNING = 10


class CompressedOptimizer(Optimizer):
    """A `torch.optim.Optimizer` whose moments are stored in the formats that `plan` chooses.

    State is created at the first step, for every trainable parameter; ``step`` counts a parameter's own steps. All that
    training needs stands in ``state`` and ``param_groups`` and is saved by `state_dict`.

    Attributes:
        structural: options that decide how state is stored; with a loaded checkpoint they come from it.
        skipped: how often each parameter was passed over because its gradient was not finite, in this process.
    """

    structural: tuple[str, ...] = ()
    skipped: Counter[str]

    def plan(self, shape: torch.Size, dtype: torch.dtype, group: Group) -> ParamPlan:
        """How a parameter of this global shape and dtype is stored and stepped under the options of ``group``."""
        raise NotImplementedError

    def check_options(self, group: Group, where: str) -> None:
        """Raise ValueError if an option in ``group`` cannot be used; ``where`` says whose options they are."""
        raise NotImplementedError

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self.skipped = Counter()
        self._reset()
        self.check_options(defaults, type(self).__name__)
        super().__init__(params, defaults)

    def _reset(self) -> None:
        """Forget what was derived from the state, because the state may have been replaced."""
        self._calibrated = WeakIdKeyDictionary()
        self._work: Work | None = None
        self._work_key: tuple[Any, ...] = ()
        self._idle_steps = 0

    # ---------------------------------------------------------------- groups

    def add_param_group(self, param_group: Group) -> None:
        """Add a group; it is checked whole first, so that a refused group leaves the optimizer as it was."""
        where = f"parameter group {len(self.param_groups)}"
        self.check_options({**self.defaults, **param_group}, where)
        params = param_group["params"]
        if not isinstance(params, (Tensor, set)):  # torch wraps the one and refuses the other
            params = param_group["params"] = list(params)
            for i, entry in enumerate(params):
                name, p = entry if isinstance(entry, tuple) else (f"{i} of {where}", entry)
                if isinstance(p, Tensor):
                    check_param(p, str(name))
        super().add_param_group(param_group)

    def _params(self) -> Iterator[tuple[Group, str, Tensor]]:
        """Group, name and tensor of every parameter. Read anew at each step: wrappers replace what groups hold."""
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
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = self._collect()
        if work.settled and not self._decides_between_passes():
            self._admit(work.updates, work.step())
            return loss
        admitted = self._admit(work.updates, work.observe())
        if not work.settled:
            self._settle(work, admitted)
        work.apply(admitted)
        return loss

    def _decides_between_passes(self) -> bool:
        """Whether one parameter's gradient may keep others from being stepped, or be the zero-gradient probe."""
        return any(group["nonfinite"] == "raise" or float(group["lr"]) == 0 for group in self.param_groups)

    def _collect(self) -> Work:
        """The parameters with a gradient, after every option and every gradient was checked.

        Most steps differ from the one before in numbers alone: the same tensors in the same layout. What was worked out
        about them is kept for as long as that is so.
        """
        for g, group in enumerate(self.param_groups):
            self.check_options(group, f"parameter group {g}")
        key = self._key()
        if self._work is None or key != self._work_key or not self._work.refresh():
            self._work = None
            idle = [p for _, _, p in self._params() if p.grad is None]
            self._work, self._work_key = Work(self._updates(), idle), key
        for update in self._work.rest:
            check_gradient(update.param, update.grad, update.name)
            for moment, form in update.plan.moments if update.state else ():
                form.load_(update.state, moment, update.view)  # some wrappers put saved state here themselves
        self._warn_if_idle(self._work.updates)
        return self._work

    def _key(self) -> tuple[Any, ...]:
        """What the layout of the work depends on, beside the tensors' own: parameters, states, options."""
        params = [p for group in self.param_groups for p in group["params"]]
        options = [[group[name] for name in ("fused", *self.structural)] for group in self.param_groups]
        sizes = [len(group["params"]) for group in self.param_groups]
        return (
            list(map(id, params)),
            list(map(id, self.param_groups)),
            list(map(id, self.state.values())),
            sizes,
            options,
            dispatch.forced(),
        )

    def _updates(self) -> list[Update]:
        """One `Update` for each parameter with a gradient, once all of them were checked."""
        updates = []
        for group, name, p in self._params():
            if p.grad is None:
                continue
            check_gradient(p, p.grad, name)
            state, plan, view = self.state.get(p, {}), self.plan(p.shape, p.dtype, group), geometry(tuple(p.shape))
            if state:
                saved.check_layout(self, name, p, plan, state)
            for moment, form in plan.moments if state else ():
                form.load_(state, moment, view)  # some wrappers put saved state here themselves
            updates.append(Update(name=name, param=p, group=group, state=state, plan=plan, view=view))
        return updates

    def _warn_if_idle(self, updates: list[Update]) -> None:
        """Say once that no parameter ever had a gradient: the optimizer may hold tensors that nothing trains."""
        self._idle_steps = _STEPS_BEFORE_IDLE_WARNING if updates else self._idle_steps + 1
        if not updates and self._idle_steps == _STEPS_BEFORE_IDLE_WARNING:
            warnings.warn(
                f"{type(self).__name__}: no parameter had a gradient in {self._idle_steps} steps; if the model was "
                "wrapped or moved after the optimizer was built, build the optimizer again",
                stacklevel=4,
            )

    def _admit(self, updates: list[Update], finite: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Which updates are stepped: not those whose gradients are not finite, and not the zero-gradient probe.

        The probe is how torch.distributed.checkpoint has state created: a step with lr 0 on all-zero gradients of
        parameters that were never stepped. lr 0 alone is a warm-up, a zero gradient alone is LoRA.
        """
        for i in np.flatnonzero(~finite):
            self._refuse(updates[i])
        if not any(float(group["lr"]) == 0 for group in self.param_groups):
            return finite
        probed = [float(u.group["lr"]) == 0 and u.steps == 0 and reference.is_zero(u) for u in updates]
        kept: NDArray[np.bool_] = finite & ~np.array(probed, bool)
        return kept

    def _refuse(self, update: Update) -> None:
        problem = f"the gradient of parameter {update.name} is not finite, or its norm is beyond fp32 (1.8e19)"
        if update.group["nonfinite"] == "raise":
            raise ValueError(f"{problem}; nothing was updated (nonfinite='skip' passes over such parameters)")
        self.skipped[update.name] += 1
        if self.skipped[update.name] == 1:
            warnings.warn(
                f"{problem}; it is passed over with its state. Counted in optimizer.skipped, not warned of again",
                stacklevel=4,
            )

    @torch.no_grad()
    def materialize_state(self) -> None:
        """Create the state of every trainable parameter that has none: zeros, step 0 (never stepped). No step is taken.

        `torch.distributed.checkpoint` needs it before it can load into a fresh optimizer.
        """
        for group, _, p in self._params():
            if (p.requires_grad or p.grad is not None) and p not in self.state:
                view = geometry(tuple(p.shape))
                state: State = self.state[p]
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                for moment, form in self.plan(p.shape, p.dtype, group).moments:
                    for spec in form.components(view, p.dtype):
                        device = spec.device(p.device)
                        state[moment + spec.suffix] = torch.zeros(spec.shape, dtype=spec.dtype, device=device)

    # ----------------------------------------------------------- calibration

    def _settle(self, work: Work, admitted: NDArray[np.bool_]) -> None:
        """What first steps need: state, and what is learned from the first gradients that are not zero."""
        self.materialize_state()
        for update in work.updates:
            update.state = self.state[update.param]
        fresh = [
            (update, moment, form)
            for i, update in enumerate(work.updates)
            for moment, form in update.plan.moments
            if admitted[i] and not self._is_calibrated(form.learned(update.state, moment)) and not work.is_zero(i)
        ]
        self._learn_codebook([(u, moment, form) for u, moment, form in fresh if isinstance(form, BlockQuantized)])
        resized = [(u, moment, form) for u, moment, form in fresh if isinstance(form, BlockMean)]
        for update, moment, form in resized:
            form.resize_(update.state, moment, update.view, dispatch.find_block_size(update))
        work.attach()
        if resized:
            work.observe()  # their blocks are others now
        self._work_key = self._key()  # with the states just created
        learned = [form.learned(u.state, moment) for u in work.updates for moment, form in u.plan.moments]
        work.settled = all(map(self._is_calibrated, learned))

    def _learn_codebook(self, coded: list[tuple[Update, str, BlockQuantized]]) -> None:
        if not coded:
            return
        levels = self._known_codebook()
        if levels is None:
            counts = dispatch.histogram((update, form.block_size) for update, _, form in coded)
            levels = dispatch.learn(counts, coded[0][2].block_size)
        for update, moment, _ in coded:
            update.state[moment + "_codebook"].copy_(levels)

    def _is_calibrated(self, learned: Tensor | None) -> bool:
        """Whether the tensor that is all zeros until calibration is so no more. Asked of the device once."""
        if learned is None or learned in self._calibrated:
            return True
        if learned.any():
            self._calibrated[learned] = True
            return True
        return False

    def kernels(self) -> dict[Tensor, str]:
        """Which kernel took each parameter at the last step: ``"native"`` or ``"reference"``."""
        work = self._work
        return {u.param: kernel for u, kernel in zip(work.updates, work.kernels, strict=True)} if work else {}

    def _known_codebook(self) -> Tensor | None:
        """The first calibrated parameter's codebook in group order; later parameters take it over."""
        for _, _, p in self._params():
            for key, value in self.state.get(p, {}).items():
                if key.endswith("_codebook") and value.any():
                    return cast(Tensor, value)
        return None

    # ------------------------------------------------------------ state dict

    def state_dict(self) -> dict[str, Any]:
        """As in torch; shapes follow from the parameters' shapes, and ``torch.load(weights_only=True)`` reads it."""
        live = self.state
        reachable = [p for _, _, p in self._params() if p in live]
        # Entries of tensors that a wrapper took out of the groups cannot be named, and torch would fail on them.
        self.state = defaultdict(dict, {p: live[p] for p in reachable})
        try:
            packed = super().state_dict()
        finally:
            self.state = live
        keys = [key for group in packed["param_groups"] for key in group["params"]]
        for key, (group, _, p) in zip(keys, self._params(), strict=True):
            for moment, form in self.plan(p.shape, p.dtype, group).moments if p in live else ():
                packed["state"][key] = {**packed["state"][key], **form.save(live[p], moment, geometry(tuple(p.shape)))}
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

        hook = self.register_load_state_dict_pre_hook(prepare)  # the last one: it sees what the user's hooks return
        try:
            super().load_state_dict(state_dict)
        finally:
            hook.remove()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Publish loaded or unpickled state: unwrap and place its tensors, and bring them into their live shape."""
        self._reset()
        for group in state["param_groups"]:
            for p in group["params"]:
                entry = state["state"].get(p)
                if not entry:
                    continue
                for key, value in entry.items():
                    if isinstance(value, saved.Keep):
                        entry[key] = value.copy(p.device)
                for moment, form in self.plan(p.shape, p.dtype, group).moments:
                    form.load_(entry, moment, geometry(tuple(p.shape)))
        self.__dict__.setdefault("skipped", Counter())
        super().__setstate__(state)


def materialize_state(optimizer: Optimizer) -> None:
    """`CompressedOptimizer.materialize_state`, refused with the remedy for optimizers of torch's own.

    Raises:
        ValueError: ``optimizer`` is not one of daypack's.
    """
    if not isinstance(optimizer, CompressedOptimizer):
        raise ValueError(
            f"{type(optimizer).__name__} creates its state only in step(); for one of torch's own optimizers use "
            "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
        )
    optimizer.materialize_state()
