"""Symbolic sizes: what fuses for fixed sizes fuses for any, with one compilation and right numbers for every size."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import fx

import fusion
from fusion.frontend.backend import FusionBackend
from fusion.report.outcome import GraphReport
from fusion.runtime.verification import relative_error

from .families import build

pytestmark = pytest.mark.rotates(12)

FAMILIES = ("Qwen3", "DeepseekV3")
SETTINGS = [("host", torch.float32), ("ascend910_93", torch.bfloat16)]
SIZES = ((2, 12), (3, 7))


@dataclass(frozen=True, eq=False)
class Watched(FusionBackend):
    """The backend, and what it has fused."""

    reports: list[GraphReport] = field(default_factory=list)

    def fuse(self, gm: fx.GraphModule, *context: Any, **how: Any) -> GraphReport:
        self.reports.append(super().fuse(gm, *context, **how))
        return self.reports[-1]

    @property
    def fused(self) -> int:
        return sum(len(each.matches) for each in self.reports)


def symbolic(report: GraphReport) -> bool:
    """Whether a graph has an input of a size that is not fixed."""
    vals = (node.meta.get("val") for node in report.graph.graph.find_nodes(op="placeholder"))
    return any(isinstance(size, torch.SymInt) for val in vals if isinstance(val, torch.Tensor) for size in val.shape)


def options(target: str) -> fusion.Options:
    return fusion.Options(target=target, lower="eager")


def static_fusions(built: Any, target: str) -> int:
    torch.compiler.reset()
    return len(fusion.explain(built.model, **built.step("prefill"), options=options(target)).matches)


def call(built: Any, batch: int, tokens: int, marked: bool) -> dict[str, Any]:
    step = built.step("prefill", batch, tokens)
    if marked:
        torch._dynamo.mark_dynamic(step["input_ids"], 0)
        torch._dynamo.mark_dynamic(step["input_ids"], 1)
    return step


@pytest.mark.rotates(12)
@pytest.mark.parametrize("how", ["dynamic=True", "mark_dynamic"])
@pytest.mark.parametrize(("target", "dtype"), SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_compilation_for_all_sizes_keeps_the_fusions_and_the_numbers(family, target, dtype, how):
    built = build(family, dtype)
    expected = static_fusions(built, target)
    torch.compiler.reset()
    backend = Watched(options(target))
    compiled = torch.compile(built.model, backend=backend, dynamic=True if how == "dynamic=True" else None)
    exact = build(family, torch.float64)
    with torch.no_grad():
        for batch, tokens in SIZES:
            step = call(built, batch, tokens, how == "mark_dynamic")
            have, own = compiled(**step).logits, built.model(**step).logits
            truth = exact.model(**step).logits
            assert relative_error(have, truth) <= 1.5 * relative_error(own, truth) + torch.finfo(dtype).eps
    assert len(backend.reports) == 1, "another size was compiled again"
    assert symbolic(backend.reports[0])
    refusals = "\n".join(map(str, backend.reports[0].refusals))
    assert backend.fused >= 0.95 * expected, f"{backend.fused} of {expected}\n{refusals}"


@pytest.mark.rotates(12)
@pytest.mark.parametrize(("target", "dtype"), SETTINGS)
@pytest.mark.parametrize("family", FAMILIES)
def test_explain_says_it_for_symbolic_sizes(family, target, dtype):
    built = build(family, dtype)
    torch.compiler.reset()
    report = fusion.explain(built.model, **built.step("prefill"), options=options(target), dynamic=True)
    assert all(map(symbolic, report.parts))
    assert len(report.matches) >= 0.95 * static_fusions(built, target), report


@pytest.mark.rotates(6)
def test_a_cache_that_grows_recompiles_once_at_most():
    built = build("Qwen3", torch.float32)
    torch.compiler.reset()
    backend = Watched(options("host"))
    compiled = torch.compile(built.model, backend=backend, dynamic=True)
    step = built.step("decode_dynamic")
    plain = built.step("decode_dynamic")
    with torch.no_grad():
        for _ in range(3):
            have, want = compiled(**step).logits, built.model(**plain).logits
            assert relative_error(have, want) < 1e-4
    assert 1 <= len(backend.reports) <= 2
    assert all(each.matches for each in backend.reports)
