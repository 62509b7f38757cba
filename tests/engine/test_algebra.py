"""What means the same is the same value; what does not is not."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from sympy import Symbol

from fusion.graph import Algebra, broadcast
from fusion.graph.algebra import MAX_STOP

from .graphs import numbers, said, value

X, Y, W = numbers(2, 3, 8), numbers(2, 3, 8, seed=1), numbers(8, seed=2)

EQUAL = {
    "square": [lambda x: x * x, lambda x: x**2, torch.square, lambda x: x.pow(2.0), lambda x: torch.mul(x, x)],
    "reciprocal root": [
        lambda x: torch.rsqrt(x), lambda x: 1 / torch.sqrt(x), lambda x: x**-0.5, lambda x: x.sqrt().reciprocal(),
        lambda x: torch.pow(x, -0.5), lambda x: (1 / x).sqrt(),
    ],
    "mean": [
        lambda x: x.mean(-1, keepdim=True), lambda x: x.sum(-1, keepdim=True) / 8,
        lambda x: x.mean(dim=2).unsqueeze(-1), lambda x: x.sum(-1).mul(0.125)[..., None],
        lambda x: torch.einsum("bsd,bsd->bs", x, x).unsqueeze(-1) * 0 + x.mean(-1, True),
    ][:4],
    "sum of squares": [
        lambda x: x.pow(2).sum(-1), lambda x: torch.einsum("...d,...d->...", x, x),
        lambda x: (x.unsqueeze(-2) @ x.unsqueeze(-1)).squeeze(-1).squeeze(-1),
        lambda x: torch.linalg.vector_norm(x, dim=-1) ** 2, lambda x: x.norm(dim=-1).square(),
    ],
    "mean square": [
        lambda x: x.square().mean(-1, True), lambda x: (x * x * 0.125).sum(-1, True),
        lambda x: x.abs().pow(2).mean(-1, True),
        lambda x: x.var(-1, False, keepdim=True) + x.mean(-1, True).square(),
        lambda x: x.mean(-1, True) ** 2 + x.var(-1, False, keepdim=True), lambda x: (4 * x.square()).mean(-1, True) / 4,
    ],
    "scaled over its length": [
        lambda x: 2 * x * ((2 * x).square().mean(-1, True) + 1).rsqrt(),
        lambda x: (2 * x) * (4 * x.square().mean(-1, True) + 1).rsqrt(),
        lambda x: (x.square().sum(-1, True) / 2 + 1).rsqrt() * (x * 2),
    ],
    "variance": [
        lambda x: x.var(-1, unbiased=False, keepdim=True), lambda x: (x - x.mean(-1, True)).pow(2).mean(-1, True),
        lambda x: x.square().mean(-1, True) - x.mean(-1, True).square(),
        lambda x: torch.var_mean(x, -1, correction=0, keepdim=True)[0],
        lambda x: x.std(-1, correction=0, keepdim=True) ** 2,
    ],
    "sigmoid": [torch.sigmoid, lambda x: 1 / (1 + torch.exp(-x)), lambda x: (1 + (-x).exp()).reciprocal()],
    "silu": [lambda x: F.silu(x), lambda x: x * torch.sigmoid(x), lambda x: x / (1 + torch.exp(-x))],
    "difference": [lambda x, y: x - y, lambda x, y: x + -y, lambda x, y: torch.sub(x, y), lambda x, y: -y + x],
    "product": [lambda x, y: x * y, lambda x, y: y * x, lambda x, y: torch.mul(y, x)],
    "halves": [
        lambda x: x[..., :4], lambda x: x.chunk(2, -1)[0], lambda x: x.split(4, -1)[0], lambda x: x.narrow(-1, 0, 4),
        lambda x: x.unflatten(-1, (2, 4)).unbind(-2)[0], lambda x: x.view(2, 3, 2, 4)[..., 0, :],
        lambda x: torch.tensor_split(x, 2, dim=-1)[0],
    ],
    "nothing": [
        lambda x: x.clone(), lambda x: x.contiguous(), lambda x: x.transpose(0, 1).transpose(0, 1) + 0,
        lambda x: x.view(6, 8).view(2, 3, 8).clone(), lambda x: x.permute(2, 0, 1).permute(1, 2, 0).clone(),
        lambda x: torch.cat(x.chunk(2, -1), -1), lambda x: x.unsqueeze(1).squeeze(1).clone(), lambda x: x * 1.0,
        lambda x: torch.cat([x[..., :3], x[..., 3:]], -1), lambda x: F.dropout(x, 0.5, training=False).clone(),
    ],
    "gain 1 + w": [
        lambda x, y, w: x * (1 + w), lambda x, y, w: x + x * w, lambda x, y, w: (w + 1) * x,
        lambda x, y, w: torch.addcmul(x, x, w),
    ],
    "widened and back": [lambda x: x.double().float() + 0, lambda x: x.clone()],
    "broadcast": [lambda x: x / x.sum(-1, True).expand_as(x), lambda x: x / x.sum(-1, keepdim=True)],
    "one call twice": [lambda x: x.erf() * x.erf(), lambda x: x.erf().square()],
    "repeated": [
        lambda x: x.repeat_interleave(2, -1), lambda x: x.unsqueeze(-1).expand(2, 3, 8, 2).reshape(2, 3, 16),
    ],
    "largest magnitude": [
        lambda x: x.abs().amax(-1, True), lambda x: torch.maximum(-x.amin(-1, True), x.amax(-1, True)),
        lambda x: torch.maximum(x.amax(-1, True), x.amin(-1, True).neg()),
    ],
    "rolled": [lambda x: x.roll(3, -1), lambda x: torch.cat([x[..., 5:], x[..., :5]], -1)],
}  # fmt: skip

DIFFERENT = {
    "dims of a mean": (lambda x: x.mean(-1, True), lambda x: x.mean(-2, True)),
    "correction": (lambda x: x.var(-1), lambda x: x.var(-1, unbiased=False)),
    "root of a square": (lambda x: (x * x).sqrt(), lambda x: x.clone()),
    "narrowing": (lambda x: x.bfloat16().float(), lambda x: x.clone()),
    "silu of another": (lambda x, y: x * y.sigmoid(), lambda x, y: y * x.sigmoid()),
    "power of two": (lambda x: x**2, lambda x: x**3),
    "halves": (lambda x: x[..., :4], lambda x: x[..., 4:]),
    "step": (lambda x: x[..., ::2], lambda x: x[..., :4]),
    "order of a cat": (lambda x, y: torch.cat([x, y], -1), lambda x, y: torch.cat([y, x], -1)),
    "difference": (lambda x, y: x - y, lambda x, y: y - x),
    "sum and mean": (lambda x: x.sum(-1), lambda x: x.mean(-1)),
    "negative scale under a power": (lambda x: (-x) ** 0.5, lambda x: x**0.5),
    "view and transpose": (lambda x: x.reshape(2, 8, 3), lambda x: x.transpose(1, 2)),
    "dropout": (lambda x: F.dropout(x, 0.5, training=True), lambda x: x.clone()),
    "divided by a mean": (lambda x: x.exp() / x.exp().mean(-1, True), lambda x: x.exp() / x.exp().sum(-1, True)),
    "less twice a square": (
        lambda x: x.square().mean(-1, True) - 2 * x.mean(-1, True).square(), lambda x: x.var(-1, False, keepdim=True)
    ),
    "less a cube": (
        lambda x: x.square().mean(-1, True) - x.mean(-1, True) ** 3, lambda x: x.var(-1, False, keepdim=True)
    ),
    "with a square less one": (
        lambda x: x.square().mean(-1, True) + (x.mean(-1, True).square() - 1), lambda x: x.var(-1, False, keepdim=True)
    ),
    "less the square of another": (
        lambda x, y: y.square().mean(-1, True) - x.mean(-1, True).square(),
        lambda x, y: x.var(-1, False, keepdim=True),
    ),
    "variance and a mean": (
        lambda x: x.var(-1, False, keepdim=True) + x.mean(-1, True), lambda x: x.square().mean(-1, True)
    ),
    "variance and a cube": (
        lambda x: x.var(-1, False, keepdim=True) + x.mean(-1, True) ** 3, lambda x: x.square().mean(-1, True)
    ),
    "variance and the square of another": (
        lambda x, y: x.var(-1, False, keepdim=True) + y.mean(-1, True).square(),
        lambda x, y: x.square().mean(-1, True),
    ),
    "variance and the square of another mean": (
        lambda x: x.var(-1, False, keepdim=True) + x.mean((-2, -1), True).square(),
        lambda x: x.square().mean(-1, True),
    ),
    "variance and the square of the mean of another": (
        lambda x, y: x.var(-1, False, keepdim=True) + y.mean(-1, True).square(),
        lambda x, y: y.square().mean(-1, True),
    ),
    "spread about the largest and its square": (
        lambda x: (x - x.amax(-1, True)).square().mean(-1, True) + x.amax(-1, True).square(),
        lambda x: x.square().mean(-1, True),
    ),
    "the largest, and one less than the least": (
        lambda x: torch.maximum(x.amin(-1, True) - 1, x.amax(-1, True)), lambda x: x.abs().amax(-1, True)
    ),
    "scaled over a power of its length": (
        lambda x: 3**0.5 * x * (x.square().mean(-1, True) ** 3 + 1).rsqrt(),
        lambda x: 3**0.5 * x * ((3**0.5 * x).square().mean(-1, True) + 1).rsqrt(),
    ),
    "cube of magnitudes": (lambda x: x.abs() ** 3, lambda x: x**3),
    "scaled over the largest": (
        lambda x: 2 * x * (4 * x.square().amax(-1, True) + 1).rsqrt(),
        lambda x: 2 * x * ((2 * x).square().mean(-1, True) + 1).rsqrt(),
    ),
    "scaled over an average": (
        lambda x: 2 * x * (4 * (2.0 * x).mean(-1, True) + 1).rsqrt(),
        lambda x: 2 * x * ((2 * x).square().mean(-1, True) + 1).rsqrt(),
    ),
    "scaled over its own magnitude": (
        lambda x: 2 * x * (4 * x.square() + 1).rsqrt(), lambda x: 2 * x * ((2 * x).square().mean(-1, True) + 1).rsqrt(),
    ),
    "scaled over another length": (
        lambda x: 2 * x * ((2 * x).square().mean(-1, True) + 1).rsqrt(),
        lambda x: 2 * x * (2 * x.square().mean(-1, True) + 1).rsqrt(),
    ),
    "scaled over the length of another": (
        lambda x, y: 2 * x * ((2 * x).square().mean(-1, True) + 1).rsqrt(),
        lambda x, y: 2 * x * (4 * y.square().mean(-1, True) + 1).rsqrt(),
    ),
    "scaled over cubes": (
        lambda x: 2 * x * ((2 * x).square().mean(-1, True) + 1).rsqrt(),
        lambda x: 2 * x * (4 * (x**3).mean(-1, True) + 1).rsqrt(),
    ),
    "square of a sigmoid's": (lambda x: (1 + x.exp()) ** 2, lambda x: (-x).sigmoid()),
    "two in a sigmoid": (lambda x: 1 / (2 + x.exp()), lambda x: (-x).sigmoid()),
    "root of a cube": (lambda x: (x**3).sqrt().square(), lambda x: x**3),
    "root of a sum": (lambda x: (x + 1).sqrt().square(), lambda x: x + 1),
    "root of a difference": (lambda x: (x * x - 1).sqrt().square(), lambda x: x * x - 1),
}  # fmt: skip


def expression(function) -> str:
    args = (X, Y, W)[: function.__code__.co_argcount] if hasattr(function, "__code__") else (X,)
    # Every input is used in order first: Dynamo numbers them by their first use.
    return said(value(lambda *given: (*(each.tanh() for each in given), function(*given).exp()), *args))


@pytest.mark.rotates(12)
@pytest.mark.parametrize("name", EQUAL)
def test_spellings_of_one_expression_are_one_value(name):
    forms = [expression(each) for each in EQUAL[name]]
    assert len(set(forms)) == 1, "\n".join(forms)


@pytest.mark.rotates(12)
@pytest.mark.parametrize("name", DIFFERENT)
def test_different_expressions_are_different_values(name):
    left, right = DIFFERENT[name]
    assert expression(left) != expression(right)


def test_values_are_interned_within_one_algebra():
    a = Algebra()
    x, y = (a.make("input", (), (name,), (2, 8), torch.float32) for name in "xy")
    assert a.mul(x, y) is a.mul(y, x)
    assert a.add(x, a.scale(x, -1)) is a.add(a.scale(x, -1), x)
    assert a.power(a.power(x, 2), -1) is a.power(x, -2)
    assert a.reshape(a.reshape(x, (16,)), (2, 8)) is x
    assert a.permute(a.permute(x, (1, 0)), (1, 0)) is x
    assert a.slice(a.slice(x, -1, 2, 8), -1, 1, 3) is a.slice(x, -1, 3, 5)
    assert a.cat([a.slice(x, -1, 0, 4), a.slice(x, -1, 4, 8)], -1) is x
    assert a.slice(a.cat([x, y], -1), -1, 8, 16) is y
    assert a.slice(a.cat([x, y], -1), -1, 8, 16, 2) is a.slice(y, -1, 0, 8, 2)
    assert a.cast(a.cast(x, torch.float64), torch.float32) is x
    assert a.cast(a.cast(x, torch.bfloat16), torch.float32) is not x


def test_dims_come_and_go_below_what_they_do_not_change_alone():
    a = Algebra()
    x, y = (a.make("input", (), (name,), (2, 3, 8), torch.float32) for name in "xy")
    mean, most = a.mean(x, (-1,)), a.reduce("amax", x, (-1,))
    assert a.reshape(mean, (6, 1)) is a.mean(a.reshape(x, (6, 8)), (-1,))
    assert a.reshape(mean, (2, 3)).arg is mean, "the dim that was averaged is gone"
    assert a.reshape(most, (6, 1)).arg is most
    tall = a.mean(a.cut(x, -1, 0, 1), (-2,))
    assert a.reshape(tall, (2, 1)).arg is tall, "rows were averaged"
    cut = a.cut(x, 1, 0, 2)
    assert a.reshape(cut, (4, 8)).arg is cut
    assert a.reshape(cut, (2, 1, 2, 8)) is a.cut(a.reshape(x, (2, 1, 3, 8)), 2, 0, 2)
    opened = [a.reshape(each, (2, 1, 3, 8)) for each in (x, y)]
    assert a.reshape(a.cat((x, y), 1), (2, 1, 6, 8)) is a.cat(opened, 2)


def test_what_is_joined_is_cut_and_what_is_cut_is_joined():
    a = Algebra()
    x, y = (a.make("input", (), (name,), (2, 8), torch.float32) for name in "xy")
    both = a.cat((x, y), -1)
    assert a.cut(both, -1, 0, 4) is a.cut(x, -1, 0, 4)
    assert a.cut(both, -1, 4, 12) is a.cat((a.cut(x, -1, 4, 8), a.cut(y, -1, 0, 4)), -1)
    spread = a.cut(both, -1, 0, 16, 2)
    assert (spread.op, spread.arg, spread.shape) == ("slice", both, (2, 8))
    empty = a.cut(y, -1, 0, 0)
    assert a.cat((empty, x, empty), -1) is x
    assert a.cat((a.cut(x, -1, 0, 4), a.cut(x, -1, 5, 8)), -1).op == "cat"
    assert a.cat((a.cut(x, -1, 0, 8, 2), a.cut(x, -1, 7, 8)), -1).op == "cat"


def test_a_last_dim_of_size_1_goes_before_rows_that_were_cut_are_joined():
    a = Algebra()
    x = a.make("input", (), ("x",), (2, 3, 7), torch.float32)
    cut = a.cut(x, 2, 0, 6)
    assert a.reshape(a.reshape(cut, (2, 3, 6, 1)), (6, 6)) is a.reshape(cut, (6, 6))
    of_one = a.cut(x, 2, 0, 1)
    assert a.reshape(a.reshape(of_one, (2, 3, 1, 1)), (6,)).shape == (6,)
    rows = a.cut(x, 1, 0, 2)
    assert a.reshape(rows, (4, 7)).op == "reshape"


def test_powers_do_not_join_where_a_sign_would_be_lost():
    a = Algebra()
    x = a.make("input", (), ("x",), (8,), torch.float32)
    assert a.power(a.power(x, 2), 0.5) is not x
    assert a.power(a.power(x, 0.5), 2) is not x, "the root of a negative number is none"
    assert a.power(a.power(a.power(x, 2), 0.5), 2) is a.power(x, 2)


def test_whole_numbers_are_scaled_at_once_while_a_float_holds_their_factor():
    a = Algebra()
    x = a.make("input", (), ("x",), (8,), torch.int64)
    assert a.scale(a.scale(x, 3**10), 3**10).attrs == (3.0**20,)
    assert a.scale(a.scale(x, 3**20), 3**20).attrs == (3.0**20,)


def test_positions_are_rounded_at_each_step():
    a = Algebra()
    numbers = a.cast(a.make("arange", (), (0, 1), (8,), torch.int64), torch.float32)
    for step in (a.scale, a.shift):
        assert step(step(numbers, 0.3), 5).arg is step(numbers, 0.3)


def test_an_operand_is_repeated_where_the_other_one_is_not():
    a = Algebra()
    x, y = (a.make("input", (), (name,), (1,), torch.float32) for name in "xy")
    wide = a.expand(y, (3,))
    for product in (a.mul(x, wide), a.mul(wide, x), a.add(x, wide), a.add(wide, x)):
        assert product is not None
        assert product.shape == (3,)


def test_pieces_that_skip_entries_are_not_one_piece():
    a = Algebra()
    x, y = (a.make("input", (), (name,), (2, 8), torch.float32) for name in "xy")
    for left, right in (((0, 4, 2), (3, 5)), ((0, 2), (2, 8, 2))):
        pieces = [a.cut(x, -1, *left), a.cut(x, -1, *right)]
        assert a.cat(pieces, -1).args == tuple(pieces)
    assert a.cut(a.cat([x, y], -1), -1, 8, 8).shape == (2, 0)


def test_a_symbolic_dim_is_cut_nowhere():
    a, size = Algebra(), Symbol("s", positive=True, integer=True)
    x = a.make("input", (), ("x",), (size, 8), torch.float32)
    assert a.slice(x, 0, 0, MAX_STOP) is x
    for bounds in ((3, MAX_STOP), (0, 4), (0, MAX_STOP, 2)):
        assert a.slice(x, 0, *bounds) is None
    split = a.reshape(a.make("input", (), ("y",), (2 * size,), torch.float32), (2, size))
    assert a.reshape(a.cut(split, 0, 0, 1), (size,)).arg.arg is split
    weights = a.unary("exp", a.make("input", (), ("z",), (2, size), torch.float32))
    shares = a.mul(weights, a.power(a.mean(weights, (-1,)), -1))
    assert shares is not None
    assert shares.op == "mul"


def test_an_entry_of_nothing_is_seen_in_another_shape():
    a = Algebra()
    x = a.make("input", (), ("x",), (0, 3), torch.float32)
    assert a.reshape(a.cut(a.reshape(x, (0, 5)), 1, 2, 3), (0,)).shape == (0,)


def test_shapes_that_do_not_broadcast_have_no_product():
    a = Algebra()
    x, y = (a.make("input", (), (str(n),), (2, n), torch.float32) for n in (3, 4))
    assert a.mul(x, y) is None
    assert a.add(x, y) is None
    assert broadcast((2, 1, 3), (4, 1)) == (2, 4, 3)
    assert broadcast((2,), (3,)) is None


def test_a_scale_that_is_nearly_whole_is_whole():
    a = Algebra()
    x = a.make("input", (), ("x",), (8,), torch.float32)
    assert a.scale(a.scale(x, 1 / 49), 49) is x
    assert a.scale(a.scale(x, 1 / math.sqrt(3)), 0.5).attrs == (0.5 / math.sqrt(3),)


def test_dims_that_are_joined_turned_and_opened_again_are_turned():
    def joined(x):
        return x.reshape(3, 8, 5).transpose(0, 1)

    x = numbers(3, 2, 4, 5)
    whole = value(lambda x: joined(x).reshape(2, 4, 3, 5), x)
    assert said(whole) == said(value(lambda x: x.permute(1, 2, 0, 3), x))
    kept = value(lambda x: joined(x).reshape(4, 2, 3, 5), x)
    assert said(kept) != said(value(lambda x: x.permute(2, 1, 0, 3), x)), "opened otherwise than joined"


def test_heads_that_are_repeated_and_joined_with_sequences_are_found_again():
    def joined(x):
        wide = x.repeat_interleave(4, dim=2)
        return wide.view(5, 16, 3).transpose(0, 1).view(2, 8, 5, 3)

    found = value(joined, numbers(5, 2, 2, 3))
    assert (found.op, found.arg.op) == ("reshape", "expand")


def test_operands_come_in_both_orders():
    product = value(lambda x, w: x * w, X, W)
    first, second = product.args
    assert product.operands("mul") == product.operands() == ((first, second), (second, first))
    assert product.operands("add", "where") == ()
