"""Zachary's karate club, which ships with networkx, and a graph network that tells the two factions apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from daypack.lab.classifier import Classifier, built

if TYPE_CHECKING:
    from daypack.lab.config import TrainConfig

CLASSES = 2
LABELLED = 4  # members of each faction whose faction is known; the others are held out


def presets() -> dict[str, int]:
    """Return the hidden width by size: about 2, 9 and 37 thousand parameters."""
    return {"tiny": 64, "small": 256, "medium": 1024}


class GraphNet(Classifier):
    """Two graph convolutions (Kipf & Welling 2017, arXiv 1609.02907): `A relu(A X W1) W2`, X the identity.

    A is the adjacency with self-loops, divided by the square roots of both degrees.
    """

    def __init__(self, nodes: int, hidden: int) -> None:
        super().__init__()
        self.inner = nn.Linear(nodes, hidden)
        self.outer = nn.Linear(hidden, CLASSES)
        # The graph is no weight: a checkpoint does not hold it.
        self.register_buffer("adjacency", torch.zeros(nodes, nodes), persistent=False)

    def split(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        """Return nodes and factions of `batch`, `[n, 2]`."""
        return batch[:, 0], batch[:, 1]

    def forward(self, nodes: Tensor) -> Tensor:
        """Compute logits `[n, 2]` of `nodes`, `[n]` integers; every node's features take part."""
        adjacency = cast(Tensor, self.adjacency)
        hidden = self.inner(adjacency).relu()
        return (adjacency @ self.outer(hidden))[nodes]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class GraphTask:
    """Which of two factions each member of a club joined, from who met whom and a few known members.

    Attributes:
        adjacency: fp32 `[nodes, nodes]`, normalised.
        factions: int64 `[nodes]`, 0 or 1.
        source: what the graph is, for people.
        fingerprint: 16 hexadecimal digits that identify it.
    """

    adjacency: Tensor
    factions: Tensor
    source: str
    fingerprint: str

    @classmethod
    def load(cls, config: TrainConfig) -> GraphTask:
        """Read the graph.

        Raises:
            ValueError: networkx is not installed.
        """
        try:
            import networkx
        except ModuleNotFoundError as error:
            raise ValueError(f"task 'graph' needs {error.name}; pip install 'daypack[tasks]'") from None
        club = networkx.karate_club_graph()
        weights = torch.zeros(len(club), len(club))
        for one, other, weight in club.edges(data="weight"):
            weights[one, other] = weights[other, one] = float(weight)
        factions = torch.tensor([int(club.nodes[node]["club"] == "Officer") for node in club])
        content = weights.numpy().tobytes() + factions.numpy().tobytes()
        looped = weights + torch.eye(len(club))
        root = looped.sum(1).rsqrt()
        fingerprint = hashlib.sha256(content).hexdigest()[:16]
        return cls(root[:, None] * looped * root, factions, "networkx's karate club", fingerprint)

    @property
    def about(self) -> str:
        return f"{self.source}: {2 * LABELLED} of {len(self.factions)} nodes labelled"

    def model(self, config: TrainConfig) -> GraphNet:
        """Build a network whose weights depend on `config.model` and `config.seed` alone."""
        nodes, hidden = len(self.factions), presets()[config.model]
        model = cast(GraphNet, built(lambda: GraphNet(nodes, hidden), config.seed))
        cast(Tensor, model.adjacency).copy_(self.adjacency)
        return model

    def batch(self, config: TrainConfig, step: int) -> Tensor:
        """Return the labelled nodes with their factions, the same at every step of a seed: `[8, 2]`."""
        return self._nodes(config.seed)[0]

    def held_out(self, config: TrainConfig) -> Iterator[Tensor]:
        """Yield the other nodes with their factions."""
        yield self._nodes(config.seed)[1]

    def _nodes(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return the labelled nodes and the others, each `[n, 2]` with factions."""
        order = torch.randperm(len(self.factions), generator=torch.Generator().manual_seed(seed))
        known = torch.cat([order[self.factions[order] == faction][:LABELLED] for faction in range(CLASSES)])
        rest = order[~torch.isin(order, known)]
        known, rest = (torch.stack((nodes, self.factions[nodes]), 1) for nodes in (known, rest))
        return known, rest
