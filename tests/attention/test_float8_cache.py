"""Keys and values in float8 with a scale of each token: written by npu_dynamic_quant, read by attention."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from fusion import Example, Rule
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.testing import Trial, trial
from tests.examples.inputs import tensors
from tests.support.fused import call, calls, checked, targets

FLOAT8, BOUND = torch.float8_e4m3fn, 448.0
B, N, M, T, D, SIZE = 2, 8, 2, 96, 64, 32
LENGTHS = torch.tensor([90, 2])
TABLE = torch.tensor([[4, 0, 2], [1, 5, 3]])
ATTENTION, QUANTISATION = (next(r for r in installed().rules if r.name == n) for n in ("attention", "quantisation"))


def stored(x: Tensor, dims: Sequence[int] = (-1,), bound: float = BOUND) -> tuple[Tensor, Tensor]:
    scale = x.float().abs().amax(tuple(dims), keepdim=True) / bound
    return (x.float() / scale).to(FLOAT8), scale


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (x.repeat_interleave(N // M, 1) for x in (k, v))
    hidden = (torch.arange(T) >= LENGTHS[:, None])[:, None, None]
    return ((q @ k.mT).float() * D**-0.5).masked_fill(hidden, -math.inf).softmax(-1).to(v.dtype) @ v


def rows(q: Tensor, k: Tensor, v: Tensor, ks: Tensor, vs: Tensor) -> Tensor:
    return attended(q, *((x.float() * s).to(q.dtype) for x, s in ((k, ks), (v, vs))))


def paged(q: Tensor, k: Tensor, v: Tensor, ks: Tensor, vs: Tensor) -> Tensor:
    k, v = (x[TABLE].reshape(B, T, M, D).transpose(1, 2) for x in (k, v))
    return rows(q, k, v, ks, vs)


def run(rule: Rule, form: object, inputs: Sequence[Tensor], target: str = "ascend950") -> Trial:
    example = Example("float8", form, lambda dtype: inputs)
    return checked(trial(rule, example, torch.bfloat16, options=Options(target=target)))


def cache(*shape: int, dims: Sequence[int] = (1, 3), bound: float = BOUND) -> list[Tensor]:
    """Queries, keys and values as they are stored, and their scales [B, 1 or M, T, 1]."""
    q, k, v = (x.bfloat16() for x in tensors((B, N, 1, D), (B, M, T, D), (B, M, T, D))(torch.float32))
    (k, ks), (v, vs) = (stored(x, dims, bound) for x in (k, v))
    if shape:  # pages, in which the rows of each sequence are those that the table names
        pages = (x.transpose(1, 2).reshape(TABLE.numel(), *shape[1:]) for x in (k, v))
        k, v = (torch.zeros(shape).to(FLOAT8).index_put((TABLE.flatten(),), each) for each in pages)
    return [q, k, v, ks, vs]


@pytest.mark.parametrize(("form", "given"), [(rows, cache()), (paged, cache(6, SIZE, M, D))], ids=["rows", "pages"])
def test_a_cache_is_read_as_it_is_stored(form: object, given: list[Tensor]):
    t = run(ATTENTION, form, given)
    attention = call(t, "npu_fused_infer_attention_score_v2")
    assert attention.args[1].meta["val"].dtype == FLOAT8
    assert attention.kwargs["key_quant_mode"] == 1
    assert not [each.reason for each in t.outcome.refusals if "float8" not in each.reason]


def test_a_chip_without_float8_reads_what_is_dequantised():
    t = run(ATTENTION, rows, cache(), "ascend910_93")
    attention = call(t, "npu_fused_infer_attention_score_v2")
    assert attention.args[1].meta["val"].dtype == torch.bfloat16
    assert "A2 and A3 dequantise int8 alone" in t.outcome.refusals[0].reason


def test_a_scale_of_each_token_and_head_is_no_mode_of_float8():
    t = run(ATTENTION, rows, cache(dims=(3,)))
    assert any("float8 has scales per channel or per token" in each.reason for each in t.outcome.refusals)


@pytest.mark.parametrize(("bound", "fused"), [(448.0, True), (240.0, False), (127.0, False)])
def test_rows_are_quantised_up_to_the_largest_number_of_float8(bound: float, fused: bool):
    t = run(QUANTISATION, lambda x: stored(x, bound=bound), tensors((5, 64))(torch.bfloat16))
    assert targets(t, "npu") == ({"npu.npu_dynamic_quant.default": 1} if fused else {})
    assert fused or "npu_dynamic_quant requires 448" in t.outcome.refusals[0].reason


def test_numbers_that_are_rounded_before_are_other_numbers():
    def whole(x: Tensor) -> tuple[Tensor, Tensor]:
        scale = x.float().abs().amax(-1, keepdim=True) / BOUND
        return (x.float() / scale).round().to(FLOAT8), scale

    t = run(QUANTISATION, whole, tensors((5, 64))(torch.bfloat16))
    assert not calls(t, "npu")
    assert "numbers are rounded to integers before" in t.outcome.refusals[0].reason
