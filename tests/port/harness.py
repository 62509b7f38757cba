"""Runs of a port beside the plain model, the fused graph, and both in float64."""

from __future__ import annotations

import copy
import inspect
import linecache
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from ruff import find_ruff_bin
from torch import Tensor, nn

import fusion

TARGET = {"target": "ascend910_93"}
EAGER = {**TARGET, "lower": "eager", "plan_lower": "eager"}
ROUNDING = 1.5
"""Factor by which the error of a port may exceed that of the plain model, both against float64."""


def loaded(source: str, name: str = "ported") -> dict[str, Any]:
    """The names of a source that is run as a file."""
    place = f"{name}.py"
    linecache.cache[place] = len(source), None, source.splitlines(keepends=True), place
    names: dict[str, Any] = {"__name__": name}
    exec(compile(source, place, "exec"), names)
    return names


def ported(source: str, model: Any) -> nn.Module:
    names = loaded(source)
    if "from_plain" in names:
        return names["from_plain"](model)
    (last,) = [each for each in names.values() if isinstance(each, type) and issubclass(each, nn.Module)][-1:]
    return last()


def is_clean(source: str) -> bool:
    """True if ruff has no remark on a source, and would not format it otherwise."""
    common = ("--isolated", "--quiet", "--line-length", "100", "-")
    checks = ("check", "--select", "E,F,I,UP,B,SIM,C4,RET,N", "--ignore", "N812"), ("format", "--check")
    runs = (subprocess.run([find_ruff_bin(), *each, *common], input=source, text=True) for each in checks)
    return not any(each.returncode for each in runs)


def check(model: Any, *args: Any, **kwargs: Any) -> str:
    """The source of a port, whose results and written tensors are those of the fused graph, and of the plain model."""
    source = fusion.port(model, *args, options=TARGET, **kwargs)
    assert is_clean(source)
    runs = {
        "plain": called(model, args, kwargs),
        "fused": called(model, args, kwargs, compiled=True),
        "ported": called(model, args, kwargs, source=source),
        "exact": called(model, args, kwargs, wide=True),
        "wide": called(model, args, kwargs, source=source, wide=True),
    }
    for plain, fused, port, exact, wide in zip(*runs.values(), strict=True):
        torch.testing.assert_close(port, fused, rtol=1e-2, atol=1e-3)
        if not exact.is_floating_point():
            assert torch.equal(port, plain)
            continue
        assert error(port, exact) <= ROUNDING * error(plain, exact) + 1e-3
        assert error(wide, exact) < 1e-5
    return source


def called(
    model: Any, args: Any, kwargs: Any, *, source: str = "", wide: bool = False, compiled: bool = False
) -> list[Tensor]:
    """Results of a call of a copy, then the tensors of its arguments and buffers, as the call leaves them."""
    model, args, kwargs = copy.deepcopy((model, args, kwargs))
    if wide:
        model, args, kwargs = widened(model), widened(args), widened(kwargs)
        source = widened_source(source)
    given = {**dict(zip(inspect.signature(forward_of(model)).parameters, args, strict=False)), **kwargs}
    buffers = [name for name, _ in model.named_buffers()] if isinstance(model, nn.Module) else []
    with torch.no_grad(), default_dtype(torch.float64 if wide else torch.float32):
        if source:
            run = ported(source, model)
            result = run(*(given[name] for name in inspect.signature(run.forward).parameters))
            state = dict(run.named_buffers())
        else:
            torch._dynamo.reset()
            run = torch.compile(model, backend="cann_fusion", options=EAGER, dynamic=False) if compiled else model
            result = run(*args, **kwargs)
            state = dict(model.named_buffers()) if buffers else {}
    kept = [state[each] for each in buffers if each in state and each in WRITTEN]
    return [*tensors(getattr(result, "logits", result)), *tensors([*given.values()]), *kept]


WRITTEN = {"keys", "values", "count"}
"""Names of buffers that models of the tests write to."""


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def forward_of(model: Any) -> Any:
    return model.forward if isinstance(model, nn.Module) else model


def error(x: Tensor, exact: Tensor) -> float:
    return float((x.detach().double() - exact).norm() / exact.norm().clamp_min(1e-30))


def widened_source(source: str) -> str:
    """A source in float64. A cast that is none any more copies no more, so that a view behind it may need a copy."""
    for dtype in ("torch.bfloat16", "torch.float32"):
        source = source.replace(dtype, "torch.float64")
    return source.replace(".view(", ".reshape(")


def widened(given: Any) -> Any:
    if isinstance(given, nn.Module):
        config: Any = getattr(given, "config", None)
        if config is not None:
            config._experts_implementation = "eager"  # the grouped product takes no float64
        return given.double()
    for each in tensors(given):
        if each.is_floating_point():
            each.data = each.data.double()
    return given


def tensors(given: Any) -> list[Tensor]:
    """All tensors in containers and caches, each once."""
    return list({id(each): each for each in _tensors(given, set())}.values())


def _tensors(given: Any, seen: set[int]) -> Iterator[Tensor]:
    if id(given) in seen:
        return
    seen.add(id(given))
    if isinstance(given, Tensor):
        yield given
    inside = given.values() if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else ()
    if type(given).__module__.startswith("transformers.cache"):
        inside = vars(given).values()
    for each in inside:
        yield from _tensors(each, seen)
