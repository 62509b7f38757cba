"""Experts become rows in their order, two products of groups and a sum, in every spelling."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, fx

from fusion.frontend.library import installed
from fusion.operators import operator_of
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.testing import capture
from tests.moe.converted import converted
from tests.moe.experts import (
    COUNTED,
    EMITTED,
    EXPERTS,
    FURTHER,
    GATHERED,
    OTHERS,
    ROUTE,
    SORTED,
    Form,
    by_group,
    expected,
    halves,
    inputs,
    routed,
    weights_in_float,
)
from tests.support.torch_npu_host import requires_torch_npu

pytestmark = pytest.mark.rotates(12)

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
A3 = Options(target="ascend910_93")
# By dtype: what rounding rows twice and weights once may do.
TOLERANCE = {BF16: 1e-2, F16: 2e-3, F32: 2e-6}


def run(
    form: Form, args: tuple[Tensor, ...], level: str = "composite", dynamic: bool | None = False, options: Options = A3
):
    """The plain result, the fused one, the fused graph, and what was done; `dynamic`: for any number of tokens."""
    for each in args[:2] if dynamic else ():
        torch._dynamo.mark_dynamic(each, 0)

    def tied(tokens: Tensor, logits: Tensor, *matrices: Tensor) -> Tensor:
        return form(tokens, logits + 0 * tokens[..., :1], *matrices)  # of as many tokens

    captured = capture(tied, args, level, dynamic=False if dynamic is False else None)
    gm = captured.graph
    with torch.no_grad():
        plain = gm(*captured.inputs)[0]
    named = dict(zip((n.name for n in gm.graph.find_nodes(op="placeholder")), captured.inputs, strict=True))
    outcome = fuse_graph(gm.graph, installed(), options, captured.facts)
    assert not outcome.failures, outcome.failures
    gm.recompile()
    with torch.no_grad():
        further = [each.module(*(named[name] for name in each.sources)) for each in outcome.prepared]
        return plain, gm(*captured.inputs, *further)[0], gm, outcome


def operators(gm: fx.GraphModule) -> dict[str, int]:
    """The fused operators of a graph, but that of the router."""
    found = Counter(operator.name for node in gm.graph.nodes if (operator := operator_of(node.target)) is not None)
    return {name: count for name, count in found.items() if "gating" not in name}


def distance(x: Tensor, y: Tensor) -> float:
    return ((x.double() - y).norm() / y.norm()).item()


CASES = [(form, BF16) for form in SORTED] + [(form, dtype) for form in GATHERED for dtype in (BF16, F16, F32)]
CASES.remove((weights_in_float, F16))  # the operator would hold weights of float32 in the range of float16


@pytest.mark.parametrize(("level", "dynamic"), [("composite", False), ("core", True), ("decomposed", False)])
@pytest.mark.parametrize(("form", "dtype"), CASES, ids=lambda each: getattr(each, "__name__", str(each)))
def test_every_spelling_is_the_vendors_sequence(form: Form, dtype: torch.dtype, level: str, dynamic: bool):
    args = inputs(dtype)
    plain, fused, gm, _ = run(form, args, level, dynamic)
    assert operators(gm) == EMITTED
    wanted = expected(*args, form)
    assert fused.dtype == dtype
    assert distance(fused, wanted) < max(TOLERANCE[dtype], 1.5 * distance(plain, wanted))


@pytest.mark.parametrize("form", FURTHER, ids=lambda form: form.__name__)
def test_further_spellings(form: Form):
    test_every_spelling_is_the_vendors_sequence(form, BF16, "composite", dynamic=False)


@pytest.mark.rotates
@pytest.mark.parametrize(("level", "dynamic"), [("core", True), ("decomposed", False)])
@pytest.mark.parametrize("form", FURTHER, ids=lambda form: form.__name__)
def test_further_spellings_at_every_level(form: Form, level: str, dynamic: bool):
    test_every_spelling_is_the_vendors_sequence(form, BF16, level, dynamic and form is not FURTHER[0])


@pytest.mark.parametrize(("level", "dynamic"), [("composite", False), ("core", True)])
@pytest.mark.parametrize("name", COUNTED)
def test_rows_of_each_expert_are_counted_in_any_way(name: str, level: str, dynamic: bool):
    form, args = COUNTED[name], inputs(BF16)
    plain, fused, gm, _ = run(form, args, level, dynamic)
    assert operators(gm) == EMITTED
    wanted = expected(*args, form)
    assert distance(fused, wanted) < max(TOLERANCE[BF16], 1.5 * distance(plain, wanted))


@pytest.mark.parametrize("form", [SORTED[0], GATHERED[0]], ids=lambda form: form.__name__)
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_one_token_and_more(form: Form, tokens: int):
    args = inputs(BF16, tokens)
    _, fused, gm, _ = run(form, args)
    assert operators(gm) == EMITTED
    assert distance(fused, expected(*args, form)) < TOLERANCE[BF16]


@pytest.mark.rotates(8)
def test_several_symbolic_sizes_of_a_result_are_refused():
    def batches(tokens: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        weights, experts = routed(logits)
        hidden = halves((gate_up[experts] @ tokens[:, :, None, :, None]).squeeze(-1))
        return ((down[experts] @ hidden.unsqueeze(-1)).squeeze(-1) * weights.unsqueeze(-1)).sum(-2)

    tokens, logits, *matrices = inputs(BF16, 6)
    args = (tokens.unflatten(0, (2, 3)), logits.unflatten(0, (2, 3)), *matrices)
    for each in args[:2]:
        torch._dynamo.mark_dynamic(each, 0)
    _, _, gm, _ = run(batches, args, dynamic=None)
    assert operators(gm) == EMITTED
    for each in args[:2]:
        torch._dynamo.mark_dynamic(each, 1)
    _, _, gm, outcome = run(batches, args, dynamic=None)
    assert ROUTE not in operators(gm)
    assert any("several symbolic sizes" in str(each.cause) for each in outcome.refusals)


def test_a_loop_over_the_experts_that_were_hit_is_told():
    def hit(tokens: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        mask = torch.nn.functional.one_hot(routed(logits)[1], num_classes=EXPERTS).permute(2, 1, 0)
        return torch.greater(mask.sum(dim=(-1, -2)), 0), tokens + 1

    gm = capture(hit, inputs(BF16)[:2]).graph
    outcome = fuse_graph(gm.graph, installed(), A3)
    assert any("experts_implementation" in str(each.cause) for each in outcome.refusals)


def test_counts_that_are_passed_in_are_named():
    tokens, logits, gate_up, down = inputs(BF16)
    _, experts = routed(logits)
    counts = torch.bincount(experts.flatten(), minlength=EXPERTS)

    def behind_a_break(tokens: Tensor, order: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return by_group(tokens[order // 2], counts.cumsum(0).int(), gate_up, down)

    gm = capture(behind_a_break, (tokens, experts.flatten().argsort(), counts, gate_up, down)).graph
    outcome = fuse_graph(gm.graph, installed(), A3)
    assert any("counted outside of this graph" in str(each.cause) for each in outcome.refusals)


@requires_torch_npu
@pytest.mark.parametrize("form", [SORTED[0], GATHERED[0]], ids=lambda form: form.__name__)
@pytest.mark.rotates(24)
def test_the_vendors_compiler_takes_the_sequence(form: Form):
    told = converted("tests.moe.experts", form.__name__)
    once = ("MoeGatingTopKSoftmaxV2", "MoeInitRoutingV3", "SwiGlu", "MoeFinalizeRoutingV2")
    expected = {"GroupedMatmul": 2} | dict.fromkeys(once, 1)
    assert {name: told["operators"].get(name) for name in expected} == expected
    assert told["error"] < TOLERANCE[BF16]


def left_alone(form: Form, args: tuple[Tensor, ...]) -> list[str]:
    """What is said of experts, none of which are routed."""
    _, _, gm, outcome = run(form, args)
    assert ROUTE not in operators(gm)
    return [str(each.cause) for each in outcome.refusals if each.rule == "routed_experts"]


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_it_is_left_alone(name: str):
    form, reason = OTHERS[name]
    said = left_alone(form, inputs(BF16))
    assert any(reason in each for each in said), said
