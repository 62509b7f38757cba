"""Fused attention keeps its numbers: over ragged caches, for rows that see nothing, for large scores, at any size."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion
from fusion import testing
from fusion.runtime.verification import relative_error
from fusion.testing import DTYPES, LEVELS
from tests.corpus.base import generator

from .attention_base import Entry, lowest, repeat, tensors
from .test_attention import told, tried

pytestmark = pytest.mark.rotates(12)

HOST = {"target": "host", "lower": "eager"}
CAP = {torch.float32: 5e-6, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # rms error against float64
B, N, M, S, T, D = 3, 4, 2, 6, 40, 16
STEPS = 32
LENGTHS = torch.tensor([3, 6, 1])

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def compiled(form: Any, **options: Any) -> Any:
    torch.compiler.reset()
    return torch.compile(form, backend="cann_fusion", options=HOST, fullgraph=True, **{"dynamic": False, **options})


def fused_once(form: Any, *args: Tensor) -> bool:
    """Whether the code becomes one call of an attention operator."""
    calls = fusion.explain(form, *args, options=HOST).ops
    return sum(count for name, count in calls.items() if "attention" in name) == 1


def check(actual: Tensor, eager: Tensor, exact: Tensor) -> None:
    """At most 1.5 times the error of the code itself and one unit of rounding, and below the cap."""
    error = relative_error(actual, exact)
    assert error <= 1.5 * relative_error(eager, exact) + torch.finfo(actual.dtype).eps
    assert error <= CAP[actual.dtype]


# ragged caches -------------------------------------------------------------------------------------------------------


def left_prefill(q, k, v, keys, values, padding):
    keys[:, :, :S] = k
    values[:, :, :S] = v
    seen = torch.ones(S, S, dtype=torch.bool).tril() & padding[:, None, None, :S]
    return F.scaled_dot_product_attention(q, repeat(k), repeat(v), attn_mask=seen)


def left_step(q, k, v, keys, values, padding, at):
    keys.index_copy_(2, at, k)
    values.index_copy_(2, at, v)
    hidden = (torch.arange(T)[None] > at[:, None]) | ~padding[:, None, None]
    scores = q @ repeat(keys).mT * D**-0.5 + torch.zeros(B, 1, 1, T, dtype=q.dtype).masked_fill(hidden, -math.inf)
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ repeat(values)


def right_prefill(q, k, v, keys, values, lengths):
    keys[:, :, :S] = k
    values[:, :, :S] = v
    hidden = torch.full((S, S), lowest(q), dtype=q.dtype).triu(1)
    scores = q @ repeat(k).mT / math.sqrt(D) + hidden
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ repeat(v)


def right_step(q, k, v, keys, values, lengths, at):
    rows, places = torch.arange(B), lengths + at - S
    keys[rows, :, places] = k[:, :, 0]
    values[rows, :, places] = v[:, :, 0]
    seen = torch.arange(T) <= places[:, None]
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[:, None, None], enable_gqa=True)


@every_dtype
@pytest.mark.parametrize(
    ("prefill", "step", "extra"),
    [
        (left_prefill, left_step, torch.arange(T) >= S - LENGTHS[:, None]),
        (right_prefill, right_step, LENGTHS),
    ],
    ids=["left", "right"],
)
def test_a_prompt_and_steps_over_a_ragged_cache(prefill, step, extra, dtype):
    forms = [(prefill, step), (compiled(prefill), compiled(step)), (prefill, step)]
    dtypes = (dtype, dtype, torch.float64)
    caches = [[torch.zeros(B, M, T, D, dtype=each) for _ in range(2)] for each in dtypes]
    random = generator(1)
    real = (torch.arange(S) >= S - LENGTHS[:, None]) if prefill is left_prefill else torch.arange(S) < LENGTHS[:, None]
    for number in range(STEPS + 1):
        size = S if number == 0 else 1
        qkv = [torch.randn(B, heads, size, D, generator=random).to(dtype) for heads in (N, M, M)]
        at = () if number == 0 else (torch.tensor([S - 1 + number]),)
        results = []
        for each, form, cache in zip(dtypes, forms, caches, strict=True):
            inputs = (*(x.to(each) for x in qkv), *cache, extra, *at)
            if form is forms[1] and number < 2:
                assert fused_once(forms[0][number], *inputs)
            with torch.no_grad():
                results.append(form[min(number, 1)](*inputs))
        kept = real if number == 0 else torch.ones(B, 1, dtype=torch.bool)
        eager, actual, exact = (x.transpose(1, 2)[kept] for x in results)
        check(actual, eager, exact)
    assert all(torch.equal(x, y) for x, y in zip(caches[0], caches[1], strict=True))


# queries that see nothing --------------------------------------------------------------------------------------------

padding = torch.tensor([[False] * 2 + [True] * 4, [True] * 6])


def seen_by(padding, like):
    return torch.ones(6, 6, dtype=torch.bool).tril() & padding[:, None, None]


def zero(q, k, v, padding):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen_by(padding, q))


def not_a_number(q, k, v, padding):
    return (q @ k.mT * 0.25).masked_fill(~seen_by(padding, q), -math.inf).softmax(-1) @ v


def mean(q, k, v, padding):
    return (q @ k.mT * 0.25).masked_fill(~seen_by(padding, q), lowest(q)).softmax(-1) @ v


def mean_by_addition(q, k, v, padding):
    hidden = torch.zeros(2, 1, 6, 6, dtype=q.dtype).masked_fill(~seen_by(padding, q), lowest(q))
    return (q @ k.mT * 0.25 + hidden).softmax(-1) @ v


def narrowed_behind(q, k, v, padding):
    """What float32 holds is -inf in 16 bits."""
    scores = (q @ k.mT * 0.25).float().masked_fill(~seen_by(padding, q), torch.finfo(torch.float32).min)
    return scores.to(q.dtype).softmax(-1) @ v


def narrowed_behind_an_addition(q, k, v, padding):
    hidden = torch.zeros(2, 1, 6, 6).masked_fill(~seen_by(padding, q), torch.finfo(torch.float32).min)
    return (q @ k.mT * 0.25 + hidden).to(q.dtype).softmax(-1) @ v


def in_order(q):
    return torch.full((q.shape[-2], q.shape[-2]), lowest(q), dtype=q.dtype).triu(1)


def infinite_by_overflow(q, k, v, padding):
    hidden = in_order(q) + (~padding[:, None, None]).to(q.dtype) * lowest(q)
    return (q @ k.mT * 0.25 + hidden).softmax(-1) @ v


def inverted(padding, q):
    """As older models expand a mask of padding."""
    hidden = 1.0 - padding[:, None, None, :].expand(2, 1, q.shape[-2], -1).to(q.dtype)
    return hidden.masked_fill(hidden.to(torch.bool), lowest(q))


def summed(q, k, v, padding):
    scores = q @ k.mT * 0.25 + (inverted(padding, q) + in_order(q))
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def summed_one_by_one(q, k, v, padding):
    return ((q @ k.mT * 0.25 + in_order(q)) + inverted(padding, q)).softmax(-1) @ v


def summed_and_clamped(q, k, v, padding):
    scores = q @ k.mT * 0.25 + (inverted(padding, q) + in_order(q))
    return torch.max(scores, torch.tensor(lowest(q), dtype=q.dtype)).softmax(-1) @ v


def summed_over_joined_heads(q, k, v, padding):
    """As XGLM does: heads and sequences are one dim but where the mask is added."""
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    scores = torch.bmm(q * 0.25, k.mT).unflatten(0, (2, 4)) + (inverted(padding, q) + in_order(q))
    scores = torch.max(scores, torch.tensor(lowest(q), dtype=q.dtype)).flatten(0, 1)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (2, 4))


def chosen_and_summed(q, k, v, padding):
    """As GPT-NeoX does: the order replaces scores, padding is added to them."""
    order = in_order(q) == 0
    scores = torch.where(order, q @ k.mT * 0.25, torch.tensor(lowest(q), dtype=q.dtype))
    return (scores + inverted(padding, q)).softmax(-1) @ v


def summed_and_chosen(q, k, v, padding):
    return (q @ k.mT * 0.25 + inverted(padding, q)).masked_fill(in_order(q) != 0, lowest(q)).softmax(-1) @ v


def of_three_levels(q, k, v, padding):
    return (q @ k.mT * 0.25 + in_order(q) * 0.5 + inverted(padding, q) * 0.25).softmax(-1) @ v


def infinite_and_lowered(q, k, v, padding):
    """Where all keys are hidden by both, NaN."""
    hidden = torch.zeros(2, 1, 1, q.shape[-2], dtype=q.dtype).masked_fill(~padding[:, None, None], -math.inf)
    return (q @ k.mT * 0.25 + in_order(q) + hidden).softmax(-1) @ v


UNEVEN = [
    infinite_by_overflow, summed, summed_one_by_one, summed_and_clamped, summed_over_joined_heads, chosen_and_summed,
    summed_and_chosen, of_three_levels, infinite_and_lowered,
]  # fmt: skip


@every_dtype
@pytest.mark.parametrize(
    "form", [zero, not_a_number, mean, mean_by_addition, narrowed_behind, narrowed_behind_an_addition]
)
def test_a_query_that_sees_nothing_gives_what_the_code_gives(form, dtype):
    same_where_nothing_is_seen(form, padding, dtype, "none" if form is mean_by_addition else "dense")


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, *(pytest.param(each, marks=pytest.mark.rotates) for each in DTYPES[1:])], ids=str
)
@pytest.mark.parametrize("form", UNEVEN)
def test_a_query_that_sees_nothing_sees_what_is_lowered_least(form, dtype):
    """Where float16 swallows no score, it is a bias, or refused."""
    same_where_nothing_is_seen(form, torch.arange(192) >= torch.tensor([[70], [0]]), dtype, None)


def same_where_nothing_is_seen(form, padding, dtype, halves):
    size = padding.shape[1]
    t = tried(form, Entry(form, more=tensors(padding), queries=size, keys=size).inputs(dtype), "composite")
    expected = halves if dtype is torch.float16 else "dense"
    assert expected is None or told(t) == expected, t.outcome.refusals
    (eager,), (actual,) = t.captured.graph(*t.captured.inputs), t.fused(*t.inputs())
    empty = (padding.cumsum(-1) == 0)[:, None].expand(2, 4, size)
    assert empty.any()
    if dtype is not torch.float16:  # in which the code rounds scores that a bias has lowered
        torch.testing.assert_close(actual[empty], eager[empty], equal_nan=True, rtol=0, atol=torch.finfo(dtype).eps * 2)
    assert relative_error(actual[~empty], eager[~empty]) <= 4 * torch.finfo(dtype).eps


# large scores and other sizes ----------------------------------------------------------------------------------------


def scaled_late(q, k, v):
    return (q @ k.mT * 2.0**-12).softmax(-1) @ v


@every_dtype
def test_large_scores_do_not_overflow(dtype):
    q, k, v = (x * factor for x, factor in zip(Entry(scaled_late).inputs(dtype), (128, 128, 1), strict=True))
    assert fused_once(scaled_late, q, k, v)
    exact = scaled_late(q.double(), k.double(), v.double())
    assert dtype is not torch.float16 or scaled_late(q, k, v).isnan().any()
    assert relative_error(compiled(scaled_late)(q, k, v), exact) <= CAP[dtype]


class Layer(nn.Module):
    """Projections around attention, whose heads are known and whose sequences are not."""

    def __init__(self, mask: Any) -> None:
        super().__init__()
        self.mask, self.projection = mask, nn.Linear(64, 192, bias=False)
        self.projection.weight = nn.Parameter(torch.randn(192, 64, generator=generator(6)) / 8, requires_grad=False)

    def forward(self, x, there):
        b, s, _ = x.shape
        q, k, v = (each.view(b, s, 4, 16).transpose(1, 2) for each in self.projection(x).chunk(3, -1))
        scores = (q @ k.mT * 0.25).masked_fill(self.mask(s, there), lowest(x))
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, 64)


def causal(s, there):
    return torch.ones(s, s, dtype=torch.bool).triu(1)


def compared(s, there):
    i = torch.arange(s)
    return i[:, None] < i


def padded(s, there):
    i = torch.arange(s)
    return (i[:, None] < i) | ~there[:, None, None]


@pytest.mark.parametrize(
    ("mask", "words"), [(causal, "causal_upper_left"), (compared, "causal_upper_left"), (padded, "dense")]
)
@pytest.mark.parametrize("level", LEVELS)
def test_symbolic_sizes(mask, words, level):
    form = Layer(mask).eval()
    sizes = ((2, 6), (3, 9))
    inputs = [(torch.randn(b, s, 64), torch.arange(s) >= torch.arange(b)[:, None]) for b, s in sizes]
    t = tried(form, inputs[0], level, dynamic=True)
    assert told(t) == words, "\n".join(map(str, t.outcome.refusals))
    testing.means_what_it_says(t)
    run = compiled(form, dynamic=True) if level == "composite" else None
    for x, there in inputs if run is not None else ():
        exact = copy.deepcopy(form).double()(x.double(), there)
        assert relative_error(run(x, there), exact) <= CAP[torch.float32]
