"""What Inductor gives: results in memory of their own, which torch 2.13 forgets, and in the order that it was told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch._inductor import config

from fusion.operators.attention.layouts import paged_heads
from fusion.routes import cpu_gpu
from tests.engine.graphs import numbers

pytestmark = pytest.mark.skipif(not cpu_gpu.has_compiler("cpu"), reason="needs a C++ compiler and Python.h")

CACHE, ROWS, AT = numbers(2, 9, 3, 64), numbers(2, 3, 64, seed=1), torch.tensor([7, 0])


def places(at: Tensor) -> Tensor:
    return at[:, None, None, None].expand(-1, 1, 3, 64)


def cloned(cache: Tensor, at: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    cache.scatter_(1, places(at), rows[:, None])
    return (cache.clone(),)


def written_back(cache: Tensor, at: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    new = cache.index_copy(1, at, rows[:, None].expand(-1, 2, -1, -1))
    cache.copy_(new)
    return (new,)


def written_twice(cache: Tensor, at: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    new = cache.slice_scatter(rows[:, None], 1, 4, 5).select_scatter(rows, 1, 2)
    cache.copy_(new)
    return (new[1:],)


def seen_three_times(cache: Tensor, at: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    new = cache.scatter(1, places(at), rows[:, None])
    cache.copy_(new)
    return new[1:], new.view(-1), new


def added(cache: Tensor, at: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    """Nothing that Inductor would do in place."""
    new = cache + rows[:, None]
    cache.copy_(new)
    return (new,)


FORMS: Sequence[Callable[..., tuple[Tensor, ...]]] = (cloned, written_back, written_twice, seen_three_times, added)


def follow_the_cache(run: Callable[..., tuple[Tensor, ...]]) -> list[bool]:
    """For each result, whether it changes with the cache."""
    torch.compiler.reset()
    cache = CACHE.clone()
    results = run(cache, AT, ROWS)
    cache.zero_()
    return [not bool(result.any()) for result in results]


@pytest.mark.rotates(8)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_results_do_not_follow_the_cache(form: Callable[..., tuple[Tensor, ...]]):
    run = torch.compile(form, backend="cann_fusion", options={"target": "host", "lower": "inductor"}, dynamic=False)
    assert not any(follow_the_cache(run))
    cache, expected = CACHE.clone(), CACHE.clone()
    results, wanted = run(cache, AT, ROWS), form(expected, AT, ROWS)
    torch.testing.assert_close((cache, *results), (expected, *wanted), rtol=0, atol=0)
    results[-1].zero_()
    assert not any(bool(result.any()) for result in results), "results that share memory in eager share it"


@pytest.mark.rotates(8)
def test_a_plain_compile_still_follows():
    """Where this fails, torch is mended: `copy_results` and this module can go."""
    assert follow_the_cache(torch.compile(written_back, dynamic=False)) == [True]


@pytest.mark.rotates(8)
@pytest.mark.parametrize("shape", [(9, 4, 12), (9, 3, 4, 4), (9, 3, 2, 4, 2)], ids=["flat", "heads", "NZ"])
@pytest.mark.parametrize("layout", ["BNSD", "TND"])
def test_pages_are_read_by_a_table_in_any_order(shape: tuple[int, ...], layout: str):
    """What an index gives lies as its indices do, and in torch's fakes otherwise: its own kernels are refused."""
    cache, table = numbers(*shape), torch.tensor([[3, 6, 0], [5, 3, 2]]).t().contiguous().t()
    torch.compiler.reset()
    with config.patch(fallback_by_default=True):
        run = torch.compile(lambda cache, table: paged_heads(cache, layout, 3, table), dynamic=False)
        torch.testing.assert_close(run(cache, table), paged_heads(cache, layout, 3, table))
