"""A graph that is interpreted: its decompositions are inlined once it has been called a few times."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fusion
from fusion.routes import cpu_gpu

CALLS = cpu_gpu.CALLS_BEFORE_INLINING + 2


class Called(TorchDispatchMode):
    """Counts the operators that are called inside of a compiled graph."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.name()] += 1
        return func(*args, **(kwargs or {}))


def step(x: Tensor, weight: Tensor, cache: Tensor, position: Tensor) -> Tensor:
    """A norm, and a row of a cache that it is written to."""
    h = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype) * weight
    cache.index_copy_(1, position, h)
    return h + cache.sum(1, keepdim=True)


def inputs(size: int = 64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(1, 1, size), torch.randn(size), torch.zeros(1, 8, size), torch.tensor([3])


def counted(backend: fusion.FusionBackend, calls: int, dynamic: bool = False) -> list[Counter[str]]:
    """What each call of the compiled step calls, whose results are held against those of the step."""
    found = list[Counter[str]]()

    def counting(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        run = backend(gm, example_inputs)

        def call(*values: Any) -> Any:
            with Called() as called:
                result = run(*values)
            found.append(called.names)
            return result

        return call

    compiled = torch.compile(step, backend=counting, dynamic=dynamic)
    for number in range(calls):
        given, same = inputs(64 + number * dynamic), inputs(64 + number * dynamic)
        torch.testing.assert_close(compiled(*given), step(*same))
        torch.testing.assert_close(given[2], same[2])
    return found


@pytest.mark.usefixtures("fresh")
def test_decompositions_are_inlined_after_a_few_calls():
    found = counted(fusion.FusionBackend({"target": "host", "lower": "eager"}), CALLS)
    assert [names["npu::npu_rms_norm"] for names in found] == [1] * cpu_gpu.CALLS_BEFORE_INLINING + [0, 0]
    assert found[-1]["aten::rsqrt"] == 1


@pytest.mark.usefixtures("fresh")
def test_with_symbolic_sizes_they_stay_calls():
    found = counted(fusion.FusionBackend({"target": "host", "lower": "eager"}), CALLS, dynamic=True)
    assert [names["npu::npu_rms_norm"] for names in found] == [1] * CALLS


@pytest.mark.usefixtures("fresh")
def test_what_cannot_be_inlined_stays_a_call(monkeypatch: pytest.MonkeyPatch):
    def untraceable(*args: Any) -> Any:
        raise RuntimeError("the value is not known")

    monkeypatch.setattr(cpu_gpu, "inline", untraceable)
    found = counted(fusion.FusionBackend({"target": "host", "lower": "eager"}), CALLS)
    assert [names["npu::npu_rms_norm"] for names in found] == [1] * CALLS
