"""Parameter shapes of well-known architectures, written out from their published configurations."""

from __future__ import annotations

Shape = tuple[int, ...]


def gpt2(layers: int = 12, hidden: int = 768, vocabulary: int = 50257, context: int = 1024) -> list[Shape]:
    block: list[Shape] = [(hidden,)] * 4  # two layer norms, gain and bias
    for rows, cols in ((3 * hidden, hidden), (hidden, hidden), (4 * hidden, hidden), (hidden, 4 * hidden)):
        block += [(rows, cols), (rows,)]
    return [(vocabulary, hidden), (context, hidden), *block * layers, (hidden,), (hidden,)]


def llama(
    layers: int = 32, hidden: int = 4096, mlp: int = 11008, kv: int = 4096, vocabulary: int = 32000
) -> list[Shape]:
    attention: list[Shape] = [(hidden, hidden), (kv, hidden), (kv, hidden), (hidden, hidden)]
    gated: list[Shape] = [(mlp, hidden), (mlp, hidden), (hidden, mlp)]
    block = [*attention, *gated, (hidden,), (hidden,)]
    return [(vocabulary, hidden), *block * layers, (hidden,), (vocabulary, hidden)]


def mixture(layers: int = 16, experts: int = 8, hidden: int = 2048, mlp: int = 1408) -> list[Shape]:
    block: list[Shape] = [(hidden, hidden)] * 4 + [(experts, hidden), (hidden,), (hidden,)]
    block += [(experts, 2 * mlp, hidden), (experts, hidden, mlp)]
    return [(32000, hidden), *block * layers, (hidden,)]


def resnet50() -> list[Shape]:
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    channels = 64
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convs: list[Shape] = [(width, channels, 1, 1), (width, width, 3, 3), (4 * width, width, 1, 1)]
            if block == 0:
                convs.append((4 * width, channels, 1, 1))
            for conv in convs:
                shapes += [conv, conv[:1], conv[:1]]
            channels = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


def lora(rank: int, layers: int = 32, hidden: int = 4096) -> list[Shape]:
    """Adapters on the four attention projections."""
    return [(rank, hidden), (hidden, rank)] * 4 * layers
