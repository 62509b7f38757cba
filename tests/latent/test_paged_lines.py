"""Latent caches that serving code keeps in lines of NZ: written and read in place, their numbers those of eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm

import fusion
from fusion.runtime.verification import relative_error

pytestmark = pytest.mark.rotates(8)

HIDDEN, RANK, N, D, C, R, LINE, BLOCKS, SIZE, B = 1024, 1536, 4, 128, 512, 64, 16, 9, 16, 2
TABLE = torch.tensor([[3, 8, 1], [5, 2, 7]])
FIA, PRODUCT = "npu::npu_fused_infer_attention_score_v2", "npu::npu_transpose_batchmatmul"
PROLOG, LATENT_LINE = "npu::npu_mla_prolog_v3", "npu::npu_kv_rmsnorm_rope_cache_v2"

Write = Callable[[Tensor, Tensor, Tensor], None]
Read = Callable[[Tensor, Tensor], Tensor]


def by_page(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """[Block, A, Size, L]."""
    pages[slots // SIZE, :, slots % SIZE] = rows.unflatten(-1, (-1, LINE))


def by_page_of_a_head(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """[Block, 1, A, Size, L]."""
    pages[slots // SIZE, :, :, slots % SIZE] = rows.view(len(rows), 1, -1, LINE)


def through_a_view(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """[Block, 1, A, Size, L] without its head."""
    block = torch.div(slots, SIZE, rounding_mode="floor")
    pages.squeeze(1)[block, :, slots.remainder(SIZE)] = rows.reshape(-1, pages.shape[2], LINE)


def turned_behind(pages: Tensor, table: Tensor) -> Tensor:
    return pages[table].permute(0, 1, 3, 2, 4).reshape(B, -1, pages.shape[1] * LINE)


def turned_before(pages: Tensor, table: Tensor) -> Tensor:
    return pages.transpose(1, 2).flatten(2)[table].flatten(1, 2)


def of_a_head(pages: Tensor, table: Tensor) -> Tensor:
    gathered = pages.index_select(0, table.flatten()).view(B, -1, *pages.shape[1:])
    return gathered.squeeze(2).transpose(2, 3).flatten(3).flatten(1, 2)


FORMS = [
    (by_page, turned_behind, ()),
    (by_page, turned_before, ()),
    (by_page_of_a_head, of_a_head, (1,)),
    (through_a_view, of_a_head, (1,)),
]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs rotated, even components first."""
    x = x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class Block(nn.Module):
    """Latent attention over pages, as it is written by hand; with `rank` 0, queries come from one projection."""

    def __init__(self, write: Write, read: Read, rank: int = RANK) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.write, self.read = write, read
        sizes = {"dkv": (C + R, HIDDEN), "up": (N * 2 * D, C), "out": (HIDDEN, N * D)}
        sizes |= {"uq": (N * (D + R), rank or HIDDEN), **({"dq": (rank, HIDDEN)} if rank else {})}
        for name, shape in sizes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) / shape[1] ** 0.5, requires_grad=False))
        self.gain_q, self.gain_kv = (nn.Parameter(1 + torch.randn(size) / 8, False) for size in (rank or 1, C))
        self.rank = rank

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, latents: Tensor, ropes: Tensor, table: Tensor, lengths: Tensor,
        slots: Tensor,
    ) -> Tensor:  # fmt: skip
        """x [B, S, H], tables [B, S, R], lengths [B] with the new tokens, slots [B · S]."""
        queries = x.shape[1]
        c = rms_norm(linear(x, self.dq), (self.rank,), self.gain_q, 1e-6) if self.rank else x
        q = linear(c, self.uq).view(B, queries, N, -1).transpose(1, 2)
        nope, rotated = q.split((D, R), -1)
        q = torch.cat((nope, turned(rotated, cos[:, None], sin[:, None])), -1)
        latent, rope = linear(x, self.dkv).split((C, R), -1)
        latent = rms_norm(latent, (C,), self.gain_kv, 1e-6)
        for pages, rows in ((latents, latent), (ropes, turned(rope, cos, sin))):
            self.write(pages, rows.flatten(0, 1), slots)
        latent, rope = (self.read(pages, table) for pages in (latents, ropes))
        k, v = linear(latent, self.up).unflatten(-1, (N, -1)).transpose(1, 2).split((D, D), -1)
        k = torch.cat((k, rope[:, None].expand(-1, N, -1, -1)), -1)
        at = lengths[:, None] - queries + torch.arange(queries)
        unseen = torch.arange(latent.shape[1]) > at[:, None, :, None]
        scores = (q @ k.transpose(-2, -1)).float() * (D + R) ** -0.5
        y = scores.masked_fill(unseen, -torch.inf).softmax(-1).to(q.dtype) @ v
        return x + linear(y.transpose(1, 2).flatten(2), self.out)


def caches(heads: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shapes = [(BLOCKS, *heads, width // LINE, SIZE, LINE) for width in (C, R)]
    return [torch.randn(shape, generator=generator).bfloat16().to(dtype) for shape in shapes]


def step(number: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """What is new at a step, and where it goes: a token of each sequence."""
    generator = torch.Generator().manual_seed(number)
    x = torch.randn((B, 1, HIDDEN), generator=generator).bfloat16().to(dtype)
    angles = torch.rand((B, 1, R // 2), generator=generator).bfloat16().to(dtype)
    angles = torch.cat((angles, angles), -1)
    at = torch.tensor([13, 29]) + number
    slots = TABLE.gather(1, at[:, None] // SIZE).flatten() * SIZE + at % SIZE
    return [x, angles.cos(), angles.sin()], [TABLE, at + 1, slots]


def given(number: int, held: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    new, where = step(number, dtype)
    return [*new, *held, *where]


OPTIONS = {"target": "ascend910_93", "lower": "eager"}


@pytest.mark.parametrize(("write", "read", "heads"), FORMS)
@pytest.mark.parametrize(("rank", "front"), [(RANK, PROLOG), (0, LATENT_LINE)])
def test_both_operators_take_lines(write: Write, read: Read, heads: tuple[int, ...], rank: int, front: str):
    model = Block(write, read, rank).bfloat16()
    report = fusion.explain(model, *given(0, caches(heads, torch.bfloat16), torch.bfloat16), options=OPTIONS)
    assert (report.ops.get(front), report.ops.get(FIA)) == (1, 1), report
    nodes = [node for graph in report.graphs for node in graph.graph.nodes]
    (line,) = (node for node in nodes if str(node.target).startswith(front.replace("::", ".")))
    assert line.kwargs["cache_mode"] == "PA_NZ"
    (attention,) = (node for node in nodes if str(node.target).startswith(FIA.replace("::", ".")))
    assert attention.args[1].meta["val"].shape == (BLOCKS, 1, C // LINE, SIZE, LINE)
    assert attention.kwargs["key_rope"].meta["val"].shape == (BLOCKS, 1, R // LINE, SIZE, LINE)
    left = {str(node.target) for node in nodes}
    assert not [name for name in left if "index" in name or name.startswith("aten.copy_")], left


@pytest.mark.parametrize(("write", "read", "heads"), FORMS[1:3])
@pytest.mark.parametrize("rank", [RANK, 0])
def test_steps(write: Write, read: Read, heads: tuple[int, ...], rank: int):
    """Several tokens, so that one crosses into its next page: results and both caches beside float64."""
    torch.compiler.reset()
    plain, exact = Block(write, read, rank).bfloat16(), Block(write, read, rank).bfloat16().double()
    compiled = torch.compile(plain, backend="cann_fusion", options=OPTIONS, dynamic=False, fullgraph=True)
    ours, own, truth = (caches(heads, dtype) for dtype in (torch.bfloat16, torch.bfloat16, torch.float64))
    first, places = [each.clone() for each in ours], [each.data_ptr() for each in ours]
    eps = torch.finfo(torch.bfloat16).eps
    with torch.no_grad():
        for number in range(5):
            have = compiled(*given(number, ours, torch.bfloat16))
            before = plain(*given(number, own, torch.bfloat16))
            want = exact(*given(number, truth, torch.float64))
            assert relative_error(have, want) <= 1.5 * relative_error(before, want) + eps
    for have, before, want, old in zip(ours, own, truth, first, strict=True):
        assert relative_error(have, want) <= 1.5 * relative_error(before, want) + eps
        untouched = want == old.double()
        assert torch.equal(have[untouched], old[untouched])
    assert [each.data_ptr() for each in ours] == places


def rows_as_lines(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """[Block, A, Size, L] of which a page holds one row after the other."""
    pages.view(-1, pages.shape[1] * LINE)[slots] = rows


def test_rows_that_lie_whole_in_pages_of_lines_are_no_lines():
    model = Block(rows_as_lines, turned_behind).bfloat16()
    report = fusion.explain(model, *given(0, caches((), torch.bfloat16), torch.bfloat16), options=OPTIONS)
    nodes = [node for graph in report.graphs for node in graph.graph.nodes]
    assert not [node for node in nodes if node.kwargs.get("cache_mode") == "PA_NZ"]
