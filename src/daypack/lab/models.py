"""A small decoder-only transformer over bytes, the model of the text task.

RMSNorm, gated (SwiGLU) MLP, grouped-query attention, rotary positions, untied output head: the block of today's
language models, kept to one screen per idea.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from daypack.lab.classifier import Classifier

BYTE_VALUES = 256  # a token is a byte


@dataclass(frozen=True)
class TransformerConfig:
    """Shape of a `Transformer`.

    Attributes:
        layers: number of blocks.
        hidden: width of the residual stream; a multiple of `2 * heads`.
        heads: query heads.
        kv_heads: key and value heads, shared by `heads // kv_heads` query heads each.
        mlp_hidden: width inside the gated MLP.
        vocabulary: number of token ids.
        tied: whether the output head is the embedding's own weight.
        rope_base: wavelength base of the rotary positions.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp_hidden: int
    vocabulary: int = BYTE_VALUES
    tied: bool = False
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        if min(self.layers, self.hidden, self.heads, self.kv_heads, self.mlp_hidden, self.vocabulary) < 1:
            raise ValueError(f"every size of a model must be at least 1, got {self}")
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden={self.hidden} must be a multiple of 2 * heads={2 * self.heads} (rotary pairs)")
        if self.heads % self.kv_heads:
            raise ValueError(f"heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")

    @property
    def head_dim(self) -> int:
        """Width of one head."""
        return self.hidden // self.heads


def presets() -> dict[str, TransformerConfig]:
    """Return the named models, smallest first: about 0.13, 0.8, 5.8, 34 and 135 million parameters."""
    return {
        "tiny": TransformerConfig(layers=2, hidden=64, heads=4, kv_heads=2, mlp_hidden=176),
        "small": TransformerConfig(layers=4, hidden=128, heads=4, kv_heads=2, mlp_hidden=352),
        "medium": TransformerConfig(layers=8, hidden=256, heads=8, kv_heads=2, mlp_hidden=704),
        "base": TransformerConfig(layers=12, hidden=512, heads=8, kv_heads=2, mlp_hidden=1408),
        "large": TransformerConfig(layers=12, hidden=1024, heads=16, kv_heads=4, mlp_hidden=2816),
    }


def model_config(name: str, **changes: int | float | bool) -> TransformerConfig:
    """Return the preset called `name`, with `changes` to its fields.

    Raises:
        ValueError: no preset has that name.
    """
    known = presets()
    if name not in known:
        raise ValueError(f"unknown model {name!r}; choose one of {', '.join(known)}")
    return replace(known[name], **changes)  # type: ignore[arg-type]


def rotary_table(length: int, head_dim: int, base: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angles, two fp32 tensors `[length, head_dim / 2]`."""
    frequency = base ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return rotate pairs (i, i + head_dim/2) of `x`, `[batch, heads, length, head_dim]`, by the angle of their
    position.
    """
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention with fewer key and value heads than query heads."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return attend within `x`, `[batch, length, hidden]`."""
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.mlp_hidden, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.mlp_hidden, bias=False)
        self.down_proj = nn.Linear(config.mlp_hidden, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `x`, `[batch, length, hidden]`, position by position."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Block(nn.Module):
    """Pre-norm residual block: attention, then the MLP."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.mlp = GatedMLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add both branches to `x`, `[batch, length, hidden]`."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class Transformer(Classifier):
    """Decoder-only language model; build one with `build_model`, which also initialises it."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, eps=1e-6)
        self.head = nn.Linear(config.hidden, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Compute logits `[batch, length, vocabulary]` of what follows each of `tokens`, `[batch, length]` integers."""
        x = self.embedding(tokens)
        cos, sin = rotary_table(tokens.shape[1], self.config.head_dim, self.config.rope_base, tokens.device)
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def split(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return all but the last and all but the first token of `batch`, `[batch, length + 1]` integers."""
        return batch[:, :-1], batch[:, 1:]


def build_model(
    model: str | TransformerConfig, seed: int, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Transformer:
    """Build a model whose weights depend on `model` and `seed` only; the global random state is not touched.

    Weights are drawn on the CPU in fp32 and then converted: every device and dtype starts from the same numbers.

    Args:
        model: a preset's name or a config.
        seed: seed of the initial weights.
        device: where the parameters live.
        dtype: dtype of parameters, gradients and arithmetic.

    Raises:
        ValueError: unknown preset.
    """
    config = model_config(model) if isinstance(model, str) else model
    with torch.device("meta"):  # no storage and no random numbers: torch's own initial weights are never wanted
        built = Transformer(config)
    built.to_empty(device="cpu")
    if config.tied:
        built.head.weight = built.embedding.weight  # to_empty() gives each its own storage
    initialise(built, seed)
    return built.to(device=device, dtype=dtype)


@torch.no_grad()
def initialise(model: Transformer, seed: int) -> None:
    """Set every weight of a CPU model: normal of std 0.02, GPT-2's smaller std into the residual stream, norms one."""
    generator = torch.Generator().manual_seed(seed)
    into_residual = 0.02 / (2 * model.config.layers) ** 0.5
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.fill_(1.0)
        else:
            branch_end = name.endswith(("o_proj.weight", "down_proj.weight"))
            parameter.normal_(0.0, into_residual if branch_end else 0.02, generator=generator)
