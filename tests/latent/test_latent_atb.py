"""Attention of atb on the chips: each way of calling it, at sizes they take, with every other attention left out."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

import fusion
from fusion.language import Refused
from patterns.extras.latent_attention_atb_call import PagesInOrder
from tests.examples import latent_attention_atb_int8 as whole
from tests.examples import ring_mla
from tests.support.fused import call
from tests.support.one_graph import one_graph

pytestmark = pytest.mark.rotates(8)

MLA = "atb::npu_multi_head_latent_attention"
OTHERS = (
    "npu_fused_infer_attention_score_v2",
    "npu_fused_infer_attention_score",
    "npu_fusion_attention",
    "npu_sparse_flash_attention",
)
B, D, DR, C, E, T = 2, 128, 64, 512, 128, 256

TABLE = torch.tensor([[3, 0], [1, 2]])
"""Which of four pages belong to the sequences."""


def inputs(rows: int, heads: int = 8, lies: str = "rows") -> tuple[Tensor, ...]:
    """Queries, latents (or pages, or those in lines of 16), rotated keys, and the projection, a Parameter."""
    torch.manual_seed(0)
    shapes = (B, heads, rows, D + DR), (B, T, C), (B, T, DR), (heads * (D + E), C)
    q, latent, rope, up = (torch.randn(shape).bfloat16() / 4 for shape in shapes)
    if "lines" in lies:
        latent, rope = (x.view(-1, 128, x.shape[-1] // 16, 16).transpose(1, 2).contiguous() for x in (latent, rope))
    elif lies == "pages":
        latent, rope = (x.view(-1, 128, x.shape[-1]) for x in (latent, rope))
    return q, latent, rope, torch.nn.Parameter(up / 8, requires_grad=False)


def rows_of(x: Tensor, lies: str) -> Tensor:
    """Rows [B, T, D] of pages in their own order, or in that of the table."""
    x = x if lies in ("rows", "lines") else x[TABLE]
    return (x.transpose(-3, -2) if "lines" in lies else x).reshape(B, T, -1)


def model(mask: Callable[[int], Tensor | None], lies: str = "rows") -> Callable[..., Tensor]:
    def forward(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
        latent, rope = (rows_of(x, lies) for x in (latent, rope))
        heads = q.shape[1]
        nope, v = linear(latent, up).unflatten(-1, (heads, D + E)).transpose(1, 2).split((D, E), dim=-1)
        k = torch.cat((nope, rope.unsqueeze(1).expand(-1, heads, -1, -1)), dim=-1)
        scores, seen = q @ k.mT * (D + DR) ** -0.5, mask(q.shape[2])
        scores = scores if seen is None else scores.masked_fill(~seen, -math.inf)
        return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v

    return forward


def last(rows: int) -> Tensor:
    return torch.arange(T) <= (torch.arange(rows) + T - rows)[:, None]


def none(rows: int) -> None:
    return None


def some(rows: int) -> Tensor:
    """What no words tell; a query sees its own key."""
    return (torch.arange(T) * (torch.arange(rows)[:, None] + 5) % 7 > 2) | (last(rows) & ~last(rows + 1)[:-1])


def report(function: Any, *args: Any, **options: Any) -> Any:
    chosen = {"target": "ascend910_93", "lower": "eager", "plan_lower": "eager", "disable": OTHERS}
    return fusion.explain(function, *args, options=chosen | options)


SPEC = "calc_type_spec"


@pytest.mark.parametrize("lies", ["rows", "lines", "pages", "lines by a table"])
@pytest.mark.parametrize(
    ("rows", "mask", "told"),
    [
        (1, none, (None, None)),
        (4, none, (None, SPEC)),
        (4, last, ("mask_type_free", SPEC)),
        (3, some, ("mask_type_spec", SPEC)),
    ],
)
def test_the_chip_takes_it_where_nothing_else_is_left(rows: int, mask: Any, told: tuple[Any, Any], lies: str):
    found = report(model(mask, lies), *inputs(rows, lies=lies))
    assert found.ops[MLA] == 1
    attention = call(found, "latent_attention")
    assert (attention.kwargs.get("mask_type"), attention.kwargs.get("calc_type")) == told
    assert attention.kwargs["cache_mode"] == ("nzcache" if "lines" in lies else "krope_ctkv")


def parts(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over some keys [B, N, T, D + Dr], with the log-sum-exp in the dtype of the model."""
    nope, v = linear(latent, up).unflatten(-1, (q.shape[1], D + E)).transpose(1, 2).split((D, E), dim=-1)
    k = torch.cat((nope, rope.unsqueeze(1).expand(-1, q.shape[1], -1, -1)), dim=-1)
    out, sums = ring_mla.attended(q, k, v)
    return out, sums.to(q.dtype)


def of_pages(q: Tensor, latents: Tensor, ropes: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return parts(q, rows_of(latents, "pages"), rows_of(ropes, "pages"), up)


@pytest.mark.parametrize(("function", "lies"), [(parts, "rows"), (of_pages, "pages")])
def test_sums_come_from_the_same_call(function: Any, lies: str):
    graph = report(function, *inputs(1, lies=lies)).graphs[0].graph
    assert "npu_multi_head_latent_attention.lse" in str(graph)
    assert "aten.index.Tensor" not in str(graph)


def below_a_mask(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """The same of the keys that a mask lets through which no words tell."""
    nope, v = linear(latent, up).unflatten(-1, (q.shape[1], D + E)).transpose(1, 2).split((D, E), dim=-1)
    k = torch.cat((nope, rope.unsqueeze(1).expand(-1, q.shape[1], -1, -1)), dim=-1)
    out, sums = ring_mla.attended(q, k, v, torch.where(some(1), 0.0, -torch.inf))
    return out, sums.to(q.dtype)


def test_sums_below_a_mask_do_not_come_from_it():
    graph = report(below_a_mask, *inputs(1)).graphs[0].graph
    assert "npu_multi_head_latent_attention.lse" not in str(graph)


@pytest.mark.parametrize("before", [False, True], ids=["first", "merged"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "diagonal"])
def test_parts_of_the_keys_are_one_step_of_a_ring(before: bool, causal: bool):
    rows = 512 if causal else 32
    shapes = (rows, D + DR), (512, D + DR), (512, E), (rows, E)
    q, k, v, result = (torch.randn(B, 8, *shape).bfloat16() for shape in shapes)
    weight = torch.nn.Parameter(torch.randn(D + DR, D + DR).bfloat16(), requires_grad=False)
    function = ring_mla.merged if before else ring_mla.attended

    def step(q: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        seen = torch.full((rows, rows), -torch.inf).triu(1) if causal else None
        return function(linear(q, weight), *rest, mask=seen)

    found = report(step, q, k, v, *((result, torch.randn(B, 8, rows, 1)) if before else ()))
    assert found.ops["atb::npu_ring_mla"] == 1
    attention = call(found, "ring_mla")
    assert attention.kwargs["calc_type"] == ("calc_type_default" if before else "calc_type_first_ring")
    assert attention.kwargs["mask_type"] == ("mask_type_triu" if causal else "no_mask")


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
    attention = call(found, "latent_attention")
    assert attention.kwargs["cache_mode"] == "int8_nzcache"
    assert attention.kwargs.get("mask_type") == ("mask_type_free" if rows > 1 else None)
    assert all(attention.kwargs[name].meta["val"].dtype == torch.float32 for name in ("qk_descale", "pv_descale"))


def exponentials(scores: Tensor, top: Tensor | None = None) -> Tensor:
    return (scores - (scores.amax(-1, keepdim=True) if top is None else top)).exp()


def halved(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Rounded, then halved, then cut off."""
    shares = exponentials(scores)
    return ((shares * 127).round() / 2).to(torch.int8).float() * 2, shares.sum(-1, keepdim=True)


def of_another_row(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The largest score is that of other queries."""
    shares = exponentials(scores, scores.flip(1).amax(-1, keepdim=True))
    return (shares * 127).round(), shares.sum(-1, keepdim=True)


def narrowed(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The largest score is rounded to 16 bits first."""
    shares = exponentials(scores, scores.amax(-1, keepdim=True).bfloat16().float())
    return (shares * 127).round(), shares.sum(-1, keepdim=True)


def bounded(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Weights of at most 100."""
    shares = exponentials(scores)
    return (shares * 127).round().clamp(0, 100), shares.sum(-1, keepdim=True)


def squared(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Divided by the sum twice."""
    shares = exponentials(scores)
    return (shares * 127).round(), shares.sum(-1, keepdim=True).square()


@pytest.mark.parametrize("weigh", [halved, of_another_row, narrowed, bounded, squared])
def test_other_weights_stay_as_they_are(weigh: Callable[[Tensor], tuple[Tensor, Tensor]]):
    def attend(q, rope, latent, k_rope, seen, of_scores, of_values):
        weights, total = weigh(whole.scored(q, rope, latent, k_rope, seen, of_scores))
        y = torch.einsum("bnst,btc->bnsc", weights, latent.float()) / total
        return (y * (of_values[:, None, None] / 127)).to(rope.dtype)

    options = {"target": "host", "lower": "eager", "disable": OTHERS, "lengths": "host"}
    inputs = whole.inputs(1)(torch.bfloat16)
    assert MLA in fusion.explain(whole.by_table(whole.in_floats), *inputs, options=options).ops
    assert MLA not in fusion.explain(whole.by_table(attend), *inputs, options=options).ops


def test_it_stands_back_where_the_other_attention_is_there():
    ops = report(model(none), *inputs(1), disable=()).ops
    assert "npu::npu_fused_infer_attention_score_v2" in ops
    assert MLA not in ops


def any_batch(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
    """Attention over all rows, of any number of sequences."""
    heads = q.shape[1]
    nope, v = linear(latent, up).unflatten(-1, (heads, D + E)).transpose(1, 2).split((D, E), dim=-1)
    k = torch.cat((nope, rope.unsqueeze(1).expand(-1, heads, -1, -1)), dim=-1)
    return (q @ k.mT * (D + DR) ** -0.5).softmax(-1, dtype=torch.float32).to(q.dtype) @ v


def of_batch(batch: int) -> tuple[Tensor, ...]:
    """The same inputs of so many sequences, which is not known before a call."""
    *rows, up = inputs(1)
    rows = [each.repeat(batch, *[1] * (each.dim() - 1))[:batch] for each in rows]
    for each in rows:
        torch._dynamo.mark_dynamic(each, 0)  # pyright: ignore[reportPrivateUsage]
    return *rows, up


def test_it_lists_no_lengths_of_sequences_of_any_number():
    found = report(any_batch, *of_batch(3))
    assert not found.ops[MLA]
    assert any("the rewrite is right for some symbolic" in each.reason for each in found.refusals)


@pytest.mark.rotates(3)
def test_another_number_of_sequences_is_not_compiled_anew():
    with one_graph(any_batch, target="ascend910_93", plan_lower="eager") as compiled:
        for batch in (3, 2, 5):
            torch.testing.assert_close(compiled(*of_batch(batch)), any_batch(*of_batch(batch)), rtol=0.02, atol=0.02)
    assert report(any_batch, *of_batch(3), disable=()).ops["npu::npu_fused_infer_attention_score_v2"] == 1


def test_converted_graphs_do_not_have_it():
    assert MLA not in report(model(none), *inputs(1), plan_lower="torchair").ops


def test_pages_in_order_lie_together():
    first, second = torch.zeros(4, 2, 8, 32), torch.zeros(4, 2, 8, 16)
    apart = [each.transpose(0, 1).contiguous().transpose(0, 1) for each in (first, second)]
    assert len(PagesInOrder(first, second).read(2)) == 2
    for pages in ((apart[0], second), (first, apart[1])):
        with pytest.raises(Refused, match="are not contiguous"):
            PagesInOrder(*pages).read(2)


def test_pages_in_order_are_as_many_for_each_sequence():
    with pytest.raises(Refused, match="pages are not the same number for each of"):
        PagesInOrder(torch.zeros(5, 2, 8, 32), torch.zeros(5, 2, 8, 16)).read(2)


def test_what_runs_is_as_exact_as_the_model():
    function, args = model(last), inputs(3)
    options = {"target": "ascend910_93", "lower": "eager", "plan_lower": "eager", "disable": OTHERS}
    torch.compiler.reset()
    with torch.no_grad():
        got = torch.compile(function, backend="cann_fusion", options=options)(*args).double()
        plain, truth = function(*args).double(), function(*(each.double() for each in args))
    error, allowed = ((each - truth).norm() / truth.norm() for each in (got, plain))
    assert error <= 1.5 * allowed + torch.finfo(torch.bfloat16).eps
