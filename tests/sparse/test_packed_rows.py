"""Sparse attention over packed rows: cells of where they lie and how they are listed, and rows that are others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion import Example
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.testing import Trial, capture, trial
from tests.engine.graphs import read_graph
from tests.examples.inputs import normal, tensors
from tests.operators.sparse_cases import packed_rows
from tests.support.fused import call, checked, targets

RULE = next(each for each in installed().rules if each.name == "sparse_attention")
B, S, N, T, C, DR, TILE, SIZE, K = 2, 3, 4, 64, 512, 64, 128, 16, 8
OPERATOR = "npu.npu_kv_quant_sparse_flash_attention.default"
Unpack = Callable[[Tensor, torch.dtype], tuple[Tensor, Tensor]]


def unpacked(rows: Tensor, dtype: torch.dtype, at: tuple[int, int] = (C, C + 2 * DR)) -> tuple[Tensor, Tensor]:
    """The latent, rounded once, and the rotated key; which bytes those of the key are."""
    runs = rows[..., :C].unflatten(-1, (-1, TILE)).float()
    scales = torch.cat([rows[..., C : at[0]], rows[..., at[1] :]], -1) if at[0] != C else rows[..., at[1] :]
    latent = (runs * scales.view(torch.float32).unsqueeze(-1)).flatten(-2)
    return latent.to(dtype), rows[..., at[0] : at[1]].view(torch.bfloat16).to(dtype)


def repeated(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each scale as often as it has lanes."""
    latent, rope, scales = rows.split([C, 2 * DR, 4 * C // TILE], dim=-1)
    each = scales.contiguous().view(torch.float32).repeat_interleave(TILE, dim=-1)
    return (each * latent.to(torch.float32)).to(dtype), rope.contiguous().view(torch.bfloat16).to(dtype)


def rounded_scales(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A product in 16 bits rounds otherwise."""
    _, rope = repeated(rows, dtype)
    scales = rows[..., C + 2 * DR :].view(torch.float32).to(torch.bfloat16).repeat_interleave(TILE, dim=-1)
    return (rows[..., :C].to(torch.bfloat16) * scales).to(dtype), rope


def scales_first(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Scales stand before the rotated key."""
    latent, scales, rope = rows.split([C, 4 * C // TILE, 2 * DR], dim=-1)
    each = scales.contiguous().view(torch.float32).repeat_interleave(TILE, dim=-1)
    return (latent.float() * each).to(dtype), rope.contiguous().view(torch.bfloat16).to(dtype)


def rope_of_numbers(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rotated key is every second number itself, not what its bytes are the bits of."""
    return repeated(rows, dtype)[0], rows[..., C : C + 2 * DR : 2].to(dtype)


def of_other_rows(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The rotated key of the token behind."""
    return repeated(rows, dtype)[0], repeated(rows.roll(1, -2), dtype)[1]


def attended(q: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor], hidden: Tensor | None, equation: str) -> Tensor:
    scores = sum(torch.einsum(f"bsnd,{equation}->bsnt", *each) for each in zip(q, kv, strict=True)) * 0.07
    scores = scores.float() if hidden is None else scores.float().masked_fill(hidden.unsqueeze(2), -torch.inf)
    return torch.einsum(f"bsnt,{equation}->bsnd", scores.softmax(-1).to(q[0].dtype), kv[0])


def masked(q: tuple[Tensor, Tensor], rows: Tensor, places: Tensor, unpack: Unpack) -> Tensor:
    """Every row, of which a mask shows those that are listed."""
    hidden = torch.ones(B, S, T, dtype=torch.bool).scatter(-1, places, False)
    return attended(q, unpack(rows, q[0].dtype), hidden, "btd")


def gathered(q: tuple[Tensor, Tensor], rows: Tensor, places: Tensor, unpack: Unpack) -> Tensor:
    """The rows that are listed."""
    listed = rows.unsqueeze(1).expand(-1, S, -1, -1).gather(2, places[..., None].expand(-1, -1, -1, rows.shape[-1]))
    return attended(q, unpack(listed, q[0].dtype), None, "bstd")


def example(name: str, attend: Any, paged: bool, unpack: Unpack, own: bool = False, reason: str = "") -> Example:
    def forward(query: Tensor, rope: Tensor, cache: Tensor, table: Tensor, scores: Tensor, places: Tensor) -> Tensor:
        rows = cache[table].reshape(B, T, -1) if paged else cache
        return attend((query, rope), rows, places if own else scores.topk(K, dim=-1).indices, unpack)

    rows = packed_rows(normal(1, B, T, C), normal(2, B, T, DR).bfloat16(), TILE)
    rows = torch.cat([rows[..., :C], rows[..., -16:], rows[..., C:-16]], -1) if unpack is scales_first else rows
    table = torch.randperm(B * T // SIZE, generator=torch.Generator().manual_seed(1)).view(B, -1)
    cache = rows.new_zeros(B * T // SIZE, SIZE, rows.shape[-1])
    cache[table] = rows.view(B, -1, SIZE, rows.shape[-1])
    scores = normal(3, B, S, T).argsort(-1).double()  # no two alike, in any dtype
    lists = scores.long()[..., :K]
    return Example(
        name, forward, tensors((B, S, N, C), (B, S, N, DR), cache if paged else rows, table, scores, lists), reason
    )


def tried(example: Example, target: str = "ascend910_93") -> Trial:
    return checked(trial(RULE, example, torch.bfloat16, options=Options(target=target, lower="eager")))


CELLS = [
    example(f"{attend.__name__} {'pages' if paged else 'rows'} {unpack.__name__}", attend, paged, unpack)
    for attend in (masked, gathered)
    for paged in (False, True)
    for unpack in (unpacked, repeated)
]


@pytest.mark.rotates(12)
@pytest.mark.parametrize("target", ["ascend910_93", "host"])
@pytest.mark.parametrize("cell", CELLS, ids=lambda each: each.name)
def test_packed_rows_are_attended_to_as_they_lie(cell: Example, target: str):
    t = tried(cell, target)
    assert targets(t, "sparse_flash") == {OPERATOR: 1}
    attention = call(t, OPERATOR)
    assert attention.args[1] is attention.args[2]
    in_pages = "pages" in cell.name
    assert (attention.kwargs.get("layout_kv") == "PA_BSND") == in_pages


def test_a_list_that_a_mask_shows_is_given_each_key_once():
    t = tried(example("own", masked, False, unpacked, own=True))
    assert targets(t, "sparse_flash") == {OPERATOR: 1}


def test_a_list_of_the_model_may_name_a_key_twice():
    t = tried(example("own", gathered, False, unpacked, own=True))
    assert OPERATOR not in targets(t)


@pytest.mark.parametrize("unpack", [rounded_scales, scales_first, of_other_rows])
def test_rows_that_are_packed_or_rounded_otherwise_are_unpacked_by_the_model(unpack: Unpack):
    assert OPERATOR not in targets(tried(example("other", masked, False, unpack)))


def test_parts_in_another_order_have_their_reason():
    of = example("other", masked, False, scales_first)
    graph = read_graph(capture(of.function, of.inputs(torch.bfloat16)).graph.graph)
    assert any("in another order" in miss.reason for _, miss in graph.readings.missed("sparse_attention"))


def test_a_key_of_numbers_is_not_read_as_bits():
    of = example("other", masked, False, rope_of_numbers)
    graph = read_graph(capture(of.function, of.inputs(torch.bfloat16)).graph.graph)
    assert graph.readings.all("latent_keys")
    assert not graph.readings.all("unpacked_latent", "unpacked_rope")
