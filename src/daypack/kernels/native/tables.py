"""What the C++ kernels are told of each parameter: the structs of ``native/daypack.h`` and the numbers in them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch

from daypack.calibration.blocks import default_block_size
from daypack.formats.base import StateFormat
from daypack.formats.block_mean import BlockMean
from daypack.formats.block_quantized import BlockQuantized
from daypack.formats.dense import Dense
from daypack.formats.factored import Factored
from daypack.formats.line_mean import LineMean
from daypack.kernels.native.agreement import Description, fields
from daypack.param import ParamPlan, ParamStep
from daypack.rules.adafactor import ADAFACTOR
from daypack.rules.adamw import ADAM, ADAMW
from daypack.rules.base import Rule
from daypack.rules.lamb import LAMB
from daypack.rules.lion import LION
from daypack.rules.sgd import SGD

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
#: Scales of larger blocks are left to the reference: a block's fresh moments wait in a buffer of fixed size.
LARGEST_NATIVE_BLOCK = 4096
#: What a step returns that found no memory.
NO_MEMORY = -2

_POINTERS = ["param", "grad", "step", "codes", "scale", "codebook", "map", "exp_avg", "exp_avg_sq"]
_POINTERS += ["v_codes", "v_scale", "v_map", "row", "col", "block", "owners", "sizes", "sums", "squares"]
_POINTERS += ["basis", "basis_left"]
_NUMBERS = ["matrices", "rows", "cols", "first", "whole_rows", "block_size", "groups", "numel"]
_NUMBERS += ["v_block_size", "v_kind", "param_type", "grad_type", "options", "rank", "full_rows", "full_cols"]
PARAM = np.dtype([(name, np.uint64) for name in _POINTERS] + [(name, np.int64) for name in _NUMBERS])
_OPTIONS = ["lr", "beta1", "beta2", "eps", "weight_decay", "sign", "rule", "dampening", "nesterov", "trust_ratio"]
_OPTIONS += ["beta2_decay", "relative_step", "scale_parameter", "smallest_scale", "clip", "whole_decay", "scale"]
OPTIONS = np.dtype([(name, np.float64) for name in _OPTIONS])
_FORMATS = {type(None), Dense, BlockQuantized, Factored, BlockMean, LineMean}
_RULES = {ADAMW: 0, ADAM: 1, SGD: 2, LION: 3, LAMB: 4, ADAFACTOR: 5}
FACTORED, BLOCKS, ROWS, COLS = 1, 2, 3, 4  # 0: a second moment for each element, or none


#: State keys that the kernels read, and the field of the table that points to each.
FIELDS = {
    "step": "step",
    "exp_avg_codes": "codes",
    "exp_avg_scale": "scale",
    "exp_avg_codebook": "codebook",
    "exp_avg": "exp_avg",
    "exp_avg_sq": "exp_avg_sq",
    "exp_avg_sq_codes": "v_codes",
    "exp_avg_sq_scale": "v_scale",
    "exp_avg_sq_row": "row",
    "exp_avg_sq_col": "col",
    "exp_avg_sq_block": "block",
    "basis": "basis",
    "basis_left": "basis_left",
}


BLOCK_SIZE = "exp_avg_sq_block_size"


def block_size(item: ParamStep) -> int:
    """Return the elements per scale of coded moments; 1 where none is coded."""
    sizes = [form.block_size for _, form in item.plan.kept if isinstance(form, BlockQuantized)]
    return max(1, min(sizes[0], item.view.cols)) if sizes else 1


def v_kind(form: StateFormat | None) -> int:
    if isinstance(form, LineMean):
        return ROWS if form.axis == "row" else COLS
    return FACTORED if isinstance(form, Factored) else BLOCKS if isinstance(form, BlockMean) else 0


def v_block_size(item: ParamStep) -> int:
    """Return the columns per block mean; 0 where there are none."""
    if not isinstance(item.plan.format_of("exp_avg_sq"), BlockMean):
        return 0
    return int(item.state.get(BLOCK_SIZE, 0)) or default_block_size(item.view.cols)


def options_of(whole: Any, translated: Rule, projected: bool) -> tuple[float, ...]:
    """Return the fields of `OPTIONS` from a group and a rule; what the rule does not know is 0.

    Args:
        projected: for a stand-in, which does not decay itself.
    """
    group, rule = translated.read(whole), translated.plain
    # Other keys of a group are the user's own, whatever they are called.
    numbers = {name: group[name] if name in rule.options else 0.0 for name in _OPTIONS}
    numbers.update(sign=-1.0 if group["maximize"] else 1.0, rule=_RULES[rule])
    if projected:
        numbers.update(weight_decay=0.0, whole_decay=whole["weight_decay"], scale=whole["scale"])
    if "betas" in rule.options:
        numbers["beta1"], numbers["beta2"] = group["betas"]
    if rule == SGD:
        numbers["beta1"] = group["momentum"]
    if rule == ADAFACTOR:
        eps, numbers["smallest_scale"] = group["eps"]
        numbers["eps"] = torch.finfo(torch.float32).eps if eps is None else eps
        numbers["beta1"], numbers["clip"] = group["beta1"] or 0.0, group["d"]
    return tuple(map(float, numbers.values()))


@lru_cache(maxsize=4096)
def refusal_of_formats(plan: ParamPlan) -> str | None:
    m, v, rule = plan.format_of("exp_avg"), plan.format_of("exp_avg_sq"), plan.rule.plain
    if rule not in _RULES or not {type(m), type(v)} <= _FORMATS:  # not what was derived from them either
        return f"no native kernel for the rule {rule.name}"
    if rule in (SGD, LION):
        fits = m is not None and v is None
    else:
        fits = (m is not None or rule == ADAFACTOR) and v is not None
    if not fits or (rule == ADAM and v is not None and v.statistics):
        return f"no native kernel for the rule {rule.name} with these moments"
    coded = [form for form in (m, v) if isinstance(form, BlockQuantized)]
    if any(form.block_size > LARGEST_NATIVE_BLOCK for form in coded) or len({form.block_size for form in coded}) > 1:
        return f"no native kernel for blocks over {LARGEST_NATIVE_BLOCK} elements, or of different sizes"
    if any(form.codebook == "learned" and (form.rounding != "dithered" or form is v) for form in coded):
        return "no native kernel for learned codes of second moments or without dither"
    return None


def description() -> Description:
    """Return what is laid out and numbered here, for comparison with what the library was built with."""
    types = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16"}
    numbers = {
        "DaypackType": {types[dtype]: number for dtype, number in TYPES.items()},
        "DaypackSecondMoment": {"OWN": 0, "FACTORED": FACTORED, "BLOCKS": BLOCKS, "ROWS": ROWS, "COLS": COLS},
        "DaypackRule": {rule.name.upper(): number for rule, number in _RULES.items()},
        "DaypackLimit": {"LARGEST_BLOCK": LARGEST_NATIVE_BLOCK, "NO_MEMORY": NO_MEMORY},
    }
    written = {owner: {name: str(number) for name, number in each.items()} for owner, each in numbers.items()}
    return {"DaypackParam": fields(PARAM), "DaypackOptions": fields(OPTIONS), **written}
