"""The step and the bookkeeping that every daypack optimizer shares; a subclass says how each parameter is planned."""

from __future__ import annotations

import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from daypack.calibration import codebook
from daypack.calibration.blocks import find_block_size
from daypack.formats.base import State, geometry
from daypack.formats.block_mean import BlockMean
from daypack.formats.block_quantized import BlockQuantized
from daypack.kernels import dispatch, reference
from daypack.optim import state_dict as saved
from daypack.optim.options import Group, check_gradient, check_param, param_name
from daypack.plan import Hyper, ParamPlan, Update

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
        updates = self._collect()
        dispatch.check(updates)
        updates = self._admit(updates, dispatch.observe(updates))
        self.materialize_state()
        for update in updates:
            update.state = self.state[update.param]
        dispatch.observe(self._calibrate(updates))
        for update in updates:
            update.state["step"] += 1
        dispatch.apply(updates)
        return loss

    def _collect(self) -> list[Update]:
        """One `Update` for each parameter with a gradient, after every option and every gradient was checked."""
        for g, group in enumerate(self.param_groups):
            self.check_options(group, f"parameter group {g}")
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
            updates.append(
                Update(
                    name=name,
                    param=p,
                    grad=p.grad,
                    state=state,
                    plan=plan,
                    view=view,
                    hyper=_hyper(group, int(state["step"]) + 1 if state else 1),
                    fused=group["fused"],
                    nonfinite=group["nonfinite"],
                )
            )
        self._warn_if_idle(updates)
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

    def _admit(self, updates: list[Update], totals: list[Tensor]) -> list[Update]:
        """Drop what must not be stepped: gradients that are not finite, and the zero-gradient probe.

        The probe is how torch.distributed.checkpoint has state created: a step with lr 0 on all-zero gradients of
        parameters that were never stepped. lr 0 alone is a warm-up, a zero gradient alone is LoRA.
        """
        admitted = []
        for update, finite in zip(updates, _finite(totals), strict=True):
            if not finite:
                self._refuse(update)
            elif not (update.hyper.lr == 0 and update.hyper.step == 1 and reference.is_zero(update)):
                admitted.append(update)
        return admitted

    def _refuse(self, update: Update) -> None:
        problem = f"the gradient of parameter {update.name} is not finite, or its norm is beyond fp32 (1.8e19)"
        if update.nonfinite == "raise":
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

    def _calibrate(self, updates: list[Update]) -> list[Update]:
        """Learn what the first non-zero gradients teach; returns the updates whose statistics must be taken again."""
        fresh = [
            (update, moment, form)
            for update in updates
            for moment, form in update.plan.moments
            if not self._is_calibrated(form.learned(update.state, moment)) and not reference.is_zero(update)
        ]
        coded = [(u, moment, form.block_size) for u, moment, form in fresh if isinstance(form, BlockQuantized)]
        if coded:
            levels = self._known_codebook()
            if levels is None:
                counts = torch.zeros(codebook.BINS, dtype=torch.int64)
                for update, _, block_size in coded:
                    counts += codebook.histogram(update.grad, update.view, block_size).cpu()
                levels = codebook.learn(counts, coded[0][2])
            for update, moment, _ in coded:
                update.state[moment + "_codebook"].copy_(levels)
        resized = []
        for update, moment, form in fresh:
            if isinstance(form, BlockMean):
                form.resize_(update.state, moment, update.view, find_block_size(update.grad, update.view))
                resized.append(update)
        return resized

    def _is_calibrated(self, learned: Tensor | None) -> bool:
        """Whether the tensor that is all zeros until calibration is so no more. Asked of the device once."""
        if learned is None or learned in self._calibrated:
            return True
        if learned.any():
            self._calibrated[learned] = True
            return True
        return False

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


def _hyper(group: Group, step: int) -> Hyper:
    beta1, beta2 = group["betas"]
    return Hyper(
        lr=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        maximize=group["maximize"],
        step=step,
    )


def _finite(totals: list[Tensor]) -> list[bool]:
    """Whether each total is finite; one transfer from each device."""
    result: dict[int, bool] = {}
    for device in {total.device for total in totals}:
        here = [(i, total) for i, total in enumerate(totals) if total.device == device]
        flags = torch.stack([total.to(torch.float64) for _, total in here]).isfinite().tolist()
        result.update(zip((i for i, _ in here), flags, strict=True))
    return [result[i] for i in range(len(totals))]


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
