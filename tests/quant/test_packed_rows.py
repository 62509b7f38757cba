"""Lines of bytes: which are rows of a cache, and which only hold whole numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.graph import Graph
from fusion.testing import capture
from tests.engine.graphs import numbers, read_graph
from tests.examples.mla_prolog_int8 import by_scale, joined, plain

T, C, DR, TILE = 3, 16, 8, 4
ROPE = numbers(T, DR).bfloat16()


def read(function: Callable[..., Any], *inputs: Tensor) -> Graph:
    return read_graph(capture(function, inputs).graph.graph)


def tiled(tiles: Tensor, largest: int = 127) -> tuple[Tensor, Tensor]:
    """Tiles [T, A, TILE] in int8 as rows [T, C], and the scale of each tile [T, A]."""
    scale = tiles.abs().amax(-1, keepdim=True) / largest
    return by_scale(tiles, scale).to(torch.int8).flatten(-2), scale.squeeze(-1)


def of_tiles(tiles: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
    """Tiles that are the rows of another use as well."""
    rows = tiles.flatten(1)
    whole, scale = tiled(tiles)
    return plain(whole, rope, scale), rows @ rows.t()


def test_the_latent_is_the_row_that_the_model_holds():
    graph = read(of_tiles, numbers(T, C // TILE, TILE), ROPE)
    [(_, found)] = graph.readings.all("packed_kv_row")
    assert found.captures["latent"].shape == (T, C)
    assert found.captures["latent"] in graph.places
    assert (found.captures["rope"].shape, found.captures["tile"]) == ((T, DR), TILE)


def below_each_other(x: Tensor, rope: Tensor) -> Tensor:
    """Parts that happen to be as wide, one below the other."""
    whole, scale = tiled(x.unflatten(-1, (-1, TILE)))
    return torch.cat([each.view(torch.int8) for each in (whole, rope, scale)])


def whole_numbers_alone(x: Tensor, rope: Tensor) -> Tensor:
    """No scale among them."""
    return joined(*(tiled(each.unflatten(-1, (-1, TILE)))[0] for each in (x, rope.float())))


@pytest.mark.parametrize("form", [below_each_other, whole_numbers_alone])
def test_other_joined_bytes_are_no_line(form: Callable[..., Tensor]):
    graph = read(form, numbers(T, C), ROPE)
    assert not graph.readings.all("packed_kv_row")
    assert not graph.readings.missed("packed_kv_row")


def test_the_reason_is_that_of_the_whole_numbers_in_the_line():
    def of_two(x: Tensor, rope: Tensor) -> tuple[Tensor, Tensor]:
        tiles = x.unflatten(-1, (-1, TILE))
        return tiled(tiles + 1, 5)[0], plain(tiled(tiles, 7)[0], rope, tiled(tiles, 7)[1])

    [(_, miss)] = read(of_two, numbers(T, C), ROPE).readings.missed("packed_kv_row")
    assert "becomes 7" in miss.reason


def test_the_scales_in_the_line_are_those_of_its_tiles_in_their_order():
    def turned(x: Tensor, rope: Tensor) -> Tensor:
        whole, scale = tiled(x.unflatten(-1, (-1, TILE)))
        return plain(whole, rope, scale.flip(-1))

    graph = read(turned, numbers(T, C), ROPE)
    [(_, miss)] = graph.readings.missed("packed_kv_row")
    assert "the scales in it are not those that its" in miss.reason
