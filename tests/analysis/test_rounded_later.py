"""What is computed in float32 and read only after it was rounded: whatever moves it in between, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion.analysis.rounded_before_use import RoundedLater
from fusion.stages.canonicalise import canonicalise
from fusion.testing import LEVELS, Level, capture

X = torch.randn(2, 4)
BF16, F16 = torch.bfloat16, torch.float16


def known(function: Callable[..., Any], *inputs: Any, level: Level = "composite", dynamic: bool = False) -> Any:
    """The dtype to which the exponential of the first argument is rounded."""
    graph = canonicalise(capture(function, inputs or (X,), level, dynamic=dynamic).graph.graph)
    value = next(each for each in graph.places if each.op == "exp")
    return RoundedLater(graph).dtype(value)


def stored(x: Tensor) -> Tensor:
    out = torch.empty(3, 2, 4)
    for place in range(3):
        out[place] = (x + place).exp() if place else x.exp()
    return out.bfloat16()


def cut(x: Tensor) -> Tensor:
    out = x.new_zeros(2, 8)
    out[:, 2:6] = x.exp()
    return out.bfloat16()


def chosen(x: Tensor) -> Tensor:
    y = x.exp()
    y[(x > 1).unsqueeze(0).broadcast_to(1, 2, 4)[0]] = 0.0
    return torch.where(x < 0, y.transpose(0, 1).transpose(0, 1), 1.0).masked_fill(x == 0, -1.0).bfloat16()


def gathered(x: Tensor) -> Tensor:
    y = torch.stack([x.exp(), x]).view(4, 4)
    return y[torch.tensor([3, 0])].index_select(1, torch.tensor([1, 1])).gather(1, torch.tensor([[0], [1]])).bfloat16()


def copied(x: Tensor) -> Tensor:
    return x.exp().to(torch.float32, copy=True).bfloat16()


def of_its_size(x: Tensor) -> tuple[Tensor, ...]:
    y = x.exp()
    return y.bfloat16(), torch.zeros(y.shape[0]), torch.zeros_like(y), y.new_ones(3)


def after(x: Tensor) -> Tensor:
    """What is rounded may be widened and computed with."""
    return torch.cat([x.exp(), x]).contiguous().bfloat16().float().sum(0)


def overwritten(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()
    return y.bfloat16(), torch.ops.aten.copy.default(y, x)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "function", [stored, cut, chosen, gathered, copied, of_its_size, after], ids=lambda each: each.__name__
)
@pytest.mark.rotates(4)
def test_what_is_moved_and_rounded(function: Callable[..., Any], level: Level):
    assert known(function, level=level) is BF16


def test_a_size_that_is_symbolic_and_memory_that_is_written_over_are_not_read():
    assert known(of_its_size, dynamic=True) is BF16
    assert known(overwritten) is BF16


OTHERS: dict[str, Callable[..., Any]] = {
    "returned as well": lambda x: (x.exp(), x.exp().bfloat16()),
    "returned behind a join": lambda x: (y := torch.cat([x.exp(), x]), y.bfloat16()),
    "added to": lambda x: (torch.cat([x.exp(), x]) + 1).bfloat16(),
    "rounded twice": lambda x: (y := torch.cat([x.exp(), x]), y.bfloat16(), y.half())[1:],
    "widened": lambda x: x.exp().double(),
    "cut off": lambda x: x.exp().int(),
    "added up and rounded": lambda x: x.exp().sum(0, dtype=BF16),
    "compared": lambda x: (y := x.exp(), y.bfloat16(), y > 1)[1:],
    "added up": lambda x: x.index_put([torch.tensor([0, 0])], x.exp(), accumulate=True).bfloat16(),
    "its bits": lambda x: torch.cat([x.exp(), x]).view(torch.int32),
    "joined to wider numbers": lambda x: torch.cat([x.exp(), x.double()]).bfloat16(),
    "counted": lambda x: torch.stack([x.exp(), x]).argmax(0),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_read_otherwise(name: str):
    assert known(OTHERS[name]) is None


def test_what_an_input_holds_is_read_by_the_caller():
    def written(x: Tensor, cache: Tensor) -> Tensor:
        cache[0] = x.exp()
        return cache.bfloat16()

    assert known(written, X, torch.zeros(3, 2, 4)) is None


def test_two_dtypes_are_not_one():
    assert known(lambda x: x.exp().half()) is F16
    assert known(lambda x: torch.cat([x.exp(), x]).to(BF16).to(F16)) is BF16
