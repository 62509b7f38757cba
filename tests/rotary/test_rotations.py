"""A claimed rotation is the one that is computed, in random spellings; what only resembles one is told apart."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fusion.graph import Algebra, Reading, Value
from fusion.language import Refused
from fusion.operators import ensure
from fusion.options import Options
from fusion.testing import capture, means_what_it_says, trial_of
from patterns.rotary.read import rotation
from patterns.rotary.rope import Rope
from patterns.rotary.rotated import Rotated
from patterns.rotary.tables import KnownTables
from patterns.rotary.unrotated_lanes import Alone
from tests.analysis.test_lanes import SIZE, computed, leaf
from tests.engine.graphs import fused, names, numbers, read_graph, replay, rotate, traced

ORDERS = ("half", "interleaved")


def pair(order: str, side: int, a: Algebra, x: Value) -> Value:
    size = int(x.shape[-1])
    return (
        a.slice(x, -1, side * size // 2, (side + 1) * size // 2) if order == "half" else a.slice(x, -1, side, size, 2)
    )


def join(order: str, a: Algebra, first: Value, second: Value) -> Value:
    if order == "half":
        return a.cat([first, second], -1)
    lead, size = first.shape[:-1], int(first.shape[-1])
    return a.reshape(a.cat([a.reshape(each, (*lead, size, 1)) for each in (first, second)], -1), (*lead, 2 * size))


def rotated(a: Algebra, x: Value, cos: Value, sin: Value, source: str, result: str, sign: float = 1.0) -> Value:
    first, second = pair(source, 0, a, x), pair(source, 1, a, x)
    low = a.add(a.mul(first, cos), a.scale(a.mul(second, sin), -sign))
    high = a.add(a.mul(second, cos), a.scale(a.mul(first, sin), sign))
    return join(result, a, low, high)


@pytest.mark.parametrize("source", ORDERS)
@pytest.mark.parametrize("result", ORDERS)
@given(
    batch=st.sampled_from([(2, 3), (1,), (2, 4, 3)]),
    half=st.integers(1, 6),
    scale=st.sampled_from([1.0, 0.5, 3.0]),
    sign=st.sampled_from([1.0, -1.0]),
)
@settings(max_examples=25, deadline=None)
def test_a_claimed_rotation_is_the_one_that_is_computed(source, result, batch, half, scale, sign):
    a = Algebra()
    (x, data), (cos, c), (sin, s) = (
        leaf(a, name, *shape, seed=seed)
        for seed, (name, shape) in enumerate((("x", (*batch, 2 * half)), ("cos", (half,)), ("sin", (half,))))
    )
    value = rotated(a, x, a.scale(cos, scale), a.scale(sin, scale), source, result, sign)
    reading = rotation(KnownTables(a), value)
    if half == 1 and isinstance(reading, Reading):  # one pair: both orders are the same
        source, result = reading.captures["source"], reading.captures["result"]
    assert isinstance(reading, Reading)
    assert (reading.op, reading.captures["source"], reading.captures["result"]) == ("rotation", source, result)
    numbers = {x: data, cos: c, sin: s}
    q, wide_cos, wide_sin = (computed(reading.captures[name], numbers) for name in ("x", "cos", "sin"))
    assert wide_cos.shape[-1] == 2 * half
    claimed = reference(q, wide_cos, wide_sin, source, result)
    torch.testing.assert_close(claimed, computed(value, numbers), rtol=1e-12, atol=1e-12)


def reference(x: Tensor, cos: Tensor, sin: Tensor, source: str, result: str) -> Tensor:
    """The rotation that a reading stands for: tables are read at the lanes of the result."""
    half = x.shape[-1] // 2
    lanes = {"half": (slice(None, half), slice(half, None)), "interleaved": (slice(0, None, 2), slice(1, None, 2))}
    (x1, x2), out = (x[..., each] for each in lanes[source]), torch.empty_like(x)
    low, high = lanes[result]
    out[..., low] = x1 * cos[..., low] - x2 * sin[..., low]
    out[..., high] = x2 * cos[..., high] + x1 * sin[..., high]
    return out


def test_a_negative_angle_has_negative_sines_which_the_model_may_hold():
    a = Algebra()
    x, cos, sin = (leaf(a, name, *shape)[0] for name, shape in (("x", (3, 8)), ("cos", (4,)), ("sin", (4,))))
    value, negative = rotated(a, x, cos, sin, "half", "half", sign=-1.0), a.scale(sin, -1)
    made, held = (rotation(KnownTables(a, each), value) for each in ((), {negative}))
    assert isinstance(made, Reading)
    assert isinstance(held, Reading)
    assert made.captures["sin"] is a.scale(a.cat([sin, sin], -1), -1)
    assert held.captures["sin"] is a.cat([negative, negative], -1)


@pytest.mark.parametrize("is_held", [True, False])
def test_a_number_on_what_is_turned_stays_there_if_the_model_has_multiplied_by_it(is_held: bool):
    a = Algebra()
    x, cos, sin = (leaf(a, name, *shape)[0] for name, shape in (("x", (3, 8)), ("cos", (4,)), ("sin", (4,))))
    louder = a.scale(x, 0.35)
    reading = rotation(KnownTables(a, {louder} if is_held else ()), rotated(a, louder, cos, sin, "half", "half"))
    assert isinstance(reading, Reading)
    assert reading.captures["x"] is (louder if is_held else x)
    for name, table in (("cos", cos), ("sin", sin)):
        whole = a.cat([table, table], -1)
        assert reading.captures[name] is (whole if is_held else a.scale(whole, 0.35))


def test_tables_of_one_complex_table_are_repeated_together():
    a = Algebra()
    x, z = leaf(a, "x", 3, 8)[0], a.make("input", (), ("z",), (3, 4), torch.complex64)
    cos, sin = (a.make(op, (z,), (), z.shape, torch.float32) for op in ("real", "imag"))
    reading = rotation(KnownTables(a), rotated(a, x, cos, sin, "half", "half"))
    assert isinstance(reading, Reading)
    tables = [reading.captures[name].below("cast", "reshape") for name in ("cos", "sin")]
    assert [each.attrs[:3] for each in tables] == [(0, 0, 1), (0, 1, 2)]
    assert tables[0].arg is tables[1].arg


@given(st.permutations(range(SIZE)))
@settings(max_examples=60, deadline=None)
def test_a_permuted_partner_is_a_rotation_only_if_it_is_paired(order):
    """x·cos + (permutation of x, signed)·sin: a rotation for the two pairings alone."""
    a = Algebra()
    x, cos, sin = (leaf(a, name, 3, SIZE)[0] for name in ("x", "cos", "sin"))
    half = SIZE // 2
    sign = [-1 if lane < half else 1 for lane in range(SIZE)]
    partner = a.cat([a.scale(a.slice(x, -1, lane, lane + 1), s) for lane, s in zip(order, sign, strict=True)], -1)
    outcome = rotation(KnownTables(a), a.add(a.mul(x, cos), a.mul(partner, sin)))
    paired = list(order) == [*range(half, SIZE), *range(half)]
    assert isinstance(outcome, Reading) == paired


def given(*widths: int, rows: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Algebra, list[Value]]:
    a = Algebra()
    return a, [a.make("input", (), (str(n),), (rows, width), dtype) for n, width in enumerate(widths)]


def of_half(a: Algebra, x: Value, cos: Value, sin: Value, low: float = 1.0, high: float = 1.0) -> list[Value]:
    """Both halves of a rotation by tables of full width; the terms with the cosine have these factors."""
    (x1, x2), (c1, c2), (s1, s2) = ([pair("half", side, a, each) for side in (0, 1)] for each in (x, cos, sin))
    return [
        a.add(a.scale(a.mul(x1, c1), low), a.scale(a.mul(x2, s1), -1)),
        a.add(a.scale(a.mul(x2, c2), high), a.mul(x1, s2)),
    ]


def shuffled(a: Algebra, x: Value, *lanes: int) -> Value:
    return a.cat([a.slice(x, -1, lane, lane + 1) for lane in lanes], -1)


def backwards(a: Algebra, x: Value) -> Value:
    return shuffled(a, x, *reversed(range(int(x.shape[-1]))))


Change = Callable[[Algebra, Value, Value], Value]


def with_rest(cut: int, change: Change = lambda a, rest, wide: rest) -> Reading | str | None:
    """Four lanes are rotated, four others stand around them: so many before."""
    a, (x, cos, sin, rest) = given(4, 4, 4, 4, dtype=torch.float32)
    rest = change(a, rest, a.make("input", (), ("wide",), (3, 4), torch.float64))
    pieces = [a.slice(rest, -1, 0, cut), *of_half(a, x, cos, sin), a.slice(rest, -1, cut, 4)]
    return rotation(KnownTables(a), a.cat([each for each in pieces if each is not None and each.shape[-1]], -1))


@pytest.mark.parametrize("cut", [0, 4])
def test_other_lanes_stand_before_or_behind(cut: int):
    reading = with_rest(cut)
    assert isinstance(reading, Reading)
    assert (reading.op, reading.captures["rest_first"]) == ("partial_rotation", cut == 4)


@pytest.mark.parametrize(
    ("cut", "change"),
    [
        (2, lambda a, rest, wide: rest),
        (4, lambda a, rest, wide: a.cast(wide, torch.float32)),
        (4, lambda a, rest, wide: a.expand(a.make("input", (), ("once",), (1, 4), torch.float32), (3, 4))),
        (4, lambda a, rest, wide: shuffled(a, rest, 0, 1, 3, 2)),
    ],
)
def test_other_lanes_are_one_tensor_as_it_is(cut: int, change: Change):
    assert "those that are not rotated are changed" in str(with_rest(cut, change))


def test_tables_of_full_width_are_read_whole():
    a, (x, cos, sin) = given(8, 8, 8)
    reading = rotation(KnownTables(a), a.cat(of_half(a, x, cos, sin), -1))
    assert isinstance(reading, Reading)
    assert (reading.captures["cos"], reading.captures["sin"]) == (cos, sin)


def test_tables_that_are_computed_are_repeated():
    a, (x, low, high) = given(8, 2, 2)
    cos, sin = (a.unary(op, a.cat([low, high], -1)) for op in ("cos", "sin"))
    reading = rotation(KnownTables(a), rotated(a, x, cos, sin, "half", "half"))
    assert isinstance(reading, Reading)
    assert reading.captures["cos"] is a.cat([cos, cos], -1)


def test_a_table_that_is_joined_from_several_is_one():
    a, (x, low, high, sin) = given(8, 4, 4, 8)
    cos, turned = a.cat([low, high], -1), a.cat([a.scale(pair("half", 1, a, x), -1), pair("half", 0, a, x)], -1)
    reading = rotation(KnownTables(a), a.add(a.mul(x, cos), a.mul(turned, sin)))
    assert isinstance(reading, Reading)
    assert reading.captures["cos"] is cos


def test_cosines_and_sines_may_stand_in_one_table():
    """Each half of the lanes with both tables: x₁·(c, s) + x₂·(-s, c)."""
    a, (x, cos, sin) = given(8, 4, 4)
    first, second = (a.cat([pair("half", side, a, x)] * 2, -1) for side in (0, 1))
    tables = a.cat([cos, sin], -1), a.cat([a.scale(sin, -1), cos], -1)
    reading = rotation(KnownTables(a), a.add(a.mul(first, tables[0]), a.mul(second, tables[1])))
    assert isinstance(reading, Reading)
    assert (reading.captures["cos"], reading.captures["sin"]) == (a.cat([cos] * 2, -1), a.cat([sin] * 2, -1))


def of_one(x: Tensor, rest: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((rotate(x, cos, sin), rest), -1)


def of_one_and_a_product(x: Tensor, rest: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((rotate(x, cos, sin), rest * cos), -1)


def of_none(x: Tensor, rest: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat((x * cos + rest, rest * sin), -1)


@pytest.mark.parametrize(("function", "found"), [(of_one, 1), (of_one_and_a_product, 1), (of_none, 0)])
def test_what_carries_a_rotation_along_is_none_of_its_own(function: Callable[..., Tensor], found: int):
    graph = read_graph(traced(function, numbers(3, 8), *(numbers(3, 8, seed=seed) for seed in (1, 2, 3))).graph)
    assert [each.op for _, each in graph.readings.all("rotation", "partial_rotation")] == ["rotation"] * found
    assert not graph.readings.missed("rotation")


Made = Callable[[Algebra, Value, Value, Value], Value]
ORDER = "lanes read the tables in an order that is"
ITSELF = "each is combined with itself"
PAIRS = "their partners are in other places than"
FACTORS = "its terms have different factors, or"


def around(a: Algebra, x: Value, cos: Value, sin: Value) -> Value:
    """Other lanes stand between both halves."""
    low, high = of_half(a, x, cos, sin)
    return a.cat([low, a.slice(x, -1, 0, 4), high], -1)


def three_lanes(a: Algebra, *inputs: Value) -> Value:
    low, _ = of_half(a, *(a.slice(each, -1, 0, 6) for each in inputs))
    return a.cat([low, a.slice(inputs[0], -1, 0, 5)], -1)


LOOKALIKES: list[tuple[Made, str | None]] = [
    (lambda a, x, cos, sin: a.cat(of_half(a, x, backwards(a, cos), sin), -1), ORDER),
    (lambda a, x, cos, sin: a.cat(of_half(a, x, cos, backwards(a, sin)), -1), ORDER),
    (lambda a, x, cos, sin: a.cat(of_half(a, x, shuffled(a, cos, 0, 1, 2, 3, 7, 6, 5, 4), sin), -1), ORDER),
    (lambda a, x, cos, sin: a.cat(of_half(a, x, shuffled(a, cos, 0, 5, 1, 4, 2, 7, 3, 6), sin), -1), ORDER),
    (lambda a, x, cos, sin: a.add(a.mul(x, cos), a.mul(x, sin)), ITSELF),
    (lambda a, x, cos, sin: a.add(a.mul(x, cos), a.mul(backwards(a, x), sin)), PAIRS),
    (lambda a, x, cos, sin: a.cat(of_half(a, x, cos, sin, high=2.0), -1), FACTORS),
    (lambda a, x, cos, sin: a.cat(of_half(a, x, cos, a.scale(sin, -1), low=-1.0, high=-1.0), -1), FACTORS),
    (lambda a, x, cos, sin: of_half(a, x, cos, sin)[0], None),
    (around, None),
    (three_lanes, None),
    (lambda a, x, cos, sin: a.add(a.mul(x, backwards(a, x)), a.mul(x, sin)), None),
    (lambda a, x, cos, sin: a.add(a.add(a.mul(x, cos), a.mul(cos, sin)), a.mul(x, sin)), None),
    (lambda a, x, cos, sin: a.add(a.mul(x, cos), a.mul(backwards(a, sin), a.unary("exp", cos))), None),
]


@pytest.mark.parametrize(("made", "reason"), LOOKALIKES)
def test_what_is_no_rotation(made: Made, reason: str | None):
    a, inputs = given(8, 8, 8)
    found = rotation(KnownTables(a), made(a, *inputs))
    assert found == reason or (reason and isinstance(found, str) and reason in found)


def test_frequencies_that_are_mixed_do_not_look_like_a_rotation():
    """As YaRN stretches them by parts: one row, by two weights."""
    graph = read_graph(traced(lambda x, w: x / 32.0 * w + x * (1 - w), numbers(8), numbers(8, seed=1)).graph)
    assert not graph.readings.missed("rotation")


def test_whole_numbers_are_not_rotated():
    a, inputs = given(8, 8, 8, dtype=torch.int64)
    assert rotation(KnownTables(a), a.cat(of_half(a, *inputs), -1)) is None


TAKES = {
    "half": {("half", "half")},
    "pairs": {("interleaved", "interleaved")},
    "pairs_by_matrix": {("interleaved", "interleaved")},
    "pairs_to_half": {("interleaved", "half")},
    "pairs_to_half_by_batch": {("interleaved", "half")},
    "through_half": {("interleaved", "half"), ("half", "interleaved"), ("interleaved", "interleaved")},
}


@pytest.mark.parametrize("way", TAKES)
@pytest.mark.parametrize("orders", itertools.product(ORDERS, ORDERS))
def test_a_way_takes_its_orders_of_lanes_alone(way: str, orders: tuple[str, str]):
    ensure()
    x, angles = torch.randn(2, 3, 4, 64), torch.randn(1, 1, 4, 32)
    angles = torch.cat((angles, angles), -1) if orders[1] == "half" else angles.repeat_interleave(2, -1)
    args = x, angles.cos(), angles.sin(), *orders, x.dtype
    run = partial(getattr(Rope(), way), Rotated(*args), Alone())
    if orders in TAKES[way]:
        torch.testing.assert_close(run(), reference(*args[:5]), rtol=1e-4, atol=1e-4)
        return
    with pytest.raises(Refused, match="order"):
        run()


def test_a_way_stands_back_where_another_one_does_the_same():
    x, table, rows = torch.randn(2, 3, 4, 64), torch.randn(2, 1, 4, 64), torch.randn(3, 1, 64)
    to_half = "interleaved", "half"
    with pytest.raises(Refused, match="a row of each sequence"):
        Rope().pairs_to_half_by_batch(Rotated(x, table, table, *to_half, x.dtype), Alone())
    with pytest.raises(Refused, match="they differ among the heads"):
        Rope().rows_to_half(Rotated(x, rows, rows, *to_half, x.dtype), Alone())
    with pytest.raises(Refused, match="they differ among the heads"):
        Rope().rows_to_half(Rotated(x[None], table[:, :, :1], table[:, :, :1], *to_half, x.dtype), Alone())


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of lanes [.., D] turned to halves by cos and sin [.., D / 2]."""
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), -1)


def test_heads_and_rows_without_heads_share_the_tables_that_are_made():
    def function(cos: Tensor, sin: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return interleaved(q, cos[:, :, None], sin[:, :, None]), interleaved(k, cos, sin)

    inputs = numbers(2, 6, 4), numbers(2, 6, 4, seed=1), numbers(2, 6, 4, 8, seed=2), numbers(2, 6, 8, seed=3)
    gm, _ = fused(function, *inputs, target="ascend910_93")
    assert names(gm).count("npu.npu_rotary_mul.default") == 2
    assert names(gm).count("aten.cat.default") == 2
    for have, want in zip(replay(gm, *inputs), function(*inputs), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


def test_packed_tokens_go_to_halves_in_one_call():
    inputs = numbers(5, 4, 64), numbers(5, 1, 32, seed=1), numbers(5, 1, 32, seed=2)
    gm, _ = fused(interleaved, *(each.bfloat16() for each in inputs), target="ascend910_93")
    assert names(gm).count("npu.npu_interleave_rope.default") == 1
    assert not [name for name in names(gm) if "clone" in name or "rotary_mul" in name]
    torch.testing.assert_close(replay(gm, *inputs)[0], interleaved(*inputs), rtol=1e-5, atol=1e-5)


def normed_first(x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first lanes of what is normed are turned, and joined with the others in one go."""
    low, high, rest = torch.nn.functional.layer_norm(x, x.shape[-1:], gain, gain, 1e-6).split((32, 32, 64), -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest), -1)


def added(x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """To the others something is added."""
    low, high, rest = x.split((32, 32, 64), -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest + gain[64:]), -1)


def multiplied(x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The others are multiplied by themselves."""
    low, high, rest = x.split((32, 32, 64), -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest * rest), -1)


def other_lanes_scaled(x: Tensor, gain: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The others are turned by numbers of their own, which is no rotation."""
    low, high, rest = torch.nn.functional.layer_norm(x, x.shape[-1:], gain, gain, 1e-6).split((32, 32, 64), -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin, rest * cos[..., :1] - rest * sin[..., :1]), -1)


@pytest.mark.parametrize("form", [normed_first, added, multiplied, other_lanes_scaled])
def test_lanes_beside_are_what_is_joined_with_those_that_are_turned(form: Callable[..., Tensor]):
    inputs = numbers(5, 4, 128), numbers(128, seed=1), numbers(5, 1, 32, seed=2), numbers(5, 1, 32, seed=3)
    t = trial_of(capture(form, inputs), Options(target="ascend910_93", lower="eager"))
    assert names(t.fused).count("npu.npu_rotary_mul.default") == (form is not other_lanes_scaled)
    means_what_it_says(t)
