"""A step of packed tokens [T, H], one of each sequence, as serving code writes it: latents in pages, by slot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention

import fusion
from fusion.runtime.verification import relative_error

TOKENS, HIDDEN, RANK, HEADS, NOPE, ROPE, LATENT, VALUE, SIZE = 3, 1024, 1536, 8, 128, 64, 512, 128, 128
TABLE = torch.tensor([[4, 1], [0, 5], [3, 2]])
LENGTHS = torch.tensor([5, 200, 129])
OPTIONS = {"target": "ascend910_93", "lower": "eager"}
PROLOG, ATTENTION = "npu::npu_mla_prolog_v3", "npu::npu_fused_infer_attention_score_v2"


def norm(x: Tensor, gain: Tensor) -> Tensor:
    wide = x.float() if x.dtype != torch.float64 else x
    return gain * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighbours, which come out in halves."""
    low, high = x[..., ::2], x[..., 1::2]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def absorbing(q: tuple[Tensor, Tensor], latent: Tensor, rope: Tensor, up: Tensor, seen: Tensor) -> Tensor:
    w_key, w_value = up.view(HEADS, NOPE + VALUE, LATENT).split((NOPE, VALUE), dim=1)
    absorbed = torch.einsum("thd,hdc->thc", q[0], w_key)
    scores = torch.einsum("thc,tkc->thk", absorbed, latent) + torch.einsum("thr,tkr->thk", q[1], rope)
    weights = (scores * (NOPE + ROPE) ** -0.5).masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    return torch.einsum("thc,hvc->thv", torch.einsum("thk,tkc->thc", weights, latent), w_value)


def row_by_row(q: tuple[Tensor, Tensor], latent: Tensor, rope: Tensor, up: Tensor, seen: Tensor) -> Tensor:
    """Heads as a batch of rows, both products of scores in one, and weights whose sum divides what they give."""
    w_key, w_value = up.view(HEADS, NOPE + VALUE, LATENT).split((NOPE, VALUE), dim=1)
    absorbed = (q[0].unsqueeze(-2) @ w_key).squeeze(-2)
    scores = torch.baddbmm(q[1] @ rope.mT, absorbed, latent.mT) * (NOPE + ROPE) ** -0.5
    scores = scores.float() + torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)[:, None]
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    read = (weights.to(latent.dtype) @ latent) / weights.sum(-1, keepdim=True).to(latent.dtype)
    return torch.bmm(read.transpose(0, 1), w_value.mT).transpose(0, 1)


def expanding(q: tuple[Tensor, Tensor], latent: Tensor, rope: Tensor, up: Tensor, seen: Tensor) -> Tensor:
    nope, values = linear(latent, up).unflatten(-1, (HEADS, -1)).transpose(1, 2).split((NOPE, VALUE), -1)
    keys = torch.cat((nope, rope[:, None].expand(-1, HEADS, -1, -1)), dim=-1)
    return scaled_dot_product_attention(torch.cat(q, -1).unsqueeze(2), keys, values, seen[:, None, None]).squeeze(2)


class Block(nn.Module):
    """Latent attention between two projections; `joint` keeps latent and rotated key in one cache."""

    def __init__(self, attend: Callable[..., Tensor], joint: bool) -> None:
        super().__init__()
        shapes = dict(
            dq=(RANK, HIDDEN), uq=(HEADS * (NOPE + ROPE), RANK), dkv=(LATENT + ROPE, HIDDEN),
            up=(HEADS * (NOPE + VALUE), LATENT), out=(HIDDEN, HEADS * VALUE),
        )  # fmt: skip
        torch.manual_seed(1)
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) / shape[1] ** 0.5, requires_grad=False))
        for name, size in (("gain_q", RANK), ("gain_kv", LATENT)):
            setattr(self, name, nn.Parameter(1 + torch.randn(size) / 8, requires_grad=False))
        self.attend, self.joint = attend, joint

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, latents: Tensor, ropes: Tensor, table: Tensor, lengths: Tensor,
        slots: Tensor,
    ) -> Tensor:  # fmt: skip
        tokens = x.shape[0]
        q = linear(norm(linear(x, self.dq), self.gain_q), self.uq).view(tokens, HEADS, NOPE + ROPE)
        nope, turning = q.split((NOPE, ROPE), dim=-1)
        latent, key = linear(x, self.dkv).split((LATENT, ROPE), dim=-1)
        latent, key = norm(latent, self.gain_kv), rotated(key, cos, sin)
        rows, turned = self.kept(latent, key, latents, ropes, table, slots)
        seen = torch.arange(rows.shape[1]) < lengths[:, None]
        y = self.attend((nope, rotated(turning, cos[:, None], sin[:, None])), rows, turned, self.up, seen)
        return linear(y.reshape(tokens, -1), self.out)

    def kept(
        self, latent: Tensor, key: Tensor, latents: Tensor, ropes: Tensor, table: Tensor, slots: Tensor
    ) -> tuple[Tensor, ...]:
        """All rows of each sequence, the new ones among them."""
        if self.joint:
            latents.view(-1, LATENT + ROPE)[slots] = torch.cat((latent, key), dim=-1)
            return latents[table].flatten(1, 2).split((LATENT, ROPE), dim=-1)
        latents.view(-1, LATENT)[slots] = latent
        ropes.view(-1, ROPE)[slots] = key
        return tuple(each[table].flatten(1, 2) for each in (latents, ropes))


class Placed(Block):
    """The same with a dim for the one head of the pages, which are written by block and place."""

    def kept(
        self, latent: Tensor, key: Tensor, latents: Tensor, ropes: Tensor, table: Tensor, slots: Tensor
    ) -> tuple[Tensor, ...]:
        for pages, rows in ((latents, latent), (ropes, key)):
            pages.unsqueeze(2)[slots // SIZE, slots % SIZE, 0] = rows
        pages = table.flatten()
        return tuple(each.index_select(0, pages).view(len(table), -1, each.shape[-1]) for each in (latents, ropes))


def inputs(joint: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    torch.manual_seed(2)
    angles = torch.randn(TOKENS, ROPE // 2)
    widths = (LATENT + ROPE if joint else LATENT, ROPE)
    given = torch.randn(TOKENS, HIDDEN), angles.cos(), angles.sin(), *(torch.randn(6, SIZE, each) for each in widths)
    at = LENGTHS - 1
    slots = TABLE[torch.arange(TOKENS), at // SIZE] * SIZE + at % SIZE
    return *(each.bfloat16().to(dtype) for each in given), TABLE.clone(), LENGTHS.clone(), slots


@pytest.mark.rotates(12)
@pytest.mark.parametrize("block", [Block, Placed])
@pytest.mark.parametrize("attend", [absorbing, row_by_row, expanding], ids=lambda each: each.__name__)
def test_a_step_is_the_prolog_the_attention_and_two_products(block: type[Block], attend: Callable[..., Tensor]):
    with torch.no_grad():
        report = fusion.explain(block(attend, False).bfloat16(), *inputs(False), options={"target": "ascend910_93"})
    assert report.ops == {PROLOG: 1, ATTENTION: 1, "npu::npu_transpose_batchmatmul": 1}
    graph = report.graphs[0].graph
    (call,) = [node for node in graph.nodes if "fused_infer_attention" in str(node.target)]
    assert call.kwargs["num_query_heads"] == HEADS  # heads are not taken for queries
    named = " ".join(str(node.target) for node in graph.nodes)
    assert not [word for word in ("index_put", "softmax", "select_scatter", "aten.exp.") if word in named]


def test_one_cache_of_both_keeps_its_rows():
    """The operator writes two caches: here its rows are joined and written, and both parts are read."""
    with torch.no_grad():
        report = fusion.explain(Block(absorbing, True).bfloat16(), *inputs(True), options={"target": "ascend910_93"})
    made = f"{PROLOG}_functional"  # its rows are read behind their write, which GE orders by operands alone
    assert report.ops[made] == report.ops[ATTENTION] == report.ops["npu::npu_scatter_nd_update_"] == 1


@pytest.mark.parametrize("joint", [False, True], ids=["apart", "joint"])
@pytest.mark.parametrize("attend", [absorbing, expanding], ids=lambda each: each.__name__)
@pytest.mark.rotates(4)
def test_what_runs_is_as_exact_as_the_model(attend: Callable[..., Tensor], joint: bool):
    block = Block(attend, joint).bfloat16()
    runs = [inputs(joint), inputs(joint), inputs(joint, torch.float64)]
    torch.compiler.reset()
    with torch.no_grad():
        plain = block(*runs[0])
        fused = torch.compile(block, backend="cann_fusion", options=OPTIONS)(*runs[1])
        truth = Block(attend, joint).bfloat16().double()(*runs[2])
    found = [(fused, plain, truth), *zip(*((run[3], run[4]) for run in (runs[1], runs[0], runs[2])), strict=True)]
    for got, had, exact in found:
        allowed = 1.5 * relative_error(had, exact) + torch.finfo(torch.bfloat16).eps
        assert relative_error(got, exact) <= allowed
