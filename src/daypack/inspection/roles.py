"""What a parameter is for, guessed from name, shape and group: for tables and totals only."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

#: The first pattern that is found in a name decides: of parameters with fewer than two dims, and of all others.
_VECTORS = (
    (r"norm|(^|[._])ln[._\d]|layernorm|(^|[._])bn\d*[._]", "norm"),
    (r"bias$", "bias"),
)
_MATRICES = (
    (r"lora_|adapter", "adapter"),
    (r"embed|(^|[._])(wte|wpe)([._]|$)", "embedding"),
    (r"lm_head|(^|[._])(output|head|classifier)\.weight$", "output"),
    (r"attn|attention|[._](q|k|v|o|qkv|out)_proj|query|key|value", "attention"),
    (r"expert|router|(^|[._])moe[._]", "experts"),
    (r"mlp|ffn|feed_forward|(gate|up|down)_proj|(^|[._])fc\d*[._]|c_fc", "feed-forward"),
    (r"conv", "convolution"),
)


def role_of(name: str, shape: Sequence[int], group: Mapping[str, Any], named: bool) -> str:
    """Return a word for what a parameter is for, judged by the shape alone if its name is not its own (``named``
    False).
    """
    if group.get("embedding") is True:
        return "embedding"
    patterns = _VECTORS if len(shape) < 2 else _MATRICES
    found = next((role for pattern, role in patterns if re.search(pattern, name.lower())), "") if named else ""
    return found or ("scalar", "vector", "matrix", "stack of matrices")[min(len(shape), 3)]
