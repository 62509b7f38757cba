"""Runs in a child process behind the stubs: a model that `fusion.integrations` compiles by torch_npu's compilers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch_npu  # noqa: F401  (registers the compilers)
from torch import Tensor, fx, nn

import fusion
from tests.support import ge

A3 = {"target": "ascend910_93", "plan_cache": "off"}


class Gated(nn.Module):
    """x [B, 64] → [B, 64]: a norm, and two projections that are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64, eps=1e-6)
        self.gate = nn.Linear(64, 128, bias=False)
        self.up = nn.Linear(64, 128, bias=False)
        self.down = nn.Linear(128, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


class Seen:
    """A pass of the user, which notes the operators of the graphs that it is given."""

    def __init__(self) -> None:
        self.operators: list[str] = []

    def __call__(self, gm: fx.GraphModule, *context: Any) -> None:
        self.operators += [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def told(backend: Callable[..., Any], seen: Seen) -> dict[str, Any]:
    """Return what a model gives that `backend` compiles, and what is said of it."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Gated().eval(), torch.randn(4, 64)
    with torch.inference_mode():
        expected = model(x)
        compiled = torch.compile(model, backend=backend)
        far = max((compiled(x) - expected).abs().max().item() for _ in range(2))
    listed = fusion.reports()[-1]
    return {
        "far": far,
        "door": listed.door,
        "chosen": dict(listed.chosen),
        "prepared": len(listed.report.prepared),
        "listed": len(fusion.reports()),
        "seen": [each for each in seen.operators if each.startswith("npu.")],
    }


def by_torchair(mode: str) -> dict[str, Any]:
    import torchair

    config, seen = torchair.CompilerConfig(), Seen()
    config.mode = mode
    config.post_grad_custom_pre_pass = seen
    return told(fusion.integrations.torchair(config, A3), seen) | {"ge": dict(ge.operators())}


def by_npugraph_ex() -> dict[str, Any]:
    seen = Seen()
    config = {"force_eager": True, "post_grad_custom_pre_pass": seen}
    return told(fusion.integrations.npugraph_ex(config, A3), seen)


def by_both() -> dict[str, Any]:
    """Compile by torchair, where the guest is in its configuration as well."""
    import torchair

    config = torchair.CompilerConfig()
    config.post_grad_custom_pre_pass = fusion.FusionPass(A3)
    return told(fusion.integrations.torchair(config, A3), Seen())


def main() -> None:
    """Print, as one line of JSON, what came of each compiler."""
    ge.install()
    cases = {
        "torchair": by_torchair("max-autotune"),
        "torchair captures": by_torchair("reduce-overhead"),
        "npugraph_ex": by_npugraph_ex(),
        "both": by_both(),
    }
    print(json.dumps(cases))
