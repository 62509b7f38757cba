"""What a fused call gives is written into a cache in place, however the place is said: no cache is copied."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from fusion import testing
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.testing import Trial, capture
from tests.engine.graphs import fuse, names, numbers

pytestmark = pytest.mark.rotates(8)

NPU = Options(target="ascend910_93")
B, S, T, N, D, FIRST = 2, 3, 256, 4, 64, 100
halves = partial(numbers, dtype=torch.bfloat16)
GAIN = torch.linspace(0.5, 1.5, D)


def norm(x: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * GAIN.to(x.dtype)


def turned(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    angle = torch.linspace(0, 1, D // 2, dtype=x.dtype).repeat(2)
    return x * angle.cos() + torch.cat((-right, left), -1) * angle.sin()


# where -------------------------------------------------------------------------------------------------------------


def assigned(cache, rows, start):
    cache[:, start : start + rows.shape[1]] = rows


def of_the_first_sequences(cache, rows, start):
    cache[: rows.shape[0], start : start + rows.shape[1]] = rows


def narrowed(cache, rows, start):
    cache.narrow(1, start, rows.shape[1]).copy_(rows)


def copied(cache, rows, start):
    cache[:, start : start + rows.shape[1]].copy_(rows)


def one_position(cache, rows, start):
    cache[:, start] = rows[:, 0]


def twice(cache, rows, start):
    cache[:, start : start + rows.shape[1]] = rows
    cache[:, start + 5 : start + 5 + rows.shape[1]] = norm(rows + 1)


WRITES = (assigned, of_the_first_sequences, narrowed, copied, one_position, twice)


def step(write: Callable[..., None], made: Callable[[Tensor], Tensor], start: int) -> Callable[..., Tensor]:
    def form(cache, x):
        write(cache, made(x), start)
        return cache[: x.shape[0], : start + 10].sum(1)

    return form


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def tried(form: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> Trial:
    """The model before and after the pass."""
    captured = capture(form, inputs, dynamic=dynamic)
    graph = fx.GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    return Trial(installed(), captured, graph, fuse(graph, NPU))


def in_place(form: Callable[..., Any], caches: int, *inputs: Any, dynamic: bool = False) -> list[str]:
    """The calls of the fused graph, which writes so many caches in place and computes what the model does."""
    trial = tried(form, *inputs, dynamic=dynamic)
    called = names(trial.fused)
    assert len(trial.outcome.in_place) == caches, called
    assert not [each for each in called if "copy_" in each or "slice_scatter" in each or "select_scatter" in each]
    testing.means_what_it_says(trial)
    return called


@pytest.mark.parametrize("write", WRITES, ids=lambda each: each.__name__)
def test_a_norm_is_written_in_place(write):
    rows = 1 if write is one_position else S
    called = in_place(step(write, norm, FIRST), 1, numbers(B, T, D), numbers(B, rows, D, seed=1))
    assert sum("npu_rms_norm" in each for each in called) == (2 if write is twice else 1)


KINDS = {norm: (B, S, D), turned: (B, 1, N, D), swiglu: (B, S, 2 * D)}


@pytest.mark.parametrize("made", KINDS, ids=lambda each: each.__name__)
def test_results_of_all_kinds_are_written_in_place(made):
    shape = KINDS[made]
    cache = (B + 1, T, *shape[2:-1], D)
    called = in_place(step(of_the_first_sequences, made, FIRST), 1, halves(*cache), halves(*shape, seed=1))
    assert any("npu.npu_" in each for each in called)


def test_keys_and_values_are_written_in_place_and_read_back():
    def form(keys, values, q, k, v):
        keys[:B, FIRST : FIRST + 1], values[:B, FIRST : FIRST + 1] = turned(k), v
        k, v = (each[:B, : FIRST + 1].transpose(1, 2) for each in (keys, values))
        return F.scaled_dot_product_attention(turned(q).transpose(1, 2), k, v)

    caches = (halves(B + 1, T, N, D, seed=seed) for seed in range(2))
    called = in_place(form, 2, *caches, *(halves(B, 1, N, D, seed=seed) for seed in range(2, 5)))
    assert sum("infer_attention" in each for each in called) == 1


@pytest.mark.parametrize("write", [assigned, of_the_first_sequences], ids=lambda each: each.__name__)
def test_where_sizes_and_the_start_are_symbolic(write):
    def form(cache, x, start):
        write(cache, norm(x), start)
        return cache[: x.shape[0], : start + 10].sum(1)

    batch = B if write is assigned else B + 1
    in_place(form, 1, numbers(batch, T, D), numbers(B, S, D, seed=1), FIRST, dynamic=True)


def test_a_value_that_stays_is_not_taken_for_one_that_goes():
    def form(cache, x):
        made = norm(x)
        cache[:, FIRST : FIRST + S] = made
        return cache[:, : FIRST + 10].sum(1) + made.sum(1)

    in_place(form, 1, numbers(B, T, D), numbers(B, S, D, seed=1))


def test_a_cache_whose_old_rows_are_read_is_copied():
    def form(cache, x):
        old = cache * 2
        cache[:, FIRST : FIRST + S] = norm(x)
        return old + cache

    trial = tried(form, numbers(B, T, D), numbers(B, S, D, seed=1))
    assert trial.outcome.chosen
    testing.means_what_it_says(trial)
