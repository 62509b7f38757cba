"""A share of exponentials is the number that it stands for, whichever entry of a stack is asked for."""

from __future__ import annotations

import math

import pytest
import torch
from sympy import Symbol
from torch import Tensor

from fusion.analysis.exp_monomials import Powers, Share, divides, generator, total
from fusion.analysis.softmax_shares import Exponentials
from fusion.analysis.stacked_entries import arranged_pick, cut
from fusion.graph import Algebra, Value, but_ones
from fusion.graph.rebuilding import build

from .numbers import leaf


def computed(value: Value, real: dict[Value, Tensor]) -> Tensor:
    if value in real:
        return real[value]
    args = [computed(each, real) for each in value.args]
    match value.op:
        case "softmax":
            return args[0].softmax(value.attrs[0])
        case "log_sum_exp":
            return args[0].logsumexp(value.attrs, keepdim=True)
        case _:
            return build(value, lambda size: size, *args)


def multiplied(powers: Powers, real: dict[Value, Tensor]) -> Tensor:
    """Powers of generators, all of one shape."""
    numbers = [(computed(value, real), kind, count) for (kind, value), count in powers]
    assert len({tuple(each.shape) for each, *_ in numbers}) <= 1
    return math.prod((each.exp() if kind == "exp" else each) ** count for each, kind, count in numbers)


def number_of(share: Share, real: dict[Value, Tensor]) -> Tensor:
    sums = [sum(multiplied(powers, real) * factor for powers, factor in terms) ** count for terms, count in share.sums]
    return math.prod([share.factor, multiplied(share.powers, real), *sums])


def lse(a: Algebra, x: Value, axis: int) -> Value:
    return a.reduce("log_sum_exp", x, (axis,))


def softmax(a: Algebra, x: Value, axis: int) -> Value:
    return a.softmax(x, axis, "nan")


def joined_entries(a: Algebra, x: Value) -> Value:
    """x [2, 3] as if its last dim had been put together."""
    pieces = [a.make("sigmoid", (a.cut(x, -1, place, place + 1),), (), (2, 1), x.dtype) for place in (2, 0, 1)]
    return a.cat(pieces, -1)


EXPONENTS = {
    "taken": (lambda a, x: a.scale(x, -1), None),
    "twice": (lambda a, x: a.scale(x, 2), None),
    "entry": (lambda a, x: x, (-2, 1)),
    "sum over a stack": (lambda a, x: lse(a, x, -2), None),
    "entry beside a sum": (lambda a, x: lse(a, x, -2), (-1, 1)),
    "entry of a sum of entries": (lambda a, x: a.add(x, a.cut(x, -2, 0, 1)), (-2, 1)),
    "exchanged dims": (lambda a, x: a.permute(x, (1, 0)), None),
    "entry of exchanged dims": (lambda a, x: a.permute(a.reshape(x, (1, 2, 3)), (0, 2, 1)), (-1, 1)),
    "entry of exchanged rows": (
        lambda a, x: a.permute(a.mul(a.reshape(x, (2, 3, 1)), a.reshape(x, (2, 1, 3))), (0, 2, 1)), (-3, 1)
    ),
    "one entry": (lambda a, x: a.cut(x, 0, 1, 2), None),
    "two entries": (lambda a, x: a.cut(x, 1, 1, 3), None),
    "entry of a cut": (lambda a, x: a.cut(x, 1, 1, 2), (-2, 0)),
    "beside a part": (lambda a, x: a.add(x, a.cut(x, -2, 0, 1)), None),
    "rows in other places": (lambda a, x: a.reshape(a.expand(a.reshape(x, (1, 2, 3)), (3, 2, 3)), (2, 9)), (-2, 1)),
}  # fmt: skip
WEIGHTS = {
    "shares": (lambda a, x: softmax(a, x, -2), (-2, 1)),
    "shares along another dim": (lambda a, x: softmax(a, joined_entries(a, x), -1), (-2, 0)),
    "average": (lambda a, x: a.mean(x, (-2,)), None),
    "entry beside an average": (lambda a, x: a.mean(x, (-2,)), (-1, 1)),
    "more than a number": (lambda a, x: a.shift(x, math.inf), None),
    "one more": (lambda a, x: a.shift(x, 1), None),
    "square": (lambda a, x: a.power(x, 2), None),
    "average of all": (lambda a, x: a.mean(x, (-2, -1)), None),
    "whole numbers": (lambda a, x: a.cast(a.cast(a.scale(x, 9), torch.int64), x.dtype), None),
}


def is_right(kind: str, value: Value, pick: tuple[int, int] | None, a: Algebra, real: dict[Value, Tensor]) -> None:
    known = Exponentials(a)
    share = known.power(value, pick) if kind == "exp" else known.value(value, pick)
    assert share is not None
    assert math.isfinite(share.factor)
    whole = computed(value, real)
    part = whole if pick is None else whole.select(*pick)
    expected = part.exp() if kind == "exp" else part
    torch.testing.assert_close(number_of(share, real), expected.reshape(but_ones(part.shape)))


@pytest.mark.parametrize("name", EXPONENTS)
def test_an_exponential_is_what_it_is_made_of(name: str):
    a = Algebra()
    x, data = leaf(a, "x", 2, 3)
    function, pick = EXPONENTS[name]
    is_right("exp", function(a, x), pick, a, {x: data})


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_weight_is_what_it_is_made_of(name: str):
    a = Algebra()
    x, data = leaf(a, "x", 2, 3)
    function, pick = WEIGHTS[name]
    is_right("is", function(a, x), pick, a, {x: data})


def test_values_are_known_by_what_their_exponentials_are():
    a = Algebra()
    (x, data), (y, more) = leaf(a, "x", 2, 3), leaf(a, "y", 2, 4, 3, seed=1)
    known, real = Exponentials(a), {x: data, y: more}
    for function, pick in EXPONENTS.values():
        known.power(function(a, x), pick)
    known.value(a.unary("sigmoid", x))
    known.power(a.permute(y, (1, 0, 2)))
    for (factor, powers), values in known.logs.items():
        for each in values:
            expected = computed(each, real).exp()
            assert expected.shape == but_ones(each.shape)
            torch.testing.assert_close(number_of(Share(factor, powers), real).expand(each.shape), expected)


def test_an_entry_is_cut_of_its_own_dim():
    a = Algebra()
    x, _ = leaf(a, "x", 4, 2)
    assert cut(a, x, (-1, 1)) is a.reshape(a.cut(x, 1, 1, 2), (4,))
    y, _ = leaf(a, "y", 2, 1, 3)
    assert arranged_pick(a.reshape(y, (2, 3)), (-2, 1)) == ((-3, 1),)


def test_entries_of_a_symbolic_dim_are_not_told_apart():
    a = Algebra()
    x = a.make("input", (), ("x",), (Symbol("s", positive=True, integer=True), 3), torch.float64)
    mean = a.mean(x, (-2,))
    assert Exponentials(a).value(mean) == generator("is", a.reshape(mean, (3,)))


def test_a_number_whose_inverse_is_infinite_divides_nothing():
    assert [each for each in (0.5, -2.0, 0.0, math.inf, math.nan, 1e-310) if divides(each)] == [0.5, -2.0]


def test_a_weight_has_an_exponential():
    x, _ = leaf(Algebra(), "x", 3)
    assert (generator("exp", x) * generator("is", x)).is_weight
    assert not generator("is", x).is_weight


def test_a_long_sum_is_not_written_out():
    a = Algebra()
    values = [generator("exp", leaf(a, f"x{n}", 3)[0]) for n in range(200)]
    assert total(values[:9]) is not None
    assert total(values) is None
