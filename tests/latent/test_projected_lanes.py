"""Lanes of heads that one layer gives: their rows of the weight, whatever is cut, turned and opened."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import sympy
import torch

from fusion.graph import Algebra, Dim, Reading, Readings, Value
from fusion.graph.contractions import matmul, swapped
from patterns.latent.read.absorption import absorption, packed, query_sources
from patterns.latent.read.head_lanes import head_projection, heads_projection
from patterns.latent.read.read import joined_parts, latents

B, N, S, K, WIDTH, C = 2, 3, 5, 16, 8, 12
SOME = sympy.Symbol("s0", integer=True, positive=True)


def given(a: Algebra, name: str, *shape: Dim) -> Value:
    return a.make("input", (), (name, 0), shape, torch.float32)


def product(a: Algebra, x: Value, y: Value) -> Value:
    found = matmul(a, x, y)
    assert found is not None
    return found


def projected(a: Algebra, rows: int = N * WIDTH) -> Value:
    return product(a, given(a, "x", B, S, K), swapped(a, given(a, "w", rows, K)))


def cut(a: Algebra, x: Value, axis: int, *bounds: int) -> Value:
    found = a.slice(x, axis, *bounds)
    assert found is not None
    return found


def opened(a: Algebra, layer: Value) -> Value:
    """[B, N, S, width] of a layer [B, S, N · width]."""
    return a.permute(a.reshape(layer, (B, S, N, int(layer.shape[-1]) // N)), (0, 2, 1, 3))


LANES: list[tuple[Callable[[Algebra], Value], tuple[int, int, bool] | None]] = [
    (lambda a: opened(a, projected(a)), (WIDTH, 0, True)),
    (lambda a: cut(a, opened(a, projected(a)), -1, 2, 6), (WIDTH, 2, True)),
    (lambda a: a.permute(cut(a, opened(a, projected(a)), -1, 2, 6), (0, 2, 1, 3)), (WIDTH, 2, False)),
    (lambda a: cut(a, a.scale(opened(a, projected(a)), 2.0), -1, 2, 6), (WIDTH, 2, True)),
    (lambda a: opened(a, cut(a, projected(a, 2 * N * WIDTH), -1, 0, N * WIDTH)), (WIDTH, 0, True)),
    (lambda a: opened(a, cut(a, projected(a, 2 * N * WIDTH), -1, 0, 2 * N * WIDTH, 2)), None),
    (lambda a: cut(a, opened(a, projected(a)), -1, 0, WIDTH, 2), None),
    (lambda a: opened(a, cut(a, rows_of(a, 2 * S), 1, 0, S)), None),
    (lambda a: opened(a, product(a, given(a, "x", B, S, K), given(a, "own", B, K, N * WIDTH))), None),
    (lambda a: product(a, given(a, "x", B, 1, S, K), given(a, "w", N, K, WIDTH)), (WIDTH, 0, True)),
    (lambda a: product(a, given(a, "x", B, 1, S, K), given(a, "own", B, N, K, WIDTH)), None),
    (lambda a: a.permute(a.reshape(projected(a), (B, S, N, SOME)), (0, 2, 1, 3)), None),
]


def rows_of(a: Algebra, rows: int) -> Value:
    """A layer of so many positions."""
    return product(a, given(a, "x", B, rows, K), given(a, "w", K, N * WIDTH))


@pytest.mark.parametrize(("lanes", "expected"), LANES)
def test_which_lanes_of_which_layer(lanes: Callable[[Algebra], Value], expected: tuple[int, int, bool] | None):
    a = Algebra()
    found = head_projection(a, lanes(a), N, S)
    assert (None if found is None else (found.width, found.start, found.heads_first)) == expected


def test_as_many_heads_as_nobody_knows_are_none():
    a = Algebra()
    heads = product(a, given(a, "x", B, 1, S, K), given(a, "w", SOME, K, WIDTH))
    assert head_projection(a, heads, SOME, S) is None


def read(cut_keys: tuple[int, ...], cut_values: tuple[int, ...]) -> dict[Value, Reading] | str | None:
    """What attention is over keys of which lanes are shared, and values, both cut as said."""
    a = Algebra()
    heads = opened(a, projected(a))
    rope = a.expand(given(a, "rope", B, 1, S, 4), (B, N, S, 4))
    k = cut(a, a.cat([cut(a, heads, -1, 0, 4), rope], -1), *cut_keys)
    v = cut(a, cut(a, heads, -1, 4, WIDTH), *cut_values)
    q = given(a, "q", B, int(k.shape[1]), 2, 8)
    return latents(a, Readings(), Reading("softmax_attention", {"q": q, "k": k, "v": v}))


@pytest.mark.parametrize(
    ("cut_keys", "cut_values", "rows"),
    [
        ((2, 0, S), (2, 0, S), [None]),
        ((2, 0, 3), (2, 0, 3), [3]),
        ((2, 0, 3), (2, 1, 4), []),
        ((2, 1, 4), (2, 1, 4), []),
        ((2, 0, S, 2), (2, 0, S, 2), []),
        ((1, 0, 2), (1, 0, 2), []),
    ],
)
def test_only_the_first_rows_of_a_latent_are_read(
    cut_keys: tuple[int, ...], cut_values: tuple[int, ...], rows: list[int | None]
):
    found = read(cut_keys, cut_values)
    readings = found.values() if isinstance(found, dict) else ()
    assert [each.captures["rows"] for each in readings if each.op == "latent_keys"] == rows


@pytest.mark.parametrize("more", ["projected", "own"])
def test_keys_of_three_parts_are_none_of_a_latent(more: str):
    a = Algebra()
    heads = opened(a, projected(a))
    part = cut(a, heads, -1, 6, WIDTH) if more == "projected" else given(a, "own", B, N, S, 2)
    rope = a.expand(given(a, "rope", B, 1, S, 4), (B, N, S, 4))
    k = a.cat([cut(a, heads, -1, 0, 4), rope, part], -1)
    said = {"q": given(a, "q", B, N, 2, 10), "k": k, "v": cut(a, heads, -1, 4, WIDTH)}
    told = latents(a, Readings(), Reading("softmax_attention", said))
    assert isinstance(told, str)
    assert "they are more than a part that is projected" in told


def of_attention(a: Algebra, q: Value, k: Value, v: Value) -> dict[Value, Reading] | str | None:
    return latents(a, Readings(), Reading("softmax_attention", {"q": q, "k": k, "v": v}))


def test_keys_without_a_projected_part_are_not_like_those_of_a_latent():
    a = Algebra()
    heads = opened(a, projected(a))
    rope = a.expand(given(a, "rope", B, 1, S, 4), (B, N, S, 4))
    q, v = given(a, "q", B, N, 2, 8), cut(a, heads, -1, 4, WIDTH)
    assert of_attention(a, q, a.cat([given(a, "own", B, N, S, 4), rope], -1), v) is None


def test_keys_that_are_projected_whole_are_of_a_latent_without_rotated_lanes():
    a = Algebra()
    heads = opened(a, projected(a))
    q, v = given(a, "q", B, N, 2, 8), cut(a, heads, -1, 4, WIDTH)
    found = of_attention(a, q, heads, v)
    assert isinstance(found, dict)
    assert found[heads].op == "unrotated_keys"
    assert "rope" not in found[heads].captures


@pytest.mark.parametrize("width", [C, C + 4, SOME])
def test_keys_of_one_head_are_a_latent_and_more(width: Dim):
    a = Algebra()
    latent = given(a, "latent", B, 1, S, C)
    keys = a.cat([latent, given(a, "rope", B, 1, S, 4)], -1) if width == C + 4 else given(a, "keys", B, 1, S, width)
    found = of_attention(a, given(a, "q", B, N, 2, width), latent if width == C else keys, latent)
    readings = list(found.values()) if isinstance(found, dict) else []
    names = {"latent_queries", "latent_keys", "latent_values"} if width == C + 4 else set[str]()
    assert {each.op for each in readings} == names


def test_values_of_symbolic_width_are_no_latent():
    a = Algebra()
    values = given(a, "latent", B, 1, S, SOME)
    assert of_attention(a, given(a, "q", B, N, 2, 8), given(a, "keys", B, 1, S, 8), values) is None


def of_tokens(a: Algebra, heads: Value) -> Value:
    """Heads of tokens [N, B · S, K] as [B, N, S, K]."""
    return a.permute(a.reshape(a.permute(heads, (1, 0, 2)), (B, S, N, K)), (0, 2, 1, 3))


def test_what_is_absorbed_is_a_product_of_each_head():
    a = Algebra()
    nope, up = given(a, "q", B, N, S, WIDTH), given(a, "up", N, WIDTH, K)
    tokens = given(a, "tokens", N, B * S, WIDTH)
    assert absorption(a, product(a, nope, up)) == (nope, up)
    found = absorption(a, of_tokens(a, product(a, tokens, up)))
    assert found is not None
    assert found[0].shape == (B, N, S, WIDTH)


ROWS = ("rows", N, N, WIDTH)
OTHER_PRODUCTS: list[Callable[[Algebra], Value]] = [
    lambda a: product(a, given(a, "q", B, N, S, WIDTH), given(a, "own", B, N, WIDTH, K)),
    lambda a: product(a, given(a, "q", B, N, S, WIDTH), given(a, "one", 1, WIDTH, K)),
    lambda a: a.reshape(product(a, given(a, "t", N, B * S, WIDTH), given(a, "up", N, WIDTH, K)), (B, N, S, K)),
    lambda a: product(a, given(a, *ROWS), given(a, "up", N, WIDTH, K)),
    lambda a: of_tokens(a, product(a, given(a, "tokens", B * S, WIDTH), given(a, "up", N, WIDTH, K))),
    lambda a: product(a, given(a, *ROWS), given(a, "up", 1, N, WIDTH, K)),
    lambda a: a.permute(product(a, given(a, *ROWS), given(a, "up", 1, N, WIDTH, K)), (0, 2, 1, 3)),
    lambda a: a.permute(product(a, given(a, "q", B, N, N, WIDTH), given(a, "up", N, WIDTH, K)), (0, 2, 1, 3)),
]


@pytest.mark.parametrize("made", OTHER_PRODUCTS)
def test_other_products_absorb_nothing(made: Callable[[Algebra], Value]):
    a = Algebra()
    assert absorption(a, made(a)) is None


@pytest.mark.parametrize("heads_first", [True, False])
def test_as_many_heads_as_positions_are_told_apart(heads_first: bool):
    a = Algebra()
    layer = product(a, given(a, "x", B, N, K), swapped(a, given(a, "w", N * WIDTH, K)))
    lanes = a.reshape(layer, (B, N, N, WIDTH))
    lanes = a.permute(lanes, (0, 2, 1, 3)) if heads_first else lanes
    assert (heads_projection(a, lanes, N, N) is not None) == heads_first
    up = given(a, "up", N, WIDTH, K)
    assert bool(query_sources(a, (lanes, up), product(a, lanes, up), ())) == heads_first


@pytest.mark.parametrize("batch", [1, B])
def test_what_packed_tokens_absorb_is_no_result_of_sequences_that_lie_otherwise(batch: int):
    a = Algebra()
    layer = product(a, given(a, "x", batch, S, K), swapped(a, given(a, "w", N * WIDTH, K)))
    lanes = a.permute(a.reshape(layer, (batch, S, N, WIDTH)), (0, 2, 1, 3))
    up = given(a, "up", N, WIDTH, K)
    absorbed = product(a, lanes, up)
    turned = Reading("rotation", {"x": given(a, "rope", batch * S, N, 4)})
    assert list(query_sources(a, (lanes, up), absorbed, [turned])) == [packed(a, absorbed)]


def test_keys_that_are_joined_along_another_dim_are_one():
    a = Algebra()
    first, second = given(a, "a", B, N, S, 4), given(a, "b", B, N, S, 4)
    assert joined_parts(a, a.cat([first, second], -1)) == [(0, first), (4, second)]
    assert joined_parts(a, a.permute(a.cat([first, second], -1), (1, 0, 2, 3)))[1][0] == 4
    rows = a.cat([first, second], 2)
    assert joined_parts(a, rows) == [(0, rows)]
    assert joined_parts(a, first) == [(0, first)]
    some = a.cat([given(a, "c", B, N, S, SOME), second], -1)
    assert joined_parts(a, some) == [(0, some)]
