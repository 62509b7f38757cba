"""Weights of an indexer: one for each token and head, and none for heads alone."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from torch import Tensor

from fusion.graph import Reading
from fusion.testing import capture
from patterns.attention.assumed import Assumed
from patterns.sparse.read import lightning_indexer
from tests.engine.graphs import numbers, read_graph

B, S, N, T, D = 2, 3, 2, 5, 4


@pytest.mark.parametrize(("shape", "is_one"), [((B, S, N, 1), True), ((N, 1), False), ((1, N, 1), False)])
def test_an_indexer_weighs_each_token(shape: tuple[int, ...], is_one: bool):
    """As many heads as sequences: shapes do not tell them apart."""

    def chosen(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        return (F.relu(q @ k.mT.unsqueeze(1)) * weights).sum(2).topk(2).indices

    graph = read_graph(
        capture(chosen, (numbers(B, S, N, D), numbers(B, T, D, seed=1), numbers(*shape, seed=2))).graph.graph
    )
    (places,) = (value for value in graph.places if value.op == "largest_index")
    assert isinstance(lightning_indexer(Assumed.of(graph), places), Reading) == is_one
