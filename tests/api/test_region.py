"""`fusion.region`: what is expected of a function, a class or a block is reported, and nothing else is changed."""

from __future__ import annotations

import pickle
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion
from fusion.errors import OptionError
from fusion.graph.origin import render
from fusion.report.trace import displayed_place

from ..engine.graphs import norm, numbers

pytestmark = pytest.mark.usefixtures("fresh")

OPTIONS = {"target": "ascend910_93", "lower": "eager"}
X, W = numbers(4, 64), numbers(64, seed=1)
ROWS = numbers(1, 16, 64).bfloat16()
OVER_QUERIES = "softmax: it is taken over the queries"


@fusion.region("rms_norm")
def marked(x: Tensor) -> Tensor:
    def squares(h: Tensor) -> Tensor:
        return h.square().mean(-1, keepdim=True)

    return x * torch.rsqrt(squares(x) + 1e-6)


def attend(q: Tensor, k: Tensor, v: Tensor, axis: int) -> Tensor:
    return (q @ k.transpose(-1, -2) / 8).softmax(axis) @ v


class Attention(nn.Module):
    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis
        self.qkv = nn.Linear(64, 192, bias=False)

    def heads(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.qkv(x).view(1, 16, 3, 1, 64).permute(2, 0, 3, 1, 4).unbind(0)

    def forward(self, x: Tensor) -> Tensor:
        return x + attend(*self.heads(x), self.axis)[:, 0]


@fusion.region("attention")
class MarkedClass(Attention):
    pass


class OfMarkedClass(MarkedClass):
    pass


class MarkedBlock(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        with fusion.region("attention"):
            y = attend(q, k, v, self.axis)
        return x + y[:, 0]


class MarkedMethod(Attention):
    @fusion.region("attention")
    def forward(self, x: Tensor) -> Tensor:
        return x + attend(*self.heads(x), self.axis)[:, 0]


KINDS = [
    MarkedClass,
    MarkedBlock,
    *(pytest.param(each, marks=pytest.mark.rotates(8)) for each in (OfMarkedClass, MarkedMethod)),
]


def layers(kind: type[Attention], *axes: int) -> nn.Module:
    return nn.Sequential(*map(kind, axes)).bfloat16().requires_grad_(False).eval()


def explained(model: Any, *args: Any) -> fusion.Report:
    return fusion.explain(model, *args, options=OPTIONS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_region_is_reported_for_each_module_with_what_fused_or_why_not(kind: type[Attention]):
    report = explained(layers(kind, -1, -2), ROWS)
    assert report.breaks == ()
    first, second = report.regions
    assert (first.rule, first.module, first.is_met, first.fused.get("attention")) == ("attention", "0", True, 1)
    assert (second.module, second.is_met) == ("1", False)
    assert OVER_QUERIES in second.summary
    assert f"[{displayed_place(f'{__file__}:{attend.__code__.co_firstlineno + 1}')}]" in second.summary
    assert "regions in which a fusion is expected" in str(report)
    assert pickle.loads(pickle.dumps(report)).to_json() == report.to_json()


def test_a_region_holds_the_functions_inside_it_and_each_call_is_one():
    def model(x: Tensor) -> Tensor:
        x = marked(x).sin()
        return marked(x)

    regions = explained(model, X).regions
    assert [(each.name, each.is_met, dict(each.fused)) for each in regions] == [("marked", True, {"rms_norm": 1})] * 2


def test_a_decorated_object_is_the_same_object():
    assert marked.__code__.co_name == "marked"
    assert not hasattr(marked, "__wrapped__")

    def scaled(x: Tensor) -> Tensor:
        return norm(x, W)

    assert fusion.region("rope")(scaled) is scaled
    assert fusion.region("rms_norm")(scaled) is scaled  # the last one holds
    assert [each.rule for each in explained(scaled, X).regions] == ["rms_norm"]


@pytest.mark.rotates(8)
@pytest.mark.parametrize("kind", [MarkedClass, MarkedBlock])
def test_a_region_changes_no_graph_and_no_number(kind: type[Attention]):
    x = ROWS
    marked_model, plain = layers(kind, -1), layers(Attention, -1)
    plain.load_state_dict(marked_model.state_dict())
    run, as_before = (
        torch.compile(each, backend="cann_fusion", options=OPTIONS, fullgraph=True) for each in (marked_model, plain)
    )
    with torch.no_grad():
        assert torch.equal(run(x), as_before(x))
    graphs = [each.graph for model in (marked_model, plain) for each in explained(model, x).graphs]
    calls = [[re.sub(r"  # .*", "", text) for text in render(each).splitlines()] for each in graphs]
    assert calls[0] == calls[1]


def test_a_compilation_warns_of_a_region_each_time_although_plans_are_kept():
    run = layers(MarkedBlock, -2)
    for _ in range(2):
        torch.compiler.reset()
        with torch.no_grad(), pytest.warns(fusion.ExpectationWarning, match=f"region attention: (.|\n)*{OVER_QUERIES}"):
            torch.compile(run, backend="cann_fusion", options={**OPTIONS, "plan_cache": "memory"})(ROWS)


def test_a_compilation_that_meets_its_regions_does_not_warn():
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", fusion.ExpectationWarning)
        torch.compile(layers(MarkedClass, -1), backend="cann_fusion", options=OPTIONS)(ROWS)


@pytest.mark.rotates(8)
def test_an_exported_program_has_the_regions_of_classes():
    program = torch.export.export(layers(MarkedClass, -2), (ROWS,))
    (region,) = explained(program).regions
    assert (region.module, region.is_met) == ("0", False)
    with pytest.warns(fusion.ExpectationWarning, match=OVER_QUERIES):
        fusion.fuse_exported(program, options=OPTIONS)


def test_a_rule_that_is_not_known_is_named_with_the_nearest():
    def model(x: Tensor) -> Tensor:
        with fusion.region("rms_nrom"):
            return norm(x, W)

    (region,) = explained(model, X).regions
    assert "rms_nrom: it is no known rule; did you mean 'rms_norm'?" in region.summary
    with torch.no_grad(), pytest.warns(fusion.ExpectationWarning, match="it is no known rule; did you mean 'rms_norm'"):
        torch.compile(model, backend="cann_fusion", options=OPTIONS)(X)


@pytest.mark.parametrize("given", [3, None, torch.nn.Linear(2, 2), int])
def test_what_cannot_be_a_region_is_an_error(given: Any):
    with pytest.raises(OptionError, match=r"neither a function nor a class of torch.nn.Module; decorate"):
        fusion.region("rope")(given)
    with pytest.raises(OptionError, match=r"is no name of a rule; write @fusion.region\('attention'\)"):
        fusion.region(given)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"disable": "rms_norm"}, "rms_norm: the option disable names it; remove it from disable to use it"),
        ({"rules": "rope"}, "rms_norm: the option rules does not name it; add it, or leave the option out"),
    ],
)
def test_a_rule_that_is_not_used_is_the_reason(options: dict[str, str], reason: str):
    (region,) = fusion.explain(marked, X, options={**OPTIONS, **options}).regions
    assert reason in region.summary
