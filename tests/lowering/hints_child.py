"""Runs in a child process behind the stubs: a decode step with hints, and one whose code has a scope, by torchair."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch_npu  # noqa: F401  (registers the operators)
import torchair
from torch import Tensor, nn

from fusion.runtime.verification import relative_error
from tests.models.families import build
from tests.support import ge

A3 = {"target": "ascend910_93", "lower": "torchair"}
SIZES = {"hidden_size": 1024, "intermediate_size": 2048}


class Limited(nn.Module):
    """x, y [B, 64] → [B, 64] twice; the first norm runs in a scope that the addition before it is not in."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(64, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        with torchair.scope.limit_core_num(8, 16):
            inside = self.norms[0](total)
        return inside, self.norms[1](inside + total)


def run(model: Any, given: Any, options: Any) -> tuple[Any, ge.Converted]:
    """Return the result of `model` compiled with `options`, and its GE graph."""
    torch._dynamo.reset()
    with torch.no_grad():
        result = torch.compile(model, backend="cann_fusion", options=A3 | options, dynamic=False)(**given)
    return result, ge.converted()[-1]


def main() -> None:
    """Print, as one line of JSON, what hints and scopes become in GE."""
    ge.install()
    kernels = torch.library.Library("npu", "IMPL")
    kernels.impl("npu_prefetch", lambda *_: None, "CPU")
    built = build("Qwen3", torch.float16, **SIZES)
    with torch.no_grad():
        expected = built.model(**built.step("decode_static")).logits
    told: dict[str, Any] = {}
    for name, hints in {"none": [], "both": ["prefetch", "super_kernel"]}.items():
        result, graph = run(built.model, built.step("decode_static"), {"hints": hints})
        error = relative_error(result.logits, expected)
        told[name] = {"operators": graph.after, "scoped": graph.scoped, "error": error}
    model, given = Limited().half().eval(), {"x": torch.ones(4, 64).half(), "y": torch.ones(4, 64).half()}
    _, graph = run(model, given, {})
    told["limited"] = {"operators": graph.after, "scoped": graph.scoped}
    print(json.dumps(told))
