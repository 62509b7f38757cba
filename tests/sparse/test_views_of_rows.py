"""Views that exchange dims are no views of the same rows: with equal sizes, shapes do not tell them apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusion import Example
from fusion.frontend.library import installed
from fusion.testing import Trial, means_what_it_says, trial
from tests.examples import sparse_attention as sparse
from tests.examples.inputs import Inputs, normal, tensors

RULES = {rule.name: rule for rule in installed().rules}


def tried(rule: str, function: Callable[..., object], inputs: Inputs) -> Trial:
    t = trial(RULES[rule], Example(rule, function, inputs), torch.float32)
    means_what_it_says(t)
    return t


def applied(t: Trial) -> bool:
    return t.rule.name in [each.match.rule.name for each in t.outcome.chosen]


def by_rows(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True)


def of_other_sequences(x: Tensor) -> Tensor:
    return x.transpose(0, 1).abs().amax(-1, keepdim=True)


def of_columns(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).abs().amax(-1, keepdim=True)


def along_columns(x: Tensor) -> Tensor:
    return x.abs().amax(-1)[:, None].expand(-1, 4, -1)


@pytest.mark.parametrize(
    ("scale", "fuses"), [(by_rows, True), (of_other_sequences, False), (of_columns, False), (along_columns, False)]
)
def test_scales_of_other_rows(scale: Callable[[Tensor], Tensor], fuses: bool):
    def forward(x: Tensor) -> tuple[Tensor, Tensor]:
        s = scale(x) / 127
        return (x / s).round().clamp(-128, 127).to(torch.int8), s

    assert applied(tried("quantisation", forward, tensors((4, 4, 4)))) == fuses


@pytest.mark.parametrize("turned", [False, True])
def test_blocks_and_places_in_another_order(turned: bool):
    """Of slots [2, 2], each row's block, and in its page the place of another row."""
    size = 4

    def forward(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        places = slots % size
        for cache, rows in ((keys, key), (values, value)):
            cache[slots // size, places.t() if turned else places] = rows
        return keys * 2, values * 2

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = (*2 * ((5, size, 2, 16),), *2 * ((2, 2, 2, 16),))
        given = (normal(n, *shape).to(dtype) for n, shape in enumerate(shapes))
        return *given, torch.tensor([[4, 9], [14, 19]])

    t = tried("cache_write", forward, make)
    assert [each.match.form for each in t.outcome.chosen] == ["both[KeyValuePages]"]


@pytest.mark.parametrize("turned", [False, True])
def test_lists_of_other_queries(turned: bool):
    """As many sequences as queries: the list of each query is that of another one."""
    batch = queries = 3
    keys, heads = 16, sparse.N

    def forward(
        q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, query: Tensor, key: Tensor, weights: Tensor
    ) -> Tensor:
        places = sparse.by_einsum(query, key, weights).topk(sparse.LISTED, dim=-1).indices
        places = places.transpose(0, 1) if turned else places
        seen = torch.zeros(batch, queries, keys, dtype=torch.bool).scatter(-1, places, True)
        k, v = sparse.keys_values(latent, rope, up)
        return scaled_dot_product_attention(q, k, v, seen[:, None], scale=sparse.SCALE)

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(1)
        shapes = (
            (batch, heads, queries, sparse.D + sparse.DR), (batch, keys, sparse.C), (batch, keys, sparse.DR),
            (heads * (sparse.D + sparse.E), sparse.C), (batch, queries, sparse.H, keys), (batch, keys, keys),
            (batch, queries, sparse.H),
        )  # fmt: skip
        return tuple(torch.randn(shape, generator=generator).to(dtype) / 2 for shape in shapes)

    t = tried("sparse_attention", forward, make)
    indexers = [node for node in t.fused.graph.nodes if "lightning_indexer" in str(node.target)]
    assert bool(indexers) != turned
