"""Tensors of every rank and size: no reading counts on a dim, or on an element, that a tensor may not have."""

from __future__ import annotations

import math
import operator
import random

import pytest
import torch
from torch import fx

from fusion.options import Options

from .graphs import HOST, Build

aten = torch.ops.aten
CHIP = Options(target="ascend910_93", lower="eager")
f32, i64, i32, b8, bf16 = torch.float32, torch.int64, torch.int32, torch.bool, torch.bfloat16


NUMBERS = [
    (aten.mean.dim, [-1]), (aten.sum.dim_IntList, [0]), (aten.amax.default, [-1]), (aten.max.dim, 0),
    (aten.any.dim, 0), (aten.cumsum.default, 0), (aten.flip.default, [0]), (aten.transpose.int, 0, -1),
    (aten.movedim.int, 0, 0), (aten.softmax.int, -1), (aten._log_softmax.default, -1, False),
    (aten.logsumexp.default, [-1]), (aten.var.correction, [0]), (aten.topk.default, 1), (aten.sort.default, 0, True),
    (aten.squeeze.dim, -1), (aten.unsqueeze.default, -1), (aten.roll.default, [1], [0]), (aten.t.default,),
    (aten.flatten.using_ints, 0, -1), (aten.repeat_interleave.self_int, 2, 0),
    (aten.linalg_vector_norm.default, 2, [-1]),
    (aten.rms_norm.default, []), (aten.tanh.default,), (aten.expand.default, [2, 3]), (aten.repeat.default, [2]),
]  # fmt: skip


@pytest.mark.parametrize("call", NUMBERS, ids=lambda each: str(each[0]).removeprefix("aten."))
def test_an_operator_takes_a_number_where_it_names_a_dim(call):
    target, *args = call
    build = Build()
    x = build.input()
    try:
        y = build(target, x, *args)
    except (RuntimeError, IndexError):
        pytest.skip("torch does not take it")
    first = build(operator.getitem, y, 0) if isinstance(y.meta["val"], tuple) else y
    build(aten.mul.Tensor, first, build.input(1, 1))
    build.fused()


def index_put(build):
    build(aten.index_put.default, build.input(4, 8), [build.input(dtype=i64)], build.input(8))
    build(
        aten.index_put.default, build.input(4, 8), [build.input(4, dtype=i64), build.input(dtype=i64)], build.input(4)
    )
    build(aten.index_put.default, build.input(4, 8), [build.input(2, dtype=i64)], build.input())


def embedding_of_a_number(build):
    build(aten.embedding.default, build.input(4, 8), build.input(dtype=i64))
    build(aten.index_select.default, build.input(), 0, build.input(1, dtype=i64))


def scatter_into_a_number(build):
    build(aten.scatter.src, build.input(), 0, build.input(1, dtype=i64), build.input(1))
    build(aten.scatter.value, build.input(), 0, build.input(dtype=i64), 1.0)


def einsum_of_numbers(build):
    build(aten.einsum.default, ",->", [build.input(), build.input()])
    build(aten.einsum.default, "i,->i", [build.input(3), build.input()])


def weighed_number(build):
    number = build(aten.exp.default, build.input())
    build(aten.mul.Tensor, number, build(aten.exp.default, build.input(4, 1)))
    build(aten.matmul.default, build.input(4), build.input(4, 8))


def split_nothing(build):
    x = build.input(2, 0)
    build(operator.getitem, build(aten.split.Tensor, x, 2, 1), 0)
    build(operator.getitem, build(aten.split.Tensor, x, 0, 1), 0)
    build(operator.getitem, build(aten.chunk.default, x, 2, 1), 0)


def roll_nothing(build):
    build(aten.roll.default, build.input(2, 0), [1], [1])


def select_from_nothing(build):
    build(aten.select_scatter.default, build.input(0, 4), build.input(4), 0, 0)


def join_nothing(build):
    build(aten.cat.default, [build.input(2, 0), build.input(3, 0)], 0)
    build(aten.stack.default, [build.input(0), build.input(0)], 0)
    build(aten.repeat.default, build.input(2, 0), [2, 3])
    build(aten.slice_scatter.default, build.input(4, 0), build.input(2, 0), 0, 1, 3)


def attend_without_width(build):
    q, k, v = (build.input(1, 2, 4, 0) for _ in range(3))
    build(aten.scaled_dot_product_attention.default, q, k, v)


def attend_over_nothing(build):
    q, k, v = build.input(1, 2, 4, 64), build.input(1, 2, 0, 64), build.input(1, 2, 0, 64)
    build(aten.scaled_dot_product_attention.default, q, k, v)


def attend_for_nobody(build):
    q, k, v = (build.input(0, 2, 4, 64, dtype=bf16) for _ in range(3))
    build(aten.scaled_dot_product_attention.default, q, k, v)


def attend_with_no_heads(build):
    q, k, v = (build.input(2, 0, 4, 64, dtype=bf16) for _ in range(3))
    build(aten.scaled_dot_product_attention.default, q, k, v, None, 0.0, True, enable_gqa=True)


def attend_with_groups_of_nothing(build):
    q, k, v = build.input(0, 0, 4), build.input(0, 0, 4), build.input(0, 0, 4)
    build(aten.scaled_dot_product_attention.default, q, k, v, enable_gqa=True)


def norm_of_nothing(build):
    x = build.input(2, 0)
    y = build(aten.rms_norm.default, x, [0], build.input(0), 1e-6)
    build(aten.native_layer_norm.default, y, [0], build.input(0), None, 1e-5)
    build(aten.rms_norm.default, build.input(0, 64), [64], build.input(64), 1e-6)


def rotate_nothing(build):
    x = build.input(2, 3, 0)
    low, high = (build(aten.slice.Tensor, x, -1, 0, 0) for _ in range(2))
    turned = build(aten.cat.default, [build(aten.neg.default, high), low], -1)
    cos = build(aten.mul.Tensor, x, build.input(3, 0))
    build(aten.add.Tensor, cos, build(aten.mul.Tensor, turned, build.input(3, 0)))


def rotate_by_tables_of_different_dims(build):
    x = build.input(1, 4, 64, 2)
    low, high = build(aten.slice.Tensor, x, -1, 0, 1), build(aten.slice.Tensor, x, -1, 1, 2)
    turned = build(aten.cat.default, [build(aten.neg.default, high), low], -1)
    cos = build(aten.mul.Tensor, x, build.input(1, 4, 1, 2))
    build(aten.add.Tensor, cos, build(aten.mul.Tensor, turned, build.input(1, 1, 64, 2)))


def write_rows_of_nothing(build):
    cache = build.input(4, 0, dtype=i32)
    made = build(aten.slice_scatter.default, cache, build.input(3, 0, dtype=i32), 0, 1, 4)
    build(aten.copy_.default, cache, made)


def quantise_by_zero(build):
    x = build.input(4, 64, dtype=bf16)
    scale = build(aten.div.Tensor, build(aten.amax.default, build(aten.abs.default, x), [-1], True), math.inf)
    whole = build(aten.clamp.default, build(aten.round.default, build(aten.div.Tensor, x, scale)), -128, 127)
    build(aten._to_copy.default, whole, dtype=torch.int8)


def power_of_a_large_factor(build):
    build(aten.pow.Tensor_Scalar, build(aten.mul.Tensor, build.input(4), 1e200), 2)


ODD = [
    index_put, embedding_of_a_number, scatter_into_a_number, einsum_of_numbers, weighed_number, split_nothing,
    roll_nothing, select_from_nothing, join_nothing, attend_without_width, attend_over_nothing, attend_for_nobody,
    attend_with_no_heads, attend_with_groups_of_nothing, norm_of_nothing, rotate_nothing,
    rotate_by_tables_of_different_dims, write_rows_of_nothing, quantise_by_zero, power_of_a_large_factor,
]  # fmt: skip


@pytest.mark.parametrize("options", [HOST, CHIP], ids=["host", "chip"])
@pytest.mark.parametrize("form", ODD, ids=lambda form: form.__name__)
def test_numbers_and_tensors_without_elements_are_read(form, options):
    build = Build()
    form(build)
    build.fused(options)


def test_what_has_no_elements_is_refused_with_its_shape():
    build = Build()
    build(aten.rms_norm.default, build.input(0, 64), [64], build.input(64), 1e-6)
    reasons = [each.reason for each in build.fused().refusals if each.rule == "rms_norm"]
    assert ["without elements" in each for each in reasons] == [True]


def test_the_empty_cache_of_a_first_step_is_joined_as_ever():
    build = Build()
    q, k, v = (build.input(1, 2, 4, 64, dtype=bf16) for _ in range(3))
    k = build(aten.cat.default, [build.input(0, dtype=bf16), k], -2)
    v = build(aten.cat.default, [build.input(1, 2, 0, 64, dtype=bf16), v], -2)
    build(aten.scaled_dot_product_attention.default, q, k, v)
    assert [each.match.rule.name for each in build.fused(CHIP).chosen] == ["attention"]


def test_the_end_of_a_rolled_buffer_is_not_what_is_written_into_it():
    """Its value is the beginning of the buffer, which only a node behind the roll holds."""
    build = Build()
    cache = build.input(2, 2, 16, 8)
    rolled = build(aten.roll.default, cache, [-3], [2])
    build(aten.copy.default, build(aten.slice.Tensor, rolled, 2, -3, 2**62), build.input(2, 2, 3, 8))
    build(aten.copy_.default, cache, build(aten.copy.default, cache, rolled))
    build.fused()


def test_a_number_times_rows_of_one_lane():
    """A 0-d tensor beside a [.., 1] tensor, as a mean of losses is weighed."""
    build = Build()
    build(aten.mul.Tensor, build.input(), build.input(4, 1))
    build(aten.mul.Tensor, build(aten.exp.default, build.input(4, 1)), build.input())
    build.fused()


# any graph ---------------------------------------------------------------------------------------------------------

POINTWISE = [
    aten.neg.default, aten.exp.default, aten.log.default, aten.sigmoid.default, aten.rsqrt.default, aten.silu.default,
    aten.abs.default, aten.logical_not.default, aten.isnan.default, aten.clone.default, aten.square.default,
]  # fmt: skip
PAIRS = [
    aten.add.Tensor, aten.mul.Tensor, aten.sub.Tensor, aten.div.Tensor, aten.maximum.default, aten.le.Tensor,
    aten.matmul.default, aten.copy.default,
]  # fmt: skip
ALONG = [
    (aten.mean.dim, [[]], True), (aten.sum.dim_IntList, [[]]), (aten.softmax.int, []), (aten.amax.default, [[]], True),
    (aten.cumsum.default, []), (aten.flip.default, [[]]), (aten.slice.Tensor, [], 0, 1), (aten.select.int, [], 0),
    (aten.squeeze.dim, []), (aten.unsqueeze.default, []), (aten.transpose.int, [], -1), (aten.topk.default, 1, []),
    (aten.repeat_interleave.self_int, 2, []), (aten.logsumexp.default, [[]], True),
]  # fmt: skip
"""Operators with their arguments behind the tensor: [] stands for a dim, [[]] for a list of one."""
DTYPES = (f32, f32, f32, bf16, b8, torch.int8, i64, torch.complex64, torch.float64)


def leaf(chance: random.Random, build: Build) -> fx.Node:
    sizes = [chance.choice((0, 1, 1, 2, 4, 64)) for _ in range(chance.randrange(6))]
    return build.input(*sizes, dtype=chance.choice(DTYPES))


def drawn(chance: random.Random, build: Build, pool: list[fx.Node]) -> tuple[object, ...]:
    """An operator and its arguments, which it may not take."""
    x = chance.choice(pool)
    val = x.meta["val"]
    kind = chance.randrange(3)
    if kind == 0:
        return chance.choice(POINTWISE), x
    if kind == 1:
        shape = chance.choice(([], val.shape, val.shape[-1:], (*val.shape[:-1], 1)))
        y = chance.choice((build.input(*shape, dtype=val.dtype), chance.choice(pool)))
        return chance.choice(PAIRS), *chance.choice(((x, y), (y, x)))
    rank = max(val.dim(), 1)
    dim = chance.randrange(-rank, rank)
    target, *args = chance.choice(ALONG)
    return target, x, *(dim if each == [] else [dim] if each == [[]] else each for each in args)


def grown(seed: int) -> Build:
    """A graph of random operators on tensors of ranks 0 to 5 and sizes 0, 1, 2, 4, 64."""
    chance, build = random.Random(seed), Build()
    pool = [leaf(chance, build), leaf(chance, build)]
    for _ in range(12):
        try:
            made = build(*drawn(chance, build, pool))
        except Exception:
            continue
        pool += [made] if isinstance(made.meta["val"], torch.Tensor) else []
    return build


@pytest.mark.parametrize("part", range(4))
@pytest.mark.filterwarnings("ignore")
@pytest.mark.rotates(4)
def test_graphs_of_any_operators_on_tensors_of_any_rank_are_read(part):
    for seed in range(part * 25, part * 25 + 25):
        grown(seed).fused(CHIP if seed % 2 else HOST)
