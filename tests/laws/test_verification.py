"""Verification accuses no example of any rule, whatever rounds, ties or overflows in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchRuntimeError

from fusion import Example, Rule
from fusion.frontend.backend import FusionBackend
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.runtime.verification import judge
from fusion.testing import DTYPES
from fusion.testing.trials import switched_on
from tests.support.tried import cases

pytestmark = pytest.mark.rotates(48)


def settings() -> Iterator[Any]:
    for rule, example in cases(installed().rules):
        for dtype in DTYPES:
            name = f"{rule.name}-{example.name}-{str(dtype).removeprefix('torch.')}"
            yield pytest.param(rule, example, dtype, id=name)


@pytest.mark.parametrize(("rule", "example", "dtype"), settings())
def test_an_example_passes_though_each_difference_is_judged(
    rule: Rule, example: Example, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    def is_same(fused: Any, plain: Any) -> bool:
        return torch.equal(fused, plain) if isinstance(plain, Tensor) else fused == plain

    monkeypatch.setattr(judge, "is_close", is_same)
    monkeypatch.setattr(judge, "is_further", lambda *_: True)
    torch.compiler.reset()
    options = switched_on(rule, Options(target="host", lower="eager", verify=True))
    compiled = torch.compile(example.function, backend=FusionBackend(options), fullgraph=True)
    with torch.no_grad():
        try:
            compiled(*example.inputs(dtype))
        except TorchRuntimeError as error:  # of the model's own code, before any backend
            pytest.skip(f"torch cannot trace it in {dtype}: {error}")
