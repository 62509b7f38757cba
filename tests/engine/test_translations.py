"""Calls of aten as values: what has a canonical form gets that one, what means something else stays a call."""

from __future__ import annotations

import math
import operator

import pytest
import torch

from fusion.graph import Algebra
from fusion.graph.proof_steps import proof
from fusion.stages.canonicalise import canonicalise, comparisons
from fusion.stages.canonicalise.translators import Out
from fusion.testing import capture

from .graphs import Build, numbers, said, value

aten = torch.ops.aten
f16, f32, i16, i64, b8, c64 = torch.float16, torch.float32, torch.int16, torch.int64, torch.bool, torch.complex64


def of(made):
    """The value that a call of a graph has, and what it calls."""
    build = Build()
    node = made(build)
    return canonicalise(build.graph).value_of[node], str(node.target)


def call(target, *shapes, more=(), dtype=f32, **how):
    """A call of tensors of these shapes, and of what it takes behind them."""
    return lambda build: build(target, *(build.input(*shape, dtype=dtype) for shape in shapes), *more, **how)


def einsum(equation, *shapes):
    return lambda build: build(aten.einsum.default, equation, [build.input(*shape) for shape in shapes])


def put(indices, cache, rows):
    """An index_put; each index is None, a number of consecutive places, or the shape of an input."""

    def index(build, each):
        if isinstance(each, int):
            return build(aten.arange.default, each)
        return None if each is None else build.input(*each, dtype=i64)

    return lambda build: build(
        aten.index_put.default, build.input(*cache), [index(build, each) for each in indices], build.input(*rows)
    )


def put_by_batch(*batch):
    """Rows [2, 2]: those of one sequence stand in a row of it, or in a column, as the shape of the batch says."""

    def made(build):
        start = build(aten.remainder.Scalar, build.input(2, 1, dtype=i64), 6)
        places = build(aten.add.Tensor, start, build(aten.arange.default, 2))
        sequences = build(aten.view.default, build(aten.arange.default, 2), list(batch))
        return build(
            aten.index_put.default, build.input(2, 3, 9, 8), [sequences, None, places], build.input(2, 2, 3, 8)
        )

    return made


def put_at_known_places(first):
    """Two rows for each of two sequences in a cache of four sequences."""

    def made(build):
        places = build(aten.view.default, build(aten.arange.start, first, first + 2), [1, 2])
        sequences = build(aten.view.default, build(aten.arange.default, 2), [2, 1])
        return build(
            aten.index_put.default, build.input(4, 3, 9, 8), [sequences, None, places], build.input(2, 2, 3, 8)
        )

    return made


def put_at_places(batch, places):
    """A row for each place of some sequences."""

    def made(build):
        sequences = build(aten.view.default, build(aten.arange.default, batch[0]), list(batch))
        rows = build.input(*places, 3, 8)
        return build(
            aten.index_put.default, build.input(2, 3, 9, 8), [sequences, None, build.input(*places, dtype=i64)], rows
        )

    return made


def scattered(x, places, dim=-1, computed=True):
    def made(build):
        into = build.input(*x)
        return build(
            aten.scatter.value,
            build(aten.cos.default, into) if computed else into,
            dim,
            build.input(*places, dtype=i64),
            1.0,
        )

    return made


def taken(counted, size=8):
    """Rows at positions that are computed, all of them or turned round the end."""
    return lambda build: build(aten.index_select.default, build.input(size, 4), 0, counted(build))


def turned(build, count, first, size=8):
    return build(aten.fmod.Scalar, build(aten.add.Tensor, build(aten.arange.default, count), first), size)


def first_rows(inner, *args, of_it=True):
    """x[:2] = what is made of x[:2], or of another tensor's."""

    def made(build):
        x, y = build.input(4, 8, 8), build.input(4, 8, 8)
        below = build(aten.slice.Tensor, x if of_it else y, 0, 0, 2)
        return build(aten.slice_scatter.default, x, inner(build, below, *args), 0, 0, 2)

    return made


def rows_at(build, below, *how):
    """`below` with rows at some places of its second dim."""
    count = len(range(*slice(*how).indices(8)))
    return build(aten.slice_scatter.default, below, build.input(2, count, 8), 1, *how)


def lanes(size, *places):
    """A buffer that is filled lane by lane."""

    def made(build):
        x = build.input(4, size)
        rows = [build.input(4, len(range(*each))) for each in places]
        for each, lane in zip(rows, places, strict=True):
            x = build(aten.slice_scatter.default, x, each, 1, *lane)
        return x

    return made


def last_rows(first):
    """x[first], x[first + 1] = rows, counted from the end."""

    def made(build):
        places = build(aten.add.Tensor, build(aten.arange.default, 2), first)
        return build(aten.index_put.default, build.input(8, 4), [places], build.input(2, 4))

    return made


def scattered_rows(index, cache, rows):
    """Rows at places that are repeated over the other dims."""
    return lambda build: build(
        aten.scatter.src, build.input(*cache), 1,
        build(aten.expand.default, build.input(*index, dtype=i64), list(rows)), build.input(*rows),
    )  # fmt: skip


def joined_with(*place):
    """Four rows, joined from two and two, of which some are written anew."""

    def made(build):
        x = build(aten.cat.default, [build.input(2, 8), build.input(2, 8)])
        return build(aten.slice_scatter.default, x, build.input(2, 8), 0, *place)

    return made


def entry(target, number, *shapes, more=(), made=None):
    """One of several results of a call, of an input or of what is made of inputs."""

    def result(build):
        given = [build.input(*shape) for shape in shapes]
        return build(operator.getitem, build(target, *([made(build, *given)] if made else given), *more), number)

    return result


def added(build, x, y):
    return build(aten.add.Tensor, x, y)


def shares(dim):
    return lambda build, x: build(aten.softmax.int, x, dim)


def less_log_sum(build, z, x):
    """exp(z - log Σ exp(x))."""
    return build(aten.exp.default, build(aten.sub.Tensor, z, build(aten.logsumexp.default, x, [-1], True)))


def largest(build, x):
    return build(operator.getitem, build(aten.topk.default, x, 2), 0)


def in_a_piece(build):
    """Rows at places in one of two that are stacked."""
    x = build(aten.stack.default, [build.input(8, 4), build.input(8, 4)])
    part = build(
        aten.index_copy.default, build(aten.select.int, x, 0, 0), 0, build.input(2, dtype=i64), build.input(2, 4)
    )
    return build(aten.select_scatter.default, x, part, 0, 0)


STAY = {
    # numbers
    "divided by 0": call(aten.div.Tensor, (4,), more=(0.0,)),
    "positions divided by a fraction": lambda build: build(
        aten.div.Tensor, build(aten.arange.default, 8, dtype=f32), 0.1
    ),
    "the rest of a fraction": call(aten.remainder.Scalar, (4,), more=(2,)),
    "the rest by a negative number": call(aten.remainder.Scalar, (4,), more=(-2,), dtype=i64),
    "the rest of whole numbers by a fraction": call(aten.remainder.Scalar, (4,), more=(2.5,), dtype=i64),
    "a number divided by positions": lambda build: build(aten.floor_divide.default, 7, build.input(4, dtype=i64)),
    "rounded towards 0": call(aten.div.Tensor_mode, (4,), more=(3,), dtype=i64, rounding_mode="trunc"),
    "bytes within what they cannot hold": call(aten.clamp.default, (4,), more=(-1,), dtype=torch.uint8),
    "whole numbers within a fraction": call(aten.clamp.default, (4,), more=(0.5,), dtype=i64),
    "bits that are turned": call(aten.bitwise_not.default, (4,), dtype=i64),
    "the smaller of two tensors": call(aten.minimum.default, (8,), (8,)),
    "the larger of a row and many numbers": lambda build: build(
        aten.maximum.default, build.input(1, 8), build(aten.full.default, [4, 8], 1.0)
    ),
    "true is added": call(aten.add.Tensor, (4,), more=(True,), dtype=b8),
    "a whole number beside booleans": call(aten.bitwise_and.Scalar, (4,), more=(1,), dtype=b8),
    "numbers that are not 0": call(aten.logical_and.default, (4,), (4,)),
    "NaN made 1": lambda build: build(
        aten.nan_to_num.default, build(aten.softmax.int, build.input(4, 4), -1), 1.0
    ),
    "NaN made 0 beside infinities": call(aten.nan_to_num.default, (4, 4)),
    "a factor that no float holds": call(aten.mul.Tensor, (4,), more=(2**53 + 1,), dtype=i64),
    "steps of a half": lambda build: build(aten.arange.start_step, 0.5, 8.0, 0.5),
    "dropped at random": call(aten.dropout.default, (4, 4), more=(0.5, True)),
    "a number from another device": call(aten._to_copy.default, (), device=torch.device("cpu")),
    "some numbers": call(aten._to_copy.default, (4,), device=torch.device("cuda")),
    "what is computed, everywhere": lambda build: build(
        aten.fill.Tensor, build.input(4), build(aten.mul.Tensor, build.input(), 2.0)
    ),
    "a mask with a column cut off": lambda build: build(
        aten.constant_pad_nd.default, build(aten.ones.default, [4, 4]), [-1, 0]
    ),
    # reductions
    "the root of a sum of cubes": call(aten.linalg_vector_norm.default, (4, 4), more=(3, [-1])),
    "the variance of one number": call(aten.var.correction, (4, 1), more=([-1],)),
    "a correction of all": call(aten.var.correction, (4, 2), more=([-1],), correction=2),
    "the variance without its dim": lambda build: build(
        operator.getitem, build(aten.var_mean.correction, build.input(4, 4), [-1]), 0
    ),
    # contractions
    "a diagonal": einsum("iik,kj->ij", (4, 4, 4), (4, 4)),
    # shapes
    "rolled along two dims": call(aten.roll.default, (4, 4), more=([1, 1], [0, 1])),
    "rolled as if flat": call(aten.roll.default, (4, 4), more=([1],)),
    "turned round along two dims": call(aten.flip.default, (4, 4), more=([0, 1],)),
    "turned round along none": call(aten.flip.default, (4, 4), more=([],)),
    "the size of complex numbers": call(aten.abs.default, (4,), dtype=c64),
    "complex, turned round along two dims": call(aten.flip.default, (4, 4), more=([0, 1],), dtype=c64),
    "rows that are cast": lambda build: build(
        aten.slice_scatter.default, build.input(4, 8), build.input(2, 8, dtype=f16), 0, 0, 2
    ),
    "a row that is cast": lambda build: build(
        aten.select_scatter.default, build.input(4, 8), build.input(8, dtype=f16), 0, 0
    ),
    "nothing joined to nothing": lambda build: build(aten.cat.default, [build.input(0), build.input(0)]),
    # writes
    "a place without a dim": lambda build: build(
        aten.index_copy.default, build.input(4, 8), 0, build.input(dtype=i64), build.input(1, 8)
    ),
    "three indices": put([4, (4,), (4,)], (4, 4, 4), (4,)),
    "two indices behind a dim": put([None, 2, (2,)], (2, 2, 2, 4), (2, 2, 4)),
    "more sequences than there are": put([4, None, (4,)], (2, 3, 9), (4, 3)),
    "single lanes": put([(2,), None, (2,)], (4, 3, 9), (2, 3)),
    "a dim of four that is none of lines": put([(2,), None, (2,)], (4, 3, 9, 5, 8), (2, 3, 5, 8)),
    "places in three dims": put([2, None, (2, 1, 3)], (4, 3, 9, 8), (2, 1, 2, 3, 8)),
    "a number in some rows": scattered((4, 8), (2, 3)),
    "a number in one row": scattered((4, 8), (1, 3)),
    "a number along columns": scattered((4, 8), (4, 3), dim=0),
    "what stands in columns": lambda build: build(
        aten.gather.default, build.input(4, 8), 0, build.input(4, 8, dtype=i64)
    ),
    "what stands in the first rows": lambda build: build(
        aten.gather.default, build.input(4, 8), 1, build.input(2, 3, dtype=i64)
    ),
    "the largest of columns": lambda build: build(
        operator.getitem, build(aten.topk.default, build.input(4, 8), 2, 0), 0
    ),
    "the least": lambda build: build(
        operator.getitem, build(aten.topk.default, build.input(4, 8), 2, -1, False), 0
    ),
    "places of the greatest of columns": entry(aten.max.dim, 1, (4, 4), more=(0,), made=shares(-1)),
    "places of each lane": scattered_rows((2, 1, 8), (2, 9, 8), (2, 1, 8)),
    "a number in rows that a mask chooses": lambda build: build(
        aten.index_put.default, build(aten.cos.default, build.input(4, 8)),
        [build.input(4, dtype=b8), build.input(1, dtype=i64)], build.input(),
    ),
    "a number in a cache": scattered((4, 8), (4, 3), computed=False),
    "fewer places than rows": lambda build: build(
        aten.scatter.src, build.input(4, 9, 8), 1,
        build(aten.expand.default, build.input(1, 3, 1, dtype=i64), [2, 3, 8]), build.input(4, 3, 8),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STAY)
def test_a_call_that_means_something_else_stays_a_call(name):
    found, target = of(STAY[name])
    assert found.op == target, said(found)


BY_PARTS = {
    "a mask with its edge repeated": (
        lambda build: build(aten.pad.default, build(aten.ones.default, [1, 4, 4]), [1, 0], "replicate"),
        "aten.replication_pad1d.default(full(1), (('%1', [1, 0]), {}), )",
    ),
    "a vector through a layer": (
        call(aten.linear.default, (8,), (4, 8)),
        "matmul(arg0_1, permute(arg1_1, 1, 0))",
    ),
    "a layer that is a vector": (
        call(aten.linear.default, (4, 8), (8,)),
        "reshape(matmul(arg0_1, reshape(arg1_1)))",
    ),
    "two products": (
        einsum("ij,jk,kl->il", (4, 4), (4, 4), (4, 4)),
        "reshape(matmul(matmul(reshape(arg0_1), reshape(arg1_1)), reshape(arg2_1)))",
    ),
    "one operand": (
        einsum("ij->ji", (4, 4)),
        "permute(arg0_1, 1, 0)",
    ),
    "a result that is not named": (
        einsum("ij,jk", (4, 4), (4, 4)),
        "reshape(matmul(reshape(arg0_1), reshape(arg1_1)))",
    ),
    "rows of two sums": (
        einsum("ij,kj->i", (4, 4), (4, 4)),
        "scale(reshape(matmul(reshape(arg0_1), mean(reshape(permute(arg1_1, 1, 0)), -1))), 4.0)",
    ),
    "batch dims of one operand": (
        einsum("...ij,jk->...ik", (2, 4, 4), (4, 4)),
        "reshape(matmul(reshape(arg0_1), reshape(arg1_1)))",
    ),
    "batch dims of different ranks": (
        einsum("...ij,...jk->...ik", (2, 3, 4, 4), (3, 4, 4)),
        "permute(reshape(matmul(reshape(permute(arg0_1, 1, 0, 2, 3)), arg1_1)), 1, 0, 2, 3)",
    ),
    "columns of one operand that are summed": (
        einsum("ij,jgk->ik", (4, 4), (4, 2, 3)),
        "scale(reshape(matmul(reshape(arg0_1), reshape(permute("
        "mean(reshape(permute(arg1_1, 2, 1, 0)), -2), 0, 3, 2, 1)))), 2.0)",
    ),
    "columns that are summed": (
        einsum("ij,jk->i", (4, 4), (4, 4)),
        "scale(reshape(matmul(reshape(arg0_1), mean(reshape(arg1_1), -1))), 4.0)",
    ),
    "attention of one head": (
        call(aten.scaled_dot_product_attention.default, (4, 8), (4, 8), (4, 8)),
        "matmul(softmax(scale(matmul(arg0_1, permute(arg1_1, 1, 0)), 0.35355339059327373), "
        "-1, zero, greatest), arg2_1)",
    ),
    "attention to no heads": (
        call(aten.scaled_dot_product_attention.default, (2, 2, 4, 8), (2, 0, 4, 8), (2, 0, 4, 8), enable_gqa=True),
        "add(full(0), scale(add(scale(reshape(mean(arg2_1, -4, -3, -2, -1)), 0.0), "
        "add(scale(reshape(mean(arg1_1, -4, -3, -2, -1)), 0.0), "
        "scale(reshape(mean(arg0_1, -4, -3, -2, -1)), 128.0))), 0.0))",
    ),
}
"""Composite calls without a translation: read by what torch makes of them."""


@pytest.mark.parametrize("name", BY_PARTS)
def test_a_composite_call_has_the_form_of_its_parts(name):
    build, form = BY_PARTS[name]
    found, _ = of(build)
    assert said(found) == form


FORMS = {
    "columns of a product": (
        einsum("ij,ij->j", (4, 4), (4, 4)),
        "reshape(matmul(reshape(permute(arg0_1, 1, 0)), reshape(permute(arg1_1, 1, 0))))",
    ),
    "a row of each batch entry": (einsum("bi,bij->bj", (2, 4), (2, 4, 3)), "reshape(matmul(reshape(arg0_1), arg1_1))"),
    "a row through a matrix": (call(aten.mm.default, (1, 4), (4, 8)), "matmul(arg0_1, arg1_1)"),
    "a matrix with a column": (call(aten.mm.default, (4, 8), (8, 1)), "matmul(arg0_1, arg1_1)"),
    "attention to all keys": (
        call(aten.scaled_dot_product_attention.default, (2, 4, 8), (2, 4, 8), (2, 4, 8)),
        "matmul(softmax(scale(matmul(arg0_1, permute(arg1_1, 0, 2, 1)), 0.35355339059327373), "
        "-1, zero, greatest), arg2_1)",
    ),
    "a factor that bfloat16 does not hold": (
        call(aten.mul.Tensor, (4,), more=(0.1,), dtype=torch.bfloat16),
        "scale(arg0_1, 0.1)",
    ),
    "complex numbers times others of their kind": (
        lambda build: build(
            aten.view_as_real.default,
            build(
                aten.mul.Tensor,
                *(build(aten.complex.default, build.input(4), build.input(4)) for _ in range(2)),
            ),
        ),
        "cat(reshape(add(mul(arg0_1, arg3_1), scale(mul(arg1_1, arg4_1), -1.0))), "
        "reshape(add(mul(arg0_1, arg4_1), mul(arg1_1, arg3_1))), 1)",
    ),
    "a number that wraps round in a byte": (
        call(aten.add.Tensor, (4,), more=(300,), dtype=torch.int8),
        "shift(arg0_1, 44.0)",
    ),
    "complex numbers times others": (
        lambda build: build(
            aten.view_as_real.default,
            build(aten.mul.Tensor, build(aten.complex.default, build.input(4), build.input(4)), build.input(4)),
        ),
        "cat(reshape(mul(arg0_1, arg3_1)), reshape(mul(arg1_1, arg3_1)), 1)",
    ),
    "a number divided by a constant": (
        lambda build: build(aten.div.Tensor, 7.0, build(aten.full.default, [], 2.0)),
        "scale(power(full(2.0), -1.0), 7.0)",
    ),
    "labels as those of batch dims": (einsum("...ab,...bc->...ac", (2, 4, 4), (2, 4, 4)), "matmul(arg0_1, arg1_1)"),
    "a dim that is moved": (call(aten.movedim.int, (2, 3, 4), more=(0, -1)), "permute(arg0_1, 1, 2, 0)"),
    "the greatest": (
        lambda build: build(operator.getitem, build(aten.max.dim, build.input(4, 8), -1), 0),
        "reshape(greatest(arg0_1, -1))",
    ),
    "the smaller of a tensor and a number": (
        lambda build: build(aten.minimum.default, build(aten.full.default, [], 2.0), build.input(8)),
        "clip(arg1_1, -inf, 2.0)",
    ),
    "bounds in a row": (
        lambda build: build(aten.clamp.default, build(aten.clamp.default, build.input(8), -1.0, 5.0), 2.0, 3.0),
        "clip(arg0_1, 2.0, 3.0)",
    ),
    "bounds that exclude each other": (
        lambda build: build(aten.clamp.default, build(aten.clamp.default, build.input(8), -1.0, 0.0), 2.0, 3.0),
        "clip(arg0_1, 2.0, 2.0)",
    ),
    "bounds in the wrong order": (
        lambda build: build(aten.clamp.default, build(aten.clamp.default, build.input(8), 5.0, -1.0), 2.0, 3.0),
        "clip(clip(arg0_1, 5.0, -1.0), 2.0, 3.0)",
    ),
    "bounds in the wrong order behind others": (
        lambda build: build(aten.clamp.default, build(aten.clamp.default, build.input(8), -1.0, 5.0), 3.0, 2.0),
        "clip(clip(arg0_1, -1.0, 5.0), 3.0, 2.0)",
    ),
    "what stands at places": (
        lambda build: build(aten.gather.default, build.input(4, 8), -1, build.input(4, 3, dtype=i64)),
        "take(arg0_1, arg1_1)",
    ),
    "the rest of places by more than there are": (
        lambda build: build(aten.remainder.Scalar, build(aten.arange.default, 8), 8),
        "arange(0, 1)",
    ),
    "the rest of places by fewer": (
        lambda build: build(aten.remainder.Scalar, build(aten.arange.default, 8), 7),
        "remainder(arange(0, 1), 7)",
    ),
    "the rest of places from below 0": (
        lambda build: build(aten.remainder.Scalar, build(aten.arange.start, -1, 7), 8),
        "remainder(arange(-1, 1), 8)",
    ),
    "true as a mask": (call(aten.bitwise_and.Scalar, (4,), more=(True,), dtype=b8), "and(arg0_1, full(True))"),
    "lanes that alternate": (lanes(8, (0, 8, 2), (1, 8, 2)), "reshape(cat(reshape(arg1_1), reshape(arg2_1), 2))"),
    "lanes of an odd number": (
        lanes(5, (0, 5, 2), (1, 5, 2)),
        "slice_scatter(slice_scatter(arg0_1, arg1_1, 1, 0, 5, 2), arg2_1, 1, 1, 5, 2)",
    ),
    "lanes in three pieces": (
        lanes(8, (0, 4, 2), (4, 8, 2), (1, 8, 2)),
        "slice_scatter(slice_scatter(slice_scatter(arg0_1, arg1_1, 1, 0, 4, 2), arg2_1, 1, 4, 8, 2), "
        "arg3_1, 1, 1, 8, 2)",
    ),
    "rows of the first sequences": (first_rows(rows_at, 2, 4), "write(arg0_1, arg3_1, number(arg0_1, 2), 1)"),
    "rows of other sequences": (
        first_rows(rows_at, 2, 4, of_it=False),
        "slice_scatter(arg0_1, slice_scatter(slice(arg1_1, 0, 0, 2, 1), arg3_1, 1, 2, 4, 1), 0, 0, 2, 1)",
    ),
    "every second row of the first sequences": (
        first_rows(rows_at, 1, 5, 2),
        "slice_scatter(arg0_1, slice_scatter(slice(arg0_1, 0, 0, 2, 1), arg3_1, 1, 1, 5, 2), 0, 0, 2, 1)",
    ),
    "the first sequences, computed with": (
        first_rows(lambda build, below: build(aten.mul.Tensor, below, build.input(2, 8, 8))),
        "slice_scatter(arg0_1, mul(slice(arg0_1, 0, 0, 2, 1), arg3_1), 0, 0, 2, 1)",
    ),
    "rows of each sequence": (
        put_by_batch(2, 1),
        "write(arg6_1, permute(arg7_1, 0, 2, 1, 3), reshape(remainder(arg0_1, 6)), 2)",
    ),
    "rows turned more than once": (
        taken(lambda build: turned(build, 8, 11)),
        "index(arg0_1, fmod(shift(arange(0, 1), 11.0), 8), 0)",
    ),
    "rows beyond the end": (
        taken(lambda build: turned(build, 4, 6)),
        "index(arg0_1, fmod(shift(arange(0, 1), 6.0), 8), 0)",
    ),
    "rows of the first sequences alone": (
        put_at_known_places(1),
        "write(arg4_1, permute(arg5_1, 0, 2, 1, 3), number(arg4_1, 1), 2)",
    ),
    "rows that a number moves": (
        taken(
            lambda build: build(
                aten.add.Tensor,
                build(aten.add.Tensor, build.input(1, dtype=i64), build(aten.arange.default, 3)),
                2,
            )
        ),
        "index(arg0_1, shift(add(arg1_1, arange(0, 1)), 2.0), 0)",
    ),
    "the first rows": (last_rows(2), "slice_scatter(arg2_1, arg3_1, 0, 2, 4, 1)"),
    "the negative, rectified": (
        lambda build: build(aten.relu.default, build(aten.neg.default, build.input(4))),
        "relu(scale(arg0_1, -1.0))",
    ),
    "whole numbers from 0 on": (call(aten.clamp.default, (4,), more=(0,), dtype=i64), "clamp(arg0_1, 0, inf)"),
    "a label of size 1 of one operand": (einsum("ij,jgk->ik", (4, 4), (4, 1, 3)), "matmul(arg0_1, reshape(arg1_1))"),
    "one number that is summed, of two dtypes": (
        lambda build: build(aten.einsum.default, "ij,jk->ik", [build.input(4, 1, dtype=f16), build.input(1, 3)]),
        "matmul(cast(arg0_1), arg1_1)",
    ),
    "a matrix for all batch entries": (einsum("bij,jk->bik", (2, 4, 4), (4, 3)), "matmul(arg0_1, arg1_1)"),
    "the sum over all dims": (
        call(aten.sum.dim_IntList, (2, 4), more=([],)),
        "scale(reshape(mean(arg0_1, -2, -1)), 8.0)",
    ),
    "no copies": (call(aten.repeat.default, (4,), more=([0],)), "expand(arg0_1)"),
    "exponentials below the greatest": (
        lambda build: build(
            aten.exp.default, build(aten.sub.Tensor, x := build.input(4, 8), build(aten.amax.default, x, [-1], True))
        ),
        "exp(add(arg0_1, scale(greatest(arg0_1, -1), -1.0)))",
    ),
    "places of the largest of shares": (
        entry(aten.topk.default, 1, (4, 4), more=(2,), made=shares(-1)),
        "largest_index(arg0_1, 2)",
    ),
    "places of the largest of shares of columns": (
        entry(aten.topk.default, 1, (4, 4), more=(2,), made=shares(0)),
        "largest_index(softmax(arg0_1, -2, nan, greatest), 2)",
    ),
    "the largest of rows to which numbers are added": (
        entry(aten.topk.default, 0, (4, 8), (4, 1), more=(2,), made=added),
        "add(arg1_1, largest(arg0_1, 2))",
    ),
    "places of the largest of one row beside numbers": (
        entry(aten.topk.default, 1, (8,), (4, 1), more=(2,), made=added),
        "largest_index(add(arg0_1, arg1_1), 2)",
    ),
    "the largest of a sum": (
        entry(aten.topk.default, 0, (4, 8), (4, 8), more=(2,), made=added),
        "largest(add(arg0_1, arg1_1), 2)",
    ),
    "shares of the largest": (
        lambda build: less_log_sum(build, largest(build, x := build.input(4, 8)), x),
        "largest(softmax(arg0_1, -1, nan, log_sum), 2)",
    ),
    "the largest over the exponentials of others": (
        lambda build: less_log_sum(build, largest(build, build.input(4, 8)), build.input(4, 8)),
        "exp(add(largest(arg0_1, 2), scale(log_sum_exp(arg3_1, -1), -1.0)))",
    ),
    "twice the numbers over their exponentials": (
        lambda build: less_log_sum(build, build(aten.mul.Tensor, x := build.input(4, 8), 2.0), x),
        "exp(add(scale(arg0_1, 2.0), scale(log_sum_exp(arg0_1, -1), -1.0)))",
    ),
    "numbers over the exponentials of others": (
        lambda build: less_log_sum(build, build.input(4, 8), build.input(4, 8)),
        "exp(add(arg0_1, scale(log_sum_exp(arg1_1, -1), -1.0)))",
    ),
    "numbers less a sum of no exponentials": (
        lambda build: build(
            aten.exp.default,
            build(aten.sub.Tensor, largest(build, build.input(4, 8)), build.input(4, 1)),
        ),
        "exp(add(largest(arg0_1, 2), scale(arg3_1, -1.0)))",
    ),
    "rows of a piece": (in_a_piece, "cat(reshape(write_rows(arg0_1, arg5_1, arg4_1, 0)), reshape(arg1_1), 0)"),
    "the first piece anew": (joined_with(0, 2), "cat(arg3_1, arg1_1, 0)"),
    "the last piece anew": (joined_with(2, 4), "cat(arg0_1, arg3_1, 0)"),
    "a part of a part": (
        lambda build: build(
            aten.slice_scatter.default, build(aten.slice.Tensor, build.input(8, 4), 0, 2, 6), build.input(1, 4), 0, 1, 2
        ),
        "slice_scatter(slice(arg0_1, 0, 2, 6, 1), arg2_1, 0, 1, 2, 1)",
    ),
    "lanes that are filled twice": (
        lanes(8, (0, 4, 1), (0, 4, 1), (4, 8, 1)),
        "slice_scatter(slice_scatter(slice_scatter(arg0_1, arg1_1, 1, 0, 4, 1), arg2_1, 1, 0, 4, 1), "
        "arg3_1, 1, 4, 8, 1)",
    ),
    "rows at places": (
        scattered_rows((1, 3, 1), (2, 9, 8), (2, 3, 8)),
        "write_rows(arg0_1, arg3_1, reshape(arg1_1), 1)",
    ),
    "rows at places of each sequence": (
        scattered_rows((2, 1, 1), (4, 9, 8), (2, 1, 8)),
        "write(arg0_1, arg3_1, reshape(arg1_1), 1)",
    ),
    "one row at a known place": (put([1], (8, 4), (1, 4)), "slice_scatter(arg0_1, arg2_1, 0, 0, 1, 1)"),
    "known rows of all sequences": (
        lambda build: build(
            aten.index_copy.default, build.input(2, 8, 4), 1, build(aten.arange.start, 1, 3), build.input(2, 2, 4)
        ),
        "slice_scatter(arg0_1, arg2_1, 1, 1, 3, 1)",
    ),
    "positions as int32": (
        taken(lambda build: build(aten._to_copy.default, build(aten.arange.default, 3), dtype=torch.int32)),
        "slice(arg0_1, 0, 0, 3, 1)",
    ),
    "the last rows": (last_rows(-2), "slice_scatter(arg2_1, arg3_1, 0, 6, 8, 1)"),
    "the last row and the first": (last_rows(-1), "write_rows(arg2_1, arg3_1, wrap(shift(arange(0, 1), -1.0), 8), 0)"),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_call_has_the_form_of_what_it_means(name):
    made, form = FORMS[name]
    found, _ = of(made)
    assert said(found) == form


@pytest.mark.parametrize(
    "form",
    [
        put_by_batch(2), put_at_known_places(-2), put_at_places((1, 1), (3, 1)), put_at_places((2, 1, 1), (2, 3, 1)),
    ],
)  # fmt: skip
def test_one_list_of_sequences_for_two_places_is_no_list_of_rows(form):
    """Numbers along the last dim of the places say which sequence each is in; nothing is written before a cache."""
    assert of(form)[0].op == "write_lines"


@pytest.mark.parametrize(
    ("number", "form"),
    [
        ([2.5], "full(2.5)"),
        ([2.5, 3.5, 4.5], "constant((2.5, 3.5, 4.5))"),
        (3, "full(3)"),
        ([3], "constant((3,))"),
        ([3, 4, 7], "constant((3, 4, 7))"),
        (math.nan, "_tensor_constant0"),
    ],
)
def test_numbers_that_the_code_writes_down_are_known(number, form):
    assert form in said(value(lambda x: x.where(x > 0, torch.tensor(number)), numbers(4, 3)))


def test_what_is_chosen_by_a_mask_is_not_chosen_by_places():
    a = Algebra()
    x, mask = (a.make("input", (), (name,), (4,), dtype) for name, dtype in (("x", f32), ("mask", b8)))
    assert proof(comparisons.index)(a, Out((2,), f32), x, [mask]) is None


OF_SIZES = {
    "product": (lambda x: x * x.shape[0], "aten.mul.Tensor"),
    "quotient": (lambda x: x / x.shape[0], "aten.div.Tensor"),
    "part of a sum": (lambda x: torch.add(x, x.cos(), alpha=x.shape[0]), "aten.add.Tensor"),
    "power": (lambda x: x ** x.shape[0], "aten.pow.Tensor_Scalar"),
    "bound": (lambda x: x.clamp(max=x.shape[0]), "aten.clamp.default"),
    "complex product": (lambda x: torch.view_as_real(torch.complex(x, x) * x.shape[0]), "aten.mul.Tensor"),
    "part of a product": (lambda x: torch.addmm(x @ x.t(), x, x.t(), alpha=x.shape[0]), "aten.addmm.default"),
    "part of what is added": (lambda x: torch.addmm(x @ x.t(), x, x.t(), beta=x.shape[0]), "aten.addmm.default"),
    "number": (lambda x: torch.full_like(x, x.shape[0]), "aten.full_like.default"),
    "number at places": (
        lambda x: x.cos().scatter(-1, x.argmax(-1, keepdim=True), x.shape[0]), "aten.scatter.value"
    ),
    "number of places": (lambda x: ((x[0, :3].long() % 4)[:, None] == torch.arange(x.shape[0])).any(0), "any"),
    "diagonal": (lambda x: x.tril(x.shape[0] - x.shape[1]), "number"),
    "comparison": (lambda x: x.cos() < x.shape[0], "aten.lt.Scalar"),
    "bound of positions": (lambda x: torch.arange(x.shape[1]) < x.shape[0], "number"),
    "bound of short positions": (lambda x: torch.arange(x.shape[1], dtype=torch.int32) < x.shape[0], "aten.lt.Scalar"),
    "first position": (lambda x: torch.arange(x.shape[0], x.shape[0] + x.shape[1]), "number"),
    "first short position": (
        lambda x: torch.arange(x.shape[0], x.shape[0] + x.shape[1], dtype=torch.int32), "aten.arange.start"
    ),
    "offset": (lambda x: torch.arange(x.shape[1]) - x.shape[0], "number"),
    "what is taken from": (lambda x: x.shape[0] - torch.arange(x.shape[1]), "number"),
    "offset of short positions": (lambda x: x.int() + x.shape[0], "aten.add.Tensor"),
    "one entry": (lambda x: x[1].cos(), "narrow"),
    "last entry": (lambda x: x[-1].cos(), "narrow"),
    "variance": (lambda x: x.var(0), "aten.var.correction"),
    "correction": (lambda x: x[:, :4].var(1, correction=x.shape[0] - 5), "aten.var.correction"),
    "begin": (lambda x: x[:, :6][:, x.shape[0] - 3 :].cos(), "aten.slice.Tensor"),
    "end": (lambda x: x[:, :6][:, : x.shape[0] - 3].cos(), "narrow"),
    "entry": (lambda x: x[:, :6].select(1, x.shape[0] - 3), "aten.select.int"),
    "pieces": (lambda x: x.split([2, x.shape[0] - 2])[1].cos(), "aten.split_with_sizes.default"),
    "times": (lambda x: x.repeat_interleave(x.shape[0], 0), "expand"),
    "copies": (lambda x: x.repeat(x.shape[1], 1), "expand"),
    "what is rolled": (lambda x: x.roll(2, 0), "aten.roll.default"),
    "way": (lambda x: x[:, :6].roll(x.shape[0], 1), "aten.roll.default"),
    "rows": (lambda x: x.index_select(0, torch.arange(3)), "index"),
    "number of rows": (lambda x: x[:6].index_select(0, torch.arange(x.shape[1] - 6)), "index"),
    "row": (lambda x: x.select_scatter(x[0].cos(), 0, 2), "aten.select_scatter.default"),
    "place": (lambda x: x[:6].select_scatter(x[0].cos(), 0, x.shape[0] - 3), "aten.select_scatter.default"),
    "end of a write": (lambda x: x.slice_scatter(x[2:].cos(), 0, 2, x.shape[0]), "write"),
    "last places": (lambda x: x.slice_scatter(x[:3].cos(), 0, -3), "aten.slice_scatter.default"),
    "every second place": (lambda x: x.slice_scatter(x[::2].cos(), 0, 0, None, 2), "aten.slice_scatter.default"),
    "known places": (lambda x: x.index_copy(0, torch.arange(2) + 1, x[:2].cos()), "write"),
}  # fmt: skip


@pytest.mark.rotates(12)
@pytest.mark.parametrize("name", OF_SIZES)
def test_symbolic_sizes_may_stand_wherever_numbers_do(name):
    form, target = OF_SIZES[name]
    graph = capture(form, (numbers(7, 9),), dynamic=True).graph.graph
    (node,) = graph.output_node().args[0]
    assert f"{target}(" in said(canonicalise(graph).value_of[node])


def of_first_rows(x):
    count = x.shape[0] - 3
    return count, x[:count].index_copy(1, torch.arange(2) + 1, x[:count, :2].cos())


def put_where_they_stand(x):
    count, changed = of_first_rows(x)
    return x.slice_scatter(changed, 0, 0, count)


def put_one_row_below(x):
    count, changed = of_first_rows(x)
    return x.slice_scatter(changed, 0, 1, 1 + count)


@pytest.mark.parametrize(("form", "axis"), [(put_where_they_stand, 1), (put_one_row_below, 0)])
def test_columns_of_the_first_rows_are_columns_only_where_these_rows_stand(form, axis):
    graph = capture(form, (numbers(7, 9),), dynamic=True).graph.graph
    (node,) = graph.output_node().args[0]
    found = canonicalise(graph).value_of[node]
    assert (found.op, found.attrs) == ("write", (axis,))


PARTS = {
    "added to": (lambda x, y, z: y[:, :2] + z, "add"),
    "added": (lambda x, y, z: z + y[:, :2], "add"),
    "where it is small": (lambda x, y, z: torch.where(z > 0, y[:, :2], 5.0), "where"),
    "where it is large": (lambda x, y, z: torch.where(z > 0, 5.0, y[:, :2]), "where"),
    "rounded": (lambda x, y, z: y[:, :2].bfloat16().float() + z, "slice_scatter"),
    "where others are": (lambda x, y, z: torch.where(z > 0, y[:, :2], z), "slice_scatter"),
    "of another": (lambda x, y, z: x[:, :2].sin() + z, "slice_scatter"),
    "of another and a row": (lambda x, y, z: x[:, :2].sin() + (z[0] + 1.0), "slice_scatter"),
}


@pytest.mark.rotates(6)
@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_changed_as_a_whole_where_the_rest_stays(name):
    form, op = PARTS[name]

    def changed(x):
        z = x[:, 2:4]
        y = x.cos()
        return y.slice_scatter(form(x, y, z), 1, 0, 2)

    assert value(changed, numbers(4, 8)).op == op
    assert value(lambda x: x.slice_scatter(form(x, x, x[:, 2:4]), 1, 0, 2), numbers(4, 8)).op == "slice_scatter"


@pytest.mark.parametrize(
    ("sizes", "dtype", "op"),
    [((), f32, "where"), ((8,), f32, "aten.index_put.default"), ((), torch.float64, "aten.index_put.default")],
)
def test_one_number_is_chosen_by_a_mask_and_several_are_put_one_by_one(sizes, dtype, op):
    build = Build()
    x, mask = build(aten.cos.default, build.input(4, 8)), build.input(4, 8, dtype=b8)
    node = build(aten.index_put.default, x, [mask], build.input(*sizes, dtype=dtype))
    assert canonicalise(build.graph).value_of[node].op == op


CONSTANTS = {
    "a factor": (lambda x: x * torch.tensor(127.0), lambda x: x * 127),
    "a factor before": (lambda x: torch.tensor(127.0) * x, lambda x: x * 127),
    "a divisor": (lambda x: x / torch.tensor(127.0), lambda x: x / 127),
    "a dividend": (lambda x: torch.tensor(127.0) / x, lambda x: 127 / x),
}
NO_NUMBERS = {
    "with a dim": lambda x: x * torch.tensor([127.0]),
    "zero": lambda x: x / torch.tensor(0.0),
    "infinite": lambda x: x * torch.tensor(math.inf),
    "an input": lambda x: x * x[0, 0],
    "true": lambda x: (x > 0) * torch.full((), True),
}


@pytest.mark.parametrize(("by_tensor", "by_number"), CONSTANTS.values(), ids=CONSTANTS)
def test_a_constant_without_dims_is_a_number(by_tensor, by_number):
    x = numbers(3, 4)
    both = canonicalise(capture(lambda x: (by_tensor(x), by_number(x)), (x,)).graph.graph)
    one, other = both.source.output_node().args[0]
    assert both.value_of[one] is both.value_of[other]


@pytest.mark.parametrize("product", NO_NUMBERS.values(), ids=NO_NUMBERS)
def test_other_tensors_are_no_numbers(product):
    assert value(product, numbers(3, 4)).op == "mul"


def test_two_constants_are_no_number():
    made = value(lambda x: torch.tensor(2.0) * torch.tensor(3.0) + x[0, 0], numbers(3, 4))
    assert made.op == "add"


def test_a_result_without_a_form_is_of_the_call_and_not_spelt_out():
    """As of the places of smallest numbers, one computed from the other: what is spelt out doubles at each."""
    build = Build()
    x = build.input(4, 8)
    for _ in range(40):
        both = build(aten.min.dim, x, -1, True)
        x = build(aten.add.Tensor, x, build(operator.getitem, both, 1))
    graph = canonicalise(build.graph)
    places = graph.value_of[both.next]
    assert [str(each) for each in places.args] == [str(graph.value_of[both][0])]
    assert len(repr(places.attrs)) < 100
