"""Attention whose keys lie in several tensors, each with products of its own, and scores that a mask of floats scales.

In the manner of Pegasus-X (tokens of a block and global ones), of caches that are attended to beside new keys, and of
the first GPT: nothing of it is fused, and the report says why.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusion

B, N, S, G, D = 2, 4, 16, 8, 64
OPTIONS = {"target": "ascend910_93", "plan_cache": "off"}
SEVERAL = "there are several tensors of both, each"


def rows(count: int, *blocks: int) -> Tensor:
    return torch.randn(B, N, *blocks, count, D).bfloat16()


def told(function: Callable[..., object], *given: Tensor) -> list[str]:
    report = fusion.explain(function, *given, options=OPTIONS)
    assert not any("attention" in name for name in report.ops)
    return [each.reason for each in report.refusals if each.rule == "softmax_attention"]


def blocks_and_global(q: Tensor, k: Tensor, v: Tensor, others: Tensor, values: Tensor) -> Tensor:
    """Every block sees itself and what all of them see, which stands first."""
    of_all = torch.einsum("bhnkf,bhgf->bhnkg", q, others)
    weights = torch.cat([of_all, torch.einsum("bhnkf,bhnxf->bhnkx", q, k)], -1).softmax(-1)
    shown = torch.einsum("bhnkg,bhgf->bhnkf", weights[..., :G], values)
    return shown + torch.einsum("bhnkx,bhnxf->bhnkf", weights[..., G:], v)


def past_and_present(q: Tensor, k: Tensor, v: Tensor, past: Tensor, values: Tensor) -> Tensor:
    """Scores of cached and of new keys, scaled and masked apart."""
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    new = (q @ k.mT * D**-0.5).masked_fill(hidden, -torch.inf)
    before, now = torch.cat([q @ past.mT * D**-0.5, new], -1).softmax(-1).split([G, S], -1)
    return before @ values + now @ v


@pytest.mark.parametrize(
    ("form", "given"),
    [
        (blocks_and_global, (*(rows(S, 3) for _ in range(3)), rows(G), rows(G))),
        (past_and_present, (*(rows(S) for _ in range(3)), rows(G), rows(G))),
    ],
)
def test_keys_in_several_tensors_are_named(form: Callable[..., Tensor], given: tuple[Tensor, ...]):
    reasons = told(form, *given)
    assert reasons
    assert all(SEVERAL in each for each in reasons)


def test_keys_that_are_joined_before_the_products_are_one_tensor():
    def form(q: Tensor, k: Tensor, v: Tensor, past: Tensor, values: Tensor) -> Tensor:
        return (q @ torch.cat([past, k], 2).mT * D**-0.5).softmax(-1) @ torch.cat([values, v], 2)

    given = (*(rows(S) for _ in range(3)), rows(G), rows(G))
    report = fusion.explain(form, *given, options=OPTIONS)
    assert sum(count for name, count in report.ops.items() if "attention" in name) == 1


def scaled_by_a_mask(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """The first GPT: nothing says that floats are 0 or 1."""
    return (q @ k.mT * seen + -1e4 * (1 - seen)).softmax(-1) @ v


def test_scores_that_a_mask_of_floats_scales_are_named():
    seen = torch.ones(1, 1, S, S).tril().bfloat16()
    (reason,) = told(scaled_by_a_mask, *(rows(S) for _ in range(3)), seen)
    assert "floats are not known to be 0 or 1" in reason


def test_scores_that_booleans_scale_are_masked():
    def form(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return scaled_by_a_mask(q, k, v, seen.to(q.dtype))

    seen = torch.ones(1, 1, S, S, dtype=torch.bool).tril()
    report = fusion.explain(form, *(rows(S) for _ in range(3)), seen, options=OPTIONS)
    assert not any("where that tensor is a mask, pass booleans" in each.reason for each in report.refusals)


def test_dtypes_are_named():
    """Queries and keys that were turned in float32, as CodeGen has them."""

    def form(q: Tensor, k: Tensor, v: Tensor, turn: Tensor) -> Tensor:
        return ((q * turn) @ (k * turn).mT).softmax(-1).to(v.dtype) @ v

    (reason,) = told(form, *(rows(S) for _ in range(3)), torch.randn(S, D))
    assert "their dtypes are float32, float32, bfloat16 and bfloat16" in reason
