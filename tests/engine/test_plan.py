"""What plans say of a graph: whose memory, what is prepared, and which nodes go."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from sympy import Symbol

from fusion import Rule, calls, lowering, pattern, pipeline, scalar, tensor
from fusion.facts import Facts
from fusion.frontend.library import installed
from fusion.graph.contractions import matmul
from fusion.graph.parameter_only import marks, parameter_inputs
from fusion.options import Options
from fusion.planning.fake_execution import Fakes
from fusion.planning.target import Target
from fusion.records import Repeats
from fusion.stages.canonicalise import canonicalise
from fusion.stages.match import match
from fusion.stages.plan import Planner
from fusion.stages.plan.plan_records import PlanBook
from fusion.stages.plan.result_fit import follows_index_strides, is_in_order
from fusion.stages.plan.sharing import Sharing
from fusion.testing import capture

from .graphs import Build, fuse, fused, norm, numbers, traced
from .rules import DoubleExp, WrongShape

NPU = Options(target="ascend910_93")
X, W = numbers(2, 64), torch.nn.Parameter(numbers(1, 64, seed=1))


def test_what_is_repeated_a_symbolic_number_of_times_is_not_prepared():
    captured = capture(lambda x, w: x * w, (X, W))
    source = captured.graph.graph
    graph = canonicalise(source, Facts(parameter_inputs(source, marks(captured.inputs))))
    (weight,) = (graph.value_of[node] for node in graph.fixed)
    book = PlanBook(graph, Fakes(graph), (), "", Options(), None)
    assert book.is_prepared(graph.algebra.expand(weight, (3, 64)))
    assert not book.is_prepared(graph.algebra.expand(weight, (Symbol("tokens"), 64)))


def test_what_no_node_holds_is_priced_by_the_bytes_and_the_arithmetic_of_building_it():
    target = Target.resolve("ascend910_93")
    gm = traced(lambda x, w: x @ w, numbers(1, 8, 1024), numbers(1024, 2048, seed=1))
    graph = canonicalise(gm.graph)
    x, w = (each for each in graph.places if each.op == "input")
    planner = Planner(graph, Fakes(graph), target, "eager", (), Options())
    squares = graph.algebra.power(w, 2.0)
    whole = matmul(graph.algebra, x, squares)
    assert planner._to_build([w, whole, x]) == (squares, whole)
    (copied,), (product,) = (planner._kernels(each) for each in (squares, whole))
    assert copied == pytest.approx(target.launch + 2 * w.shape[0] * w.shape[1] * 4 / target.bandwidth)
    assert product > target.launch + w.shape[0] * w.shape[1] * 4 / target.bandwidth
    assert planner._kernels(graph.algebra.reshape(w, (2048, 1024))) == ()


@pytest.mark.parametrize(("tokens", "chosen"), [(24, 0), (2048, 1)])
def test_one_call_does_not_become_several_for_launches_that_a_machine_may_not_need(tokens: int, chosen: int):
    """Attention whose values are narrower than its keys, returned: with copies, worth it where scores are many."""

    def attend(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v[..., :32], is_causal=True)

    qkv = (numbers(1, 2, tokens, 64, seed=seed, dtype=torch.bfloat16) for seed in range(3))
    outcome = fuse(traced(attend, *qkv), NPU)
    assert len(outcome.chosen) == chosen
    assert chosen or any(each.rule == "attention" for each in outcome.refusals)


def test_complex_numbers_do_not_become_several_calls_for_launches_that_a_machine_may_not_need():
    """A rotation of float32: the parts of its table, each repeated, and the operator stand for one multiplication."""

    def rotate(x, table):
        return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * table).flatten(-2)

    angles = numbers(16, 32, seed=1)
    outcome = fuse(traced(rotate, numbers(2, 4, 16, 64), torch.polar(torch.ones_like(angles), angles)), NPU)
    assert not outcome.chosen
    (refused,) = outcome.refusals
    assert refused.rule == "rope"
    assert "4 calls more" in refused.reason


class ScaledExp(Rule):
    """An exponential, perhaps times a number: one match takes what the other is."""

    @pattern
    def scaled(self, p, x=tensor("*B D"), factor=scalar()):
        """Times a number."""
        return p.scale(p.op("exp", x), factor)

    @pattern
    def plain(self, p, x=tensor("*B D")):
        """As it is."""
        return p.op("exp", x)

    @lowering
    def run(self, x, factor):
        """The same."""
        y = torch.exp(x)
        return y if factor is None else y * factor


def test_matches_of_which_one_takes_the_other_share_no_call():
    graph = canonicalise(traced(lambda x: x.exp() * 3.0, X).graph)
    planner = Planner(graph, Fakes(graph), Target.resolve("ascend910_93"), "eager", (), Options())
    found = match(graph, [ScaledExp()]).matches
    plans = {each: planner._book.plans_for(each) for each in found}
    shared = Sharing(graph, plans, planner._to_build, planner._dying_alone, Repeats())
    calls_of = [shared.calls_of(each, "run", plans[each]["run"]) for each in found]
    assert sorted(map(len, calls_of)) == [1, 2]
    assert {shared.count(call) for of in calls_of for call in of} == {1}


def test_nodes_that_somebody_else_reads_do_not_go():
    def form(x, w):
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * root * w, root.sin()

    gm = traced(form, X, W)
    root = next(node for node in gm.graph.nodes if node.target is torch.ops.aten.rsqrt.default)
    (chosen,) = fuse(gm).chosen
    assert chosen.dying
    assert not chosen.dying & {root, *root.all_input_nodes}


@pytest.mark.parametrize(("target", "named"), [("host", ""), ("ascend910_93", "ascend910_93")])
def test_a_refusal_names_the_target_whose_limit_it_is(target, named):
    _, outcome = fused(norm, X, W.detach(), target=target, disable={"npu_rms_norm"})
    assert outcome.refusals
    assert max(each.target for each in outcome.refusals) == named


def test_a_refusal_for_a_wrong_shape_names_no_target():
    outcome = fuse(traced(norm, X, W.detach()[0]), Options(target="ascend910_93", lower="eager"), (WrongShape(),))
    assert [each.target for each in outcome.refusals] == [""]


@pytest.mark.parametrize(
    ("shape", "strides", "ordered"),
    [
        ((4, 1, 3), (6, 100, 2), True), ((4, 3, 5), (15, 0, 1), True), ((4, 3, 5), (5, 20, 1), False),
        ((4, 3, 5), (30, 10, 1), True),
    ],
)  # fmt: skip
def test_dims_of_one_entry_or_one_place_are_in_any_order(shape, strides, ordered):
    assert is_in_order(torch.empty_strided(shape, strides)) is ordered


@dataclass(frozen=True)
class Doubled(Rule):
    """An exponential, by an operator that torchair does not take, or by another."""

    ran: ClassVar[Counter[str]] = Counter()

    @pattern
    def written(self, p, x=tensor("*B D"), factor=scalar()):
        """A scaled exponential."""
        return p.scale(p.op("exp", x), factor)

    @lowering
    @calls("npu::npu_mla_prolog_v2.functional")
    def named(self, x: torch.Tensor):
        """By the one that is named."""
        self.ran["named"] += 1
        return torch.ops.aten.exp2(x).neg()


@dataclass(frozen=True)
class DoubledTwice(Doubled):
    """The same, with another way."""

    @lowering
    def other(self, x: torch.Tensor):
        """By none that is named."""
        self.ran["other"] += 1
        return torch.ops.aten.exp2(x)


@pytest.mark.parametrize(
    ("rule", "target", "lowers", "ran"),
    [
        (DoubledTwice(), "ascend910_93", "torchair", {"other"}),
        (DoubledTwice(), "ascend910_93", "eager", {"named", "other"}),
        (DoubledTwice(), "host", "eager", {"named", "other"}),
        (Doubled(), "ascend910_93", "torchair", {"named"}),
    ],
)
def test_a_lowering_whose_operator_cannot_run_is_recorded_only_where_no_other_is_left(rule, target, lowers, ran):
    Doubled.ran.clear()
    options = Options(target=target, lower="eager", plan_lower=lowers, plan_cache="off")
    fuse(traced(lambda x: torch.exp(x) * 2, X), options, (rule,))
    assert set(Doubled.ran) == ran


@dataclass(frozen=True)
class AtOnce(Rule):
    """A doubled exponential by one kernel, whose result may be of another dtype; then in other ways."""

    wide: ClassVar[bool] = False
    ran: ClassVar[list[str]] = []

    @pattern
    def written(self, p, x=tensor("*B D"), factor=scalar()):
        """A scaled exponential."""
        return p.scale(p.op("exp", x), factor)

    @lowering
    def first(self, x: torch.Tensor):
        """By one kernel."""
        self.ran.append("first")
        return torch.ops.aten.add(x, x.double() if self.wide else x)

    @lowering
    def second(self, x: torch.Tensor):
        """By another."""
        self.ran.append("second")
        return torch.ops.aten.exp2(x)

    @lowering
    def third(self, x: torch.Tensor):
        """By one more."""
        self.ran.append("third")
        return torch.ops.aten.exp2(x)


@dataclass(frozen=True)
class WideAtOnce(AtOnce):
    """The same, of which the first way gives another dtype."""

    wide: ClassVar[bool] = True


@pytest.mark.parametrize(("rule", "ran"), [(AtOnce(), ["first"]), (WideAtOnce(), ["first", "second"])])
def test_nothing_is_recorded_behind_one_kernel_that_gives_what_it_replaces(rule, ran):
    AtOnce.ran.clear()
    fuse(traced(lambda x: torch.exp(x) * 2, X), Options(lower="eager", plan_cache="off"), (rule,))
    assert AtOnce.ran == ran


@pytest.mark.parametrize("before", [(), (None,)])
def test_what_indices_take_may_lie_as_they_do(before):
    build = Build()
    x, places = build.input(4, 4), build.input(4, 2, dtype=torch.int64)
    take = torch.ops.aten.index.Tensor
    assert not follows_index_strides(build(take, x, [*before, places]))
    assert follows_index_strides(build(take, x, [*before, build(torch.ops.aten.t.default, places)]))


@pytest.mark.rotates(6)
def test_what_a_search_knows_goes_with_it(monkeypatch: pytest.MonkeyPatch):
    """At once, without garbage collection: a report holds no graph, and nothing that is left holds itself."""
    planners: list[weakref.ref[Planner]] = []

    class Watched(Planner):
        def __init__(self, *args: Any, **named: Any) -> None:
            super().__init__(*args, **named)
            planners.append(weakref.ref(self))

    monkeypatch.setattr(pipeline, "Planner", Watched)

    def form(x, w):
        y = x.transpose(0, 1).contiguous().transpose(0, 1)
        return norm(x, w) + norm(y, w), x.exp() * 3

    gc.collect()
    gc.disable()
    try:
        gm = traced(form, X, W)
        report = fuse(gm, Options(target="ascend910_93"), [*installed().rules, DoubleExp()])
        assert report.chosen
        assert "not 2" in "".join(each.reason for each in report.refusals)
        assert [each() for each in planners] == [None]
    finally:
        gc.enable()
