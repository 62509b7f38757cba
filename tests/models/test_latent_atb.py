"""Attention of atb on the chips: each way of calling it, at sizes they take, with every other attention left out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

import fusion
from patterns.examples import latent_attention_atb_whole as whole

MLA = "atb::npu_multi_head_latent_attention"
OTHERS = (
    "npu_fused_infer_attention_score_v2",
    "npu_fused_infer_attention_score",
    "npu_fusion_attention",
    "npu_sparse_flash_attention",
)
B, D, DR, C, E, T = 2, 128, 64, 512, 128, 256


def inputs(rows: int, heads: int = 8, paged: bool = False) -> tuple[Tensor, ...]:
    """Queries, latents (or pages in lines of 16), rotated keys, and the projection, a Parameter."""
    torch.manual_seed(0)
    shapes = (B, heads, rows, D + DR), (B, T, C), (B, T, DR), (heads * (D + E), C)
    q, latent, rope, up = (torch.randn(shape).bfloat16() / 4 for shape in shapes)
    if paged:
        latent, rope = (x.view(-1, 128, x.shape[-1] // 16, 16).transpose(1, 2).contiguous() for x in (latent, rope))
    return q, latent, rope, torch.nn.Parameter(up / 8, requires_grad=False)


def model(mask: Callable[[int], Tensor | None], paged: bool = False) -> Callable[..., Tensor]:
    def forward(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
        if paged:
            latent, rope = (x.transpose(1, 2).reshape(B, T, -1) for x in (latent, rope))
        heads = q.shape[1]
        nope, v = linear(latent, up).unflatten(-1, (heads, D + E)).transpose(1, 2).split((D, E), dim=-1)
        k = torch.cat((nope, rope.unsqueeze(1).expand(-1, heads, -1, -1)), dim=-1)
        return scaled_dot_product_attention(q, k, v, mask(q.shape[2]))

    return forward


def last(rows: int) -> Tensor:
    return torch.arange(T) <= (torch.arange(rows) + T - rows)[:, None]


def none(rows: int) -> None:
    return None


def report(function: Any, *args: Any, **options: Any) -> Any:
    chosen = {"target": "ascend910_93", "lower": "eager", "plan_lower": "eager", "disable": OTHERS}
    return fusion.explain(function, *args, options=chosen | options)


@pytest.mark.parametrize("paged", [False, True], ids=["rows", "lines"])
@pytest.mark.parametrize(("rows", "mask"), [(1, none), (4, last)])
def test_the_chip_takes_it_where_nothing_else_is_left(rows: int, mask: Any, paged: bool):
    found = report(model(mask, paged), *inputs(rows, paged=paged))
    assert found.ops[MLA] == 1
    assert ("nzcache" in str(found.graphs[0].graph)) == paged


def parts(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over some keys [B, N, T, D + Dr], with the log-sum-exp in the dtype of the model."""
    nope, v = linear(latent, up).unflatten(-1, (q.shape[1], D + E)).transpose(1, 2).split((D, E), dim=-1)
    k = torch.cat((nope, rope.unsqueeze(1).expand(-1, q.shape[1], -1, -1)), dim=-1)
    return summed(q, k, v)


def summed(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = (q @ k.transpose(-2, -1)).float() * 0.1
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights / total).to(q.dtype) @ v, (top + total.log()).to(v.dtype)


def merged(q: Tensor, k: Tensor, v: Tensor, before: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    scores = (q @ k.transpose(-2, -1)).float() * 0.1
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    out, lse = (weights / total).to(q.dtype) @ v, top + total.log()
    top = torch.maximum(sums, lse)
    old, new = (sums - top).exp(), (lse - top).exp()
    return ((before.float() * old + out.float() * new) / (old + new)).to(q.dtype), top + (old + new).log()


def test_sums_come_from_the_same_call():
    assert "npu_multi_head_latent_attention.lse" in str(report(parts, *inputs(1)).graphs[0].graph)


def test_parts_of_the_keys_are_merged_in_the_call():
    q, k, v, before = (torch.randn(B, 8, n, d).bfloat16() for n, d in ((32, D + DR), (T, D + DR), (T, E), (32, E)))
    found = report(merged, q, k, v, before, torch.randn(B, 8, 32, 1))
    assert found.ops["atb::npu_ring_mla"] == 1
    assert "calc_type_default" in str(found.graphs[0].graph)


def test_rows_of_128_heads_need_the_mask_of_fixed_shape():
    assert report(model(last), *inputs(2, heads=128)).ops[MLA] == 1
    assert MLA not in report(model(none), *inputs(2, heads=128)).ops


def whole_lines(rows: int) -> tuple[Tensor, ...]:
    """Queries and latents in int8, the latter in lines of 32; rotated lanes, a block table, scales of 8 heads."""
    torch.manual_seed(0)
    q, latents = (torch.randint(-127, 128, shape, dtype=torch.int8) for shape in ((B, 8, rows, C), (4, 16, 128, 32)))
    rope, ropes = (torch.randn(shape).bfloat16() for shape in ((B, 8, rows, DR), (4, 4, 128, 16)))
    scales = (torch.rand(8) / 2**unit for unit in (14, 8))
    return q, rope, latents, ropes, torch.tensor([[3, 0], [1, 2]]), *scales


def over_whole(mask: Callable[[int], Tensor | None], table: bool) -> Callable[..., Tensor]:
    def forward(
        q: Tensor, rope: Tensor, latents: Tensor, ropes: Tensor, blocks: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        both = (x[blocks].transpose(2, 3) if table else x.transpose(1, 2) for x in (latents, ropes))
        latent, k_rope = (x.reshape(B, T, -1) for x in both)
        seen = mask(q.shape[2])
        seen = torch.ones((), dtype=torch.bool) if seen is None else seen
        return whole.written_out(q, rope, latent, k_rope, seen, keys, values)

    return forward


@pytest.mark.parametrize("table", [False, True], ids=["own order", "block table"])
@pytest.mark.parametrize(("rows", "mask"), [(1, none), (4, last)])
def test_whole_numbers_in_lines_with_rounded_weights(rows: int, mask: Any, table: bool):
    found = report(over_whole(mask, table), *whole_lines(rows))
    assert found.ops == {MLA: 1}
    call = next(node for node in found.graphs[0].graph.nodes if "latent_attention" in str(node.target))
    assert call.kwargs["cache_mode"] == "int8_nzcache"
    assert call.kwargs.get("mask_type") == ("mask_type_free" if rows > 1 else None)
    assert all(call.kwargs[name].meta["val"].dtype == torch.float32 for name in ("qk_descale", "pv_descale"))


def test_it_stands_back_where_the_other_attention_is_there():
    ops = report(model(none), *inputs(1), disable=()).ops
    assert "npu::npu_fused_infer_attention_score_v2" in ops
    assert MLA not in ops


def test_converted_graphs_do_not_have_it():
    assert MLA not in report(model(none), *inputs(1), plan_lower="torchair").ops


def test_what_runs_is_as_exact_as_the_model():
    function, args = model(last), inputs(3)
    options = {"target": "ascend910_93", "lower": "eager", "plan_lower": "eager", "disable": OTHERS}
    torch.compiler.reset()
    with torch.no_grad():
        got = torch.compile(function, backend="cann_fusion", options=options)(*args).double()
        plain, truth = function(*args).double(), function(*(each.double() for each in args))
    error, allowed = ((each - truth).norm() / truth.norm() for each in (got, plain))
    assert error <= 1.5 * allowed + torch.finfo(torch.bfloat16).eps
