"""Latents and rotated keys as what packed rows hold: what is read of single values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor

from fusion.graph import Algebra, Value
from fusion.stages.canonicalise import canonicalise
from patterns.quant.read_unpacked_rows import Latent, latent, rope, unpacked
from tests.engine.graphs import traced

C, DR, TILE, T = 16, 4, 4, 3
TILES, ROW = C // TILE, C + 2 * DR + 4 * C // TILE
ROWS = torch.zeros(T, ROW, dtype=torch.int8)
f32, bf16 = torch.float32, torch.bfloat16
Form = Callable[[Tensor], Tensor]


def scales(rows: Tensor) -> Tensor:
    return rows[:, -4 * TILES :].contiguous().view(f32)


def by_tile(rows: Tensor, scale: Tensor, start: int = 0) -> Tensor:
    return (rows[:, start : start + C].float().unflatten(-1, (TILES, -1)) * scale.unsqueeze(-1)).flatten(1)


LATENTS: dict[str, tuple[Form, torch.dtype]] = {
    "rows of bytes without a sign": (lambda rows: by_tile(rows, scales(rows)), torch.uint8),
    "numbers that begin elsewhere": (lambda rows: by_tile(rows, scales(rows), 1), torch.int8),
    "lanes that lie apart share a scale": (
        lambda rows: (rows[:, :C].float().unflatten(-1, (-1, TILES)) * scales(rows).unsqueeze(1)).flatten(1),
        torch.int8,
    ),
    "scales of bytes that are joined": (
        lambda rows: by_tile(rows, torch.cat([rows[:, :8], rows[:, -8:]], -1).view(f32)), torch.int8,
    ),
    "more scales than lanes": (lambda rows: by_tile(rows, scales(rows)).reshape(-1, 1), torch.int8),
}  # fmt: skip
ROPES: dict[str, tuple[Form, torch.dtype]] = {
    "bytes that are joined": (lambda rows: torch.cat([rows[:, :4], rows[:, -4:]], -1).view(bf16), torch.int8),
    "bytes of some rows": (lambda rows: rows[1:].view(bf16), torch.int8),
    "bytes without a sign": (lambda rows: rows[:, C : C + 2 * DR].contiguous().view(bf16), torch.uint8),
    "lanes of several rows": (lambda rows: rows[:, C : C + 2 * DR].contiguous().view(bf16).view(-1, 2), torch.int8),
}


def made(form: Form, dtype: torch.dtype) -> tuple[Algebra, Value]:
    graph = canonicalise(traced(form, ROWS.to(dtype)).graph)
    return graph.algebra, graph.value_of[graph.source.output_node().args[0][-1]]


def test_a_latent_and_a_rotated_key_are_read():
    found = latent(*made(lambda rows: by_tile(rows, scales(rows)), torch.int8))
    assert found is not None
    assert (found.rows.op, found.width, found.tile, found.scales) == ("input", C, TILE, C + 2 * DR)
    turned = rope(made(lambda rows: rows[:, C : C + 2 * DR].contiguous().view(bf16), torch.int8)[1])
    assert turned is not None
    assert turned[1:] == (C, C + 2 * DR)


@pytest.mark.parametrize("case", LATENTS.values(), ids=LATENTS)
def test_other_latents_are_none(case: tuple[Form, torch.dtype]):
    assert latent(*made(*case)) is None


@pytest.mark.parametrize("case", ROPES.values(), ids=ROPES)
def test_other_rotated_keys_are_none(case: tuple[Form, torch.dtype]):
    assert rope(made(*case)[1]) is None


@pytest.mark.parametrize("tiles", [0, sympy.Symbol("s")])
def test_a_latent_has_a_known_number_of_scales(tiles: Any):
    a = Algebra()
    rows = a.make("input", (), ("rows",), (T, ROW), torch.int8)
    bits = a.make("bits", (a.cut(rows, 1, C, ROW),), (), (T, tiles), f32)
    lanes = a.cast(a.cut(rows, 1, 0, C), f32)
    assert latent(a, a.make("mul", (lanes, bits), (), lanes.shape, f32)) is None


def test_a_latent_has_a_known_number_of_lanes():
    a, tokens = Algebra(), sympy.Symbol("s")
    rows = a.make("input", (), ("rows",), (tokens, ROW), torch.int8)
    whole = unpacked(a, Latent(rows, C, TILE, C + 2 * DR), rows, bf16)
    assert latent(a, whole) is not None
    assert latent(a, a.reshape(whole, (tokens * C,))) is None
