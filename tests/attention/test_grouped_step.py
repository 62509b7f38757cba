"""One query of grouped heads [B, M, G, D] without a dim for it: it reads rows and pages as a step of decoding does."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from fusion import testing
from fusion.testing import LEVELS, Level, Trial
from tests.engine.graphs import numbers

from .lowered import Form, lowerings, tried

M, G, D, SIZE, PAGES, BLOCKS = 8, 8, 128, 128, 2, 4
TABLE = torch.tensor([[3, 1], [0, 2]])
LENGTHS = torch.tensor([SIZE + 3, 9])


def grouped(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """q [B, M · G · D], k and v [B, T, M, D]."""
    q = q.view(q.shape[0], M, G, D)
    scores = torch.einsum("bmgd,btmd->bmgt", q, k) * D**-0.5
    hidden = torch.arange(k.shape[1]) >= lengths[:, None]
    weights = scores.masked_fill(hidden[:, None, None], -torch.inf).float().softmax(-1).to(v.dtype)
    return torch.einsum("bmgt,btmd->bmgd", weights, v).flatten(1)


def in_rows(q: Tensor, k: Tensor, v: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Pages [Block, Size, M, D]."""
    return grouped(q, *(each[table].flatten(1, 2) for each in (k, v)), lengths)


def scaled(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """The same in int8, with a scale of each channel."""
    return grouped(q, *(each[table].flatten(1, 2).to(q.dtype) * scale for each in (k, v)), lengths)


def in_lines(q: Tensor, k: Tensor, v: Tensor, scale: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Pages in lines of NZ [Block, M · D / 32, Size, 32], whose lines are turned to rows of all heads at once."""
    rows = (each.index_select(0, table.flatten()) for each in (k, v))
    rows = (each.unflatten(0, table.shape).transpose(2, 3).reshape(table.shape[0], -1, M, D) for each in rows)
    return grouped(q, *(each.to(q.dtype) * scale for each in rows), lengths)


def turned(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """Rotated by pairs before it, on heads in one dim."""
    q = q.unflatten(-1, (-1, D))
    left, right = q.chunk(2, -1)
    return grouped(torch.cat((-right, left), -1).flatten(1), k, v, lengths)


def alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One token of one sequence, q [M · G · D], k and v [T, M, D]."""
    scores = torch.einsum("mgd,tmd->mgt", q.view(M, G, D), k) * D**-0.5
    return torch.einsum("mgt,tmd->mgd", scores.softmax(-1), v).flatten()


def with_sinks(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """A sink of each head of queries."""
    scores = torch.einsum("bmgd,btmd->bmgt", q.view(-1, M, G, D), k) * D**-0.5
    joined = torch.cat((scores, sinks.view(1, M, G, 1).expand(*scores.shape[:-1], 1)), -1)
    return torch.einsum("bmgt,btmd->bmgd", joined.softmax(-1)[..., :-1], v).flatten(1)


def floats(*shape: int, seed: int = 0) -> Tensor:
    return numbers(*shape, seed=seed).bfloat16()


def int8(*shape: int, seed: int = 0) -> Tensor:
    return (numbers(*shape, seed=seed) * 40).round().clamp(-128, 127).to(torch.int8)


Q, SCALE = floats(2, M * G * D), (numbers(M, D, seed=5).abs() / 64 + 2**-6).bfloat16()
ROWS, PAGED, LINES = (2, SIZE, M, D), (BLOCKS, SIZE, M, D), (BLOCKS, M * D // 32, SIZE, 32)
FORMS: dict[str, tuple[Form, list[Tensor]]] = {
    "rows": (grouped, [Q, floats(*ROWS), floats(*ROWS, seed=1), LENGTHS.clamp(max=SIZE)]),
    "pages": (in_rows, [Q, floats(*PAGED), floats(*PAGED, seed=1), TABLE, LENGTHS]),
    "int8 pages": (scaled, [Q, int8(*PAGED), int8(*PAGED, seed=1), SCALE, TABLE, LENGTHS]),
    "int8 pages in NZ": (in_lines, [Q, int8(*LINES), int8(*LINES, seed=1), SCALE, TABLE, LENGTHS]),
    "turned": (turned, [Q, floats(*ROWS), floats(*ROWS, seed=1), LENGTHS.clamp(max=SIZE)]),
    "one token": (alone, [Q[0], floats(*ROWS[1:]), floats(*ROWS[1:], seed=1)]),
    "sinks": (with_sinks, [Q, floats(*ROWS), floats(*ROWS, seed=1), floats(M * G, seed=2)]),
}


def call(t: Trial) -> torch.fx.Node:
    (found,) = [each for each in t.fused.graph.nodes if "fused_infer_attention" in str(each.target)]
    return found


@pytest.mark.rotates(12)
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("level", LEVELS)
def test_its_heads_are_no_queries(name: str, level: Level):
    form, inputs = FORMS[name]
    t = tried(form, inputs, level)
    assert lowerings(t)
    testing.means_what_it_says(t)
    kwargs = call(t).kwargs
    assert (kwargs["num_query_heads"], kwargs["num_key_value_heads"]) == (M * G, M)
    assert (kwargs.get("block_table") is not None) == ("pages" in name)


def queries(q: Tensor, k: Tensor, v: Tensor, own: bool = False) -> Tensor:
    """q [B, S, N, D]: S queries of each head, of which each sees keys of its own if so said."""
    scores = torch.einsum("bhsd,bhtd->bhst", q.transpose(1, 2), k) * D**-0.5
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril() if own else True
    return torch.einsum("bhst,bhtd->bshd", scores.masked_fill(~torch.as_tensor(seen), -torch.inf).softmax(-1), v)


def rows_with_order(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, M · G · D] as groups, of which a later one sees more keys."""
    scores = torch.einsum("bmgd,btmd->bmgt", q.view(-1, M, G, D), k) * D**-0.5
    later = torch.ones(G, k.shape[1], dtype=torch.bool).tril().logical_not()
    return torch.einsum("bmgt,btmd->bmgd", scores.masked_fill(later, -torch.inf).softmax(-1), v).flatten(1)


@pytest.mark.parametrize(
    ("form", "inputs"),
    [
        (queries, [floats(2, G, M, D), *(floats(2, M, SIZE, D, seed=n) for n in (1, 2))]),
        (partial(queries, own=True), [floats(2, G, M, D), *(floats(2, M, G, D, seed=n) for n in (1, 2))]),
    ],
)
def test_queries_stay_queries(form: Form, inputs: list[Tensor]):
    t = tried(form, inputs)
    assert lowerings(t)
    testing.means_what_it_says(t)
    assert call(t).kwargs["num_query_heads"] == M


def test_heads_that_see_other_keys_than_those_of_their_group_mean_what_they_say():
    t = tried(rows_with_order, [Q, floats(*ROWS), floats(*ROWS, seed=1)])
    assert not t.outcome.failures
    testing.means_what_it_says(t)
