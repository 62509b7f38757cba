"""Attention over pages as serving code writes it by hand: one write of keys and values, caches bit for bit eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusion

pytestmark = pytest.mark.rotates(8)

HEADS, DIM, BLOCKS, SIZE, LAYERS = 2, 16, 7, 4, 2
RULES = {"cache_write"}
TABLE = torch.tensor([[3, 6, 0], [5, 1, 2]])

Write = Callable[[Tensor, Tensor, Tensor], None]


def viewed(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    cache.view(-1, HEADS, DIM)[slots] = rows


def copied(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    cache.flatten(0, 1).index_copy_(0, slots % (BLOCKS * SIZE), rows)


def by_block(cache: Tensor, rows: Tensor, slots: Tensor) -> None:
    cache[slots // SIZE, slots % SIZE] = rows


class Layer(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        self.write = write
        self.qkv = nn.Linear(HEADS * DIM, 3 * HEADS * DIM, bias=False)
        self.out = nn.Linear(HEADS * DIM, HEADS * DIM, bias=False)

    def forward(self, x: Tensor, cache: tuple[Tensor, Tensor], slots: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        """x [B, H], caches [Blocks, Size, N, D], slots [B], table [B, most], lengths [B] with this token."""
        query, key, value = self.qkv(x).view(len(x), 3, HEADS, DIM).unbind(1)
        for pages, rows in zip(cache, (key, value), strict=True):
            self.write(pages, rows, slots)
        keys, values = (pages[table].flatten(1, 2) for pages in cache)
        scores = torch.einsum("bnd,btnd->bnt", query, keys) * DIM**-0.5
        unseen = torch.arange(keys.shape[1]) >= lengths[:, None]
        share = scores.masked_fill(unseen[:, None], -torch.inf).softmax(-1)
        return x + self.out(torch.einsum("bnt,btnd->bnd", share, values).flatten(1))


class Model(nn.Module):
    def __init__(self, write: Write) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList([Layer(write) for _ in range(LAYERS)])

    def forward(self, x: Tensor, caches, slots: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, slots, table, lengths)
        return x


def fresh(dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    return [
        tuple(torch.randn(BLOCKS, SIZE, HEADS, DIM, generator=generator).to(dtype) for _ in range(2))
        for _ in range(LAYERS)
    ]


def step(number: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The token of each sequence, its slot and how long the sequence is with it; the second one is not in use at 2."""
    x = torch.randn(2, HEADS * DIM, generator=torch.Generator().manual_seed(number)).to(dtype)
    positions = torch.tensor([number, number + 3])
    slots = TABLE[torch.arange(2), positions // SIZE] * SIZE + positions % SIZE
    return x, slots.where(torch.tensor([True, number != 2]), -1), positions + 1


def explained(write: Write, target: str, plan_lower: str):
    x, slots, lengths = step(0, torch.bfloat16)
    model = Model(write).to(torch.bfloat16).eval()
    options = {"target": target, "plan_lower": plan_lower}
    return fusion.explain(model, x, fresh(torch.bfloat16), slots, TABLE, lengths, options=options)


@pytest.mark.parametrize("write", [viewed, copied, by_block])
@pytest.mark.parametrize(("target", "plan_lower"), [("host", "eager"), ("ascend910_93", "npugraph_ex")])
def test_one_call_writes_keys_and_values(write: Write, target: str, plan_lower: str):
    report = explained(write, target, plan_lower)
    assert report.ops["atb::_npu_reshape_and_cache"] == LAYERS
    called = {str(node.target) for gm in report.graphs for node in gm.graph.nodes}
    assert not any(name.startswith(("aten.copy_", "aten.index_put")) for name in called)


def test_attention_reads_the_pages_themselves():
    report = explained(viewed, "host", "eager")
    assert report.ops["npu::npu_fused_infer_attention_score_v2"] == LAYERS
    called = {str(node.target) for gm in report.graphs for node in gm.graph.nodes}
    assert "aten.index.Tensor" not in called


def test_torchair_gets_the_form_that_it_converts():
    assert explained(viewed, "ascend910_93", "torchair").ops["npu::npu_scatter_pa_kv_cache_functional"] == LAYERS


SETTINGS = [
    *((write, "eager", dtype) for write in (viewed, copied, by_block) for dtype in (torch.bfloat16, torch.float32)),
    (viewed, "inductor", torch.float32),
]


@pytest.mark.parametrize(("write", "lower", "dtype"), SETTINGS)
def test_caches_are_eagers(write: Write, lower: str, dtype: torch.dtype):
    """Also where a slot is -1: eager counts it from the end, so the last row is written."""
    torch.compiler.reset()
    model = Model(write).to(dtype).eval().requires_grad_(False)
    options = {"target": "host", "lower": lower, "rules": RULES}
    compiled = torch.compile(model, backend="cann_fusion", options=options, dynamic=False, fullgraph=True)
    plain, ours = fresh(dtype), fresh(dtype)
    places = [each.data_ptr() for pair in ours for each in pair]
    with torch.no_grad():
        for number in range(6):
            x, slots, lengths = step(number, dtype)
            expected = model(x, plain, slots, TABLE, lengths)
            got = compiled(x, ours, slots, TABLE, lengths)
            exact = {"rtol": 0, "atol": 0} if lower == "eager" else {}
            torch.testing.assert_close(got, expected, **exact)
            for have, want in zip(sum(ours, ()), sum(plain, ()), strict=True):
                torch.testing.assert_close(have, want, **exact)
    assert [each.data_ptr() for pair in ours for each in pair] == places


def test_a_slot_beyond_the_pages_writes_nothing():
    torch.compiler.reset()
    model = Model(viewed).eval().requires_grad_(False)
    options = {"target": "host", "lower": "eager", "rules": RULES}
    compiled = torch.compile(model, backend="cann_fusion", options=options, dynamic=False)
    x, _, lengths = step(0, torch.float32)
    ours, before = fresh(torch.float32), fresh(torch.float32)
    with torch.no_grad(), pytest.raises((IndexError, RuntimeError)):
        compiled(x, ours, torch.tensor([BLOCKS * SIZE, 0]), TABLE, lengths)
    for have, want in zip(sum(ours, ()), sum(before, ()), strict=True):
        assert torch.equal(have.flatten(0, 1)[1:], want.flatten(0, 1)[1:]), "another row than the one asked for"
