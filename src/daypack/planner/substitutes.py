"""Functions that torch runs differently on the meta device than on a GPU, or not at all: same shapes, same savings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def substitutes(flash: bool) -> Iterator[None]:
    """Replace attention by a flash kernel (if ``flash``; on the meta device torch keeps the attention matrix), and
    grouped products by shapes alone.

    Names are replaced, because checkpoints run again inside the backward pass, where function modes are off. Real
    tensors, also those of other threads, are handled as always.
    """
    replaced: dict[str, Callable[..., Tensor | None]] = {}
    if flash:
        replaced["scaled_dot_product_attention"] = _attention
    if hasattr(nn.functional, "grouped_mm"):
        replaced["grouped_mm"] = _grouped_mm
    originals = {name: getattr(nn.functional, name) for name in replaced}
    for name, substitute in replaced.items():
        setattr(nn.functional, name, _where_meta(originals[name], substitute))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(nn.functional, name, original)


def _where_meta(original: Callable[..., Tensor], substitute: Callable[..., Tensor | None]) -> Callable[..., Tensor]:
    """Return a function that calls ``substitute`` for tensors on the meta device where it gives a result, else
    ``original``.
    """

    def call(first: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        result = substitute(first, *args, **kwargs) if first.is_meta else None
        return original(first, *args, **kwargs) if result is None else result

    return call


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor | None:
    """Keep query, key, value, output and the log-sum-exp of each row for the backward pass, as the kernels for GPUs do.

    None for a mask with a gradient (T5's position bias), which the operator refuses; what runs then keeps the matrix.
    """
    if attn_mask is not None and attn_mask.requires_grad:
        return None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.to(query.dtype)
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    output: Tensor = operator(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return output


class _GroupedProduct(torch.autograd.Function):
    """Rows ``[S, K]`` times their group's matrix of ``[E, K, N]``, as shapes alone."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, matrices: Tensor) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        return rows.new_empty(rows.shape[0], matrices.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return tuple(
            torch.empty_like(saved) if needed else None
            for saved, needed in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        )


def _grouped_mm(rows: Tensor, matrices: Tensor, **options: Any) -> Tensor | None:
    """Multiply grouped rows on the meta device, where torch's own runs in bf16 only. None for forms that experts do not
    use.
    """
    if rows.ndim != 2 or matrices.ndim != 3 or options.get("bias") is not None or options.get("out_dtype") is not None:
        return None
    result: Tensor = _GroupedProduct.apply(rows, matrices)  # type: ignore[no-untyped-call]
    return result
