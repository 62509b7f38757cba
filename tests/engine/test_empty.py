"""Tensors without elements: no query, no key, no sequence. Nothing raises, and results are those of the plain code."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion
from fusion.graph.algebra import Algebra
from fusion.operators import OPERATORS, refusal
from tests.attention import attention, attention_masks
from tests.corpus.base import Spelling
from tests.corpus.entries import SPELLINGS
from tests.engine.graphs import norm, numbers, rotate

TARGETS = ("host", "ascend910b", "ascend910_93")
every_target = pytest.mark.parametrize("target", TARGETS)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def split_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The widths of keys and values differ: the decomposition computes the softmax itself."""
    return F.scaled_dot_product_attention(q, k, v[..., :64], scale=0.1)


def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A norm, a rotation, a cache that grows, grouped attention, and a projection."""
    cos, sin = (torch.ones(q.shape[-2], q.shape[-1], dtype=q.dtype) * each for each in (0.6, 0.8))
    q = rotate(norm(q, torch.ones(q.shape[-1], dtype=q.dtype)), cos, sin)
    k, v = (torch.cat((torch.zeros_like(each[:, :, :0]), each), dim=-2) for each in (k, v))
    out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return F.silu(out) * out


def write_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As many rows as queries, into a cache that has room."""
    cache = torch.zeros(q.shape[0], 4, 8, q.shape[-1], dtype=q.dtype)
    return cache.index_copy(2, torch.arange(q.shape[2]), q) + 1


FORMS = (sdpa, split_keys, block, write_rows)
ATTENTIONS = (*attention.SPELLINGS, *attention_masks.SPELLINGS)
SIZES = ((2, 0, 0), (2, 0, 5), (2, 3, 0), (0, 3, 3))


def run(form: Callable[..., Any], args: Iterable[Any], **options: Any) -> Any:
    """What the fused `form` gives; anything that the backend warns of is an error."""
    torch._dynamo.reset()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return torch.compile(form, backend="cann_fusion", options=options)(*args)


def agree(form: Callable[..., Any], make: Callable[[], tuple[Any, ...]], **options: Any) -> None:
    with torch.no_grad():
        expected = form(*make())
    torch.testing.assert_close(run(form, make(), **options), expected, rtol=3e-2, atol=3e-2, equal_nan=True)


@pytest.mark.rotates(12)
@every_target
@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.rotates)])
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_no_query_no_key_and_no_sequence(form: Callable[..., Tensor], target: str, lower: str):
    for batch, queries, keys in SIZES:
        q, k, v = (numbers(batch, 4, rows, 128, dtype=torch.bfloat16) for rows in (queries, keys, keys))
        agree(form, lambda q=q, k=k, v=v: (q, k, v), target=target, lower=lower)


@pytest.mark.parametrize("size", [0, 5])
def test_one_graph_of_many_sizes_gives_way_to_one_of_none(size: int):
    torch._dynamo.reset()
    compiled = torch.compile(sdpa, backend="cann_fusion", dynamic=True, options={"target": "host", "lower": "eager"})
    for rows in (8, size, 7):
        args = [numbers(2, 4, rows, 128, seed=each) for each in range(3)]
        with torch.no_grad():
            torch.testing.assert_close(compiled(*args), sdpa(*args))


@pytest.mark.rotates
@pytest.mark.parametrize("spelling", SPELLINGS, ids=lambda spelling: spelling.name)
@pytest.mark.parametrize("sizes", [(2, 0), (0, 3)], ids=str)
def test_every_spelling_without_elements(spelling: Spelling, sizes: tuple[int, int]):
    with torch.no_grad():
        try:
            form, args = spelling.make(torch.bfloat16, *sizes)
            form(*args)
        except (RuntimeError, IndexError, ValueError):
            pytest.skip("plain torch takes no such sizes")
    for target in TARGETS[:2]:
        agree(form, lambda: spelling.make(torch.bfloat16, *sizes)[1], target=target, lower="eager")


@pytest.mark.rotates
@pytest.mark.parametrize("entry", ATTENTIONS, ids=lambda entry: entry.name)
def test_every_attention_without_elements(entry: Any):
    for queries, keys in ((0, 0), (0, entry.keys), (entry.queries, 0)):
        empty = dataclasses.replace(entry, queries=queries, keys=keys)
        try:
            entry.form(*empty.inputs(torch.bfloat16))
        except (RuntimeError, IndexError, ValueError):
            continue
        for target in TARGETS[:2]:
            agree(entry.form, lambda empty=empty: empty.inputs(torch.bfloat16), target=target, lower="eager")


@every_target
def test_an_empty_piece_of_what_has_elements_changes_nothing(target: str):
    """The first step of a cache that grows."""
    q, k, v = (numbers(2, 4, 5, 128, seed=each, dtype=torch.bfloat16) for each in range(3))
    report = fusion.explain(block, q, k, v, options={"target": target})
    assert report.ops["npu::npu_fused_infer_attention_score_v2"] == 1


@pytest.mark.parametrize("chip", ["host", "ascend910b", "ascend910_93", "ascend950"])
def test_no_operator_is_given_an_empty_tensor(chip: str):
    x, gamma = torch.empty(2, 0, 64), torch.empty(64)
    assert refusal(OPERATORS["npu::npu_rms_norm"], chip, (x, gamma), {}) == (
        "input: it has no elements, B is (2, 0); npu_rms_norm requires tensors with elements"
    )
    assert refusal(OPERATORS["npu::npu_rms_norm"], chip, (torch.empty(2, 1, 64), gamma), {}) is None


@pytest.mark.parametrize("axis", [0, 1])
def test_pieces_are_joined_along_one_dim_while_another_is_empty(axis: int):
    algebra = Algebra()
    pieces = [algebra.make("input", (), (name,), (0, 3), torch.float32) for name in "xy"]
    assert algebra.cat(pieces, axis).shape == ((0, 3), (0, 6))[axis]
