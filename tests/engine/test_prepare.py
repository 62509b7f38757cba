"""The stage: what leaves the graph, what stays in it, and what that costs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import conv1d, silu

import fusion
from fusion import Library, Options
from fusion.errors import VerificationError
from fusion.facts import Facts
from fusion.pipeline import fuse_graph
from fusion.stages.prepare import _is_join, prepare
from fusion.stages.verify import contract, verify
from fusion.testing import capture
from fusion.weights import derived, marks, parameter_inputs

from .graphs import HOST, Build, names, numbers, traced
from .prepared_rules import RAN, CountedGate, FractalGate, Gate, JoinedGate, Layers, TurnedGate, close
from .rules import DoubleExp

X = numbers(2, 16, 3)
A, B, C, D = (nn.Parameter(numbers(32, 16, 1, seed=seed)) for seed in range(1, 5))


def gated(x, a, b):
    return silu(conv1d(x, a)) * conv1d(x, b)


def prepared(function, *args, rule=JoinedGate(), **options):
    """The fused graph of `function`, which gives the same with what is prepared from the arguments; and the outcome."""
    captured = capture(function, args)
    gm, inputs = captured.graph, captured.inputs
    original = copy.deepcopy(gm)
    facts = Facts(parameter_inputs(gm.graph, marks(inputs)))
    outcome = fuse_graph(gm.graph, Library((rule,)), Options.of({"target": "host", "lower": "eager", **options}), facts)
    gm.recompile()
    named = dict(zip(inputs_of(original), inputs, strict=True))
    with torch.no_grad():
        further = [each.module(*[named[name] for name in each.sources]) for each in outcome.prepared]
        if rule != DoubleExp():
            for have, want in zip(gm(*inputs, *further), original(*inputs), strict=True):
                close(have, want)
    return gm, outcome


def inputs_of(gm):
    return [node.name for node in gm.graph.find_nodes(op="placeholder")]


def test_constants_are_prepared_without_any_parameter():
    captured = capture(lambda x: F.rms_norm(x + 1, (3,)) + F.rms_norm(x - 1, (3,)), (X,))
    gm, known = captured.graph, captured.facts
    outcome = fuse_graph(gm.graph, fusion.library.installed(), Options(target="host", lower="eager"), known)
    (each,) = outcome.prepared
    assert (each.sources, each.bytes) == ((), 3 * 4)
    assert inputs_of(gm) == ["arg0_1", each.name]


def test_nothing_is_prepared_for_whom_it_cannot_be_handed():
    captured = capture(lambda x: F.rms_norm(x, (3,)), (X,))
    gm = captured.graph
    outcome = fuse_graph(gm.graph, fusion.library.installed(), Options(target="host", lower="eager"), Facts())
    (chosen,) = outcome.chosen
    assert chosen.launches == -1  # the gain of ones is made at every call
    assert not outcome.prepared
    assert inputs_of(gm) == ["arg0_1"]


def test_what_parameters_alone_give_becomes_the_last_input():
    gm, outcome = prepared(gated, X, A, B)
    (each,) = outcome.prepared
    assert inputs_of(gm) == ["arg0_1", "arg1_1", "arg2_1", each.name]
    assert len(each.sources) == 2
    assert each.bytes == 2 * 32 * 16 * 4
    assert "aten.cat.default" not in names(gm)
    assert names(each.module) == ["aten.cat.default"]


def test_views_of_it_cost_nothing_and_stay():
    gm, outcome = prepared(gated, X, A, B, rule=TurnedGate(), prepack="replace")
    assert names(gm)[:2] == ["aten.permute.default"] * 2
    (each,) = outcome.prepared
    assert names(each.module) == ["aten.permute.default", "aten.permute.default", "aten.cat.default"]
    assert each.joined, "what is turned there and back is the Parameter itself"


def test_weights_that_are_not_known_as_parameters_cost_at_every_call():
    for weights in ((A.detach(), B.detach()), (A, B.detach())):
        gm, outcome = prepared(gated, X, *weights)
        assert not outcome.chosen
        assert not outcome.prepared
        assert len(inputs_of(gm)) == 3
    _, known = prepared(gated, X, A, B)
    (candidate,) = known.chosen
    assert candidate.launches == 1


def test_the_guest_of_another_compiler_keeps_the_steps_in_the_graph():
    gm = traced(gated, numbers(1, 8, 4096), *(nn.Parameter(numbers(16, 8, 1)) for _ in range(2)))
    fusion.FusionPass(HOST, (JoinedGate(),))(gm)
    assert len(inputs_of(gm)) == 3
    assert names(gm)[0] == "aten.cat.default"


def test_work_of_the_users_on_a_parameter_goes_along_if_nobody_else_needs_it():
    gm, outcome = prepared(lambda x, a, b: gated(x, a * 2, b), X, A, B)
    assert names(outcome.prepared[0].module) == ["aten.mul.Tensor", "aten.cat.default"]
    assert names(gm).count("aten.mul.Tensor") == 1, "that of the gate itself"
    gm, outcome = prepared(lambda x, a, b: (gated(x, a * 2, b), a * 2 + x.sum()), X, A, B)
    assert names(outcome.prepared[0].module) == ["aten.mul.Tensor", "aten.cat.default"]
    assert names(gm).count("aten.mul.Tensor") == 2, "the user's own node is the user's"


def test_equal_preparations_are_one():
    def twice(x, a, b, y):
        return gated(x, a * 2, b), gated(y.sin(), a * 2, b)

    gm, outcome = prepared(twice, X, A, B, X + 1)
    assert len(outcome.chosen) == 2
    assert len(outcome.prepared) == 1
    assert len(inputs_of(gm)) == 5


def test_layers_alike_share_the_code_that_prepares_them():
    _, outcome = prepared(lambda x, a, b, c, d: (gated(x, a, b), gated(x, c, d)), X, A, B, C, D)
    first, second = outcome.prepared
    assert first.key == second.key
    assert first.sources != second.sources


def test_memory_that_the_caller_gets_is_never_shared():
    def scaled(x, w):
        return torch.exp(w) * 2, x + 1

    _, outcome = prepared(scaled, X, A, rule=DoubleExp())
    assert len(outcome.chosen) == 1
    assert not outcome.prepared
    _, outcome = prepared(lambda x, w: (scaled(x, w)[0].mT, x), X, A, rule=DoubleExp())
    assert not outcome.prepared, "a view of it is the same memory"
    _, outcome = prepared(lambda x, w: scaled(x, w)[0].mT.sin(), X, A, rule=DoubleExp())
    assert len(outcome.prepared) == 1


def test_a_constant_that_a_rewrite_needs_is_made_once_for_all_layers():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(64, 64, bias=False)

        def forward(self, x):
            for _ in range(2):
                x = F.scaled_dot_product_attention(self.project(x), x, x, is_causal=True)
            return x

    report = fusion.explain(Block(), numbers(2, 4, 8, 64), options={"target": "host", "lower": "eager"})
    (graph,) = report.graphs
    (triangle,) = report.prepared
    assert not triangle.sources
    assert triangle.bytes == 2048 * 2048
    assert not [name for name in names(graph) if "triu" in name or "ones" in name]
    assert torch.equal(triangle.module(), torch.ones(2048, 2048, dtype=torch.bool).triu(1))


def test_random_numbers_writes_and_other_inputs_are_not_of_parameters_alone():
    def mixed(x, w, v):
        w.add_(1)
        return w.sin(), v.cos(), torch.rand_like(v) + v.tan(), x + v, v.exp() * torch.ones(3), torch.ones(3)

    captured = capture(mixed, (X, numbers(2, 16, 3), nn.Parameter(X + 1)))
    weights = [name for name, each in zip(inputs_of(captured.graph), captured.inputs, strict=True) if each is not X]
    found = derived(captured.graph.graph, weights)
    assert [str(node.target) for node in found if node.op == "placeholder"] == [
        name
        for name, each in zip(inputs_of(captured.graph), captured.inputs, strict=True)
        if isinstance(each, nn.Parameter)
    ]
    assert {node.name for node in found if node.op != "placeholder"} == {"cos", "tan", "exp", "mul"}


def test_inputs_are_told_by_their_place_or_not_at_all():
    captured = capture(gated, (X, A, B))
    source, inputs = captured.graph.graph, captured.inputs
    names_of = {
        name for name, each in zip(inputs_of(captured.graph), inputs, strict=True) if isinstance(each, nn.Parameter)
    }
    assert parameter_inputs(source, marks(inputs)) == names_of
    assert parameter_inputs(source, marks(inputs[:2])) == set()
    assert parameter_inputs(source, marks([nn.Parameter(numbers(5)) for _ in inputs])) == set(), "other shapes"
    written = capture(lambda w, x: w.add_(x), (nn.Parameter(numbers(4)), numbers(4)))
    assert parameter_inputs(written.graph.graph, marks(written.inputs)) == set()


def test_verification_accepts_exactly_the_inputs_that_were_added():
    gm = traced(gated, X, A, B)
    before = contract(gm.graph)
    with gm.graph.inserting_after(gm.graph.find_nodes(op="placeholder")[-1]):
        gm.graph.placeholder("further")
    verify(gm.graph, before, [], ["further"])
    with pytest.raises(VerificationError, match="further"):
        verify(gm.graph, before, [])
    with pytest.raises(VerificationError, match="another"):
        verify(gm.graph, before, [], ["further", "another"])


@pytest.mark.parametrize(
    ("shapes", "joined"),
    [(((32, 16, 1), (32, 16, 1)), True), (((3, 5, 1), (3, 5, 1)), False)],
    ids=["aligned", "not aligned"],
)
def test_a_concatenation_of_parameters_can_take_their_place(shapes, joined):
    x, a, b = numbers(2, shapes[0][1], 3), *(nn.Parameter(numbers(*shape, seed=1)) for shape in shapes)
    _, outcome = prepared(gated, x, a, b, prepack="replace")
    (each,) = outcome.prepared
    assert each.joined is joined
    assert (each.bytes == 0) is joined
    _, other = prepared(lambda x, a, b: gated(x, a * 2, b), x, a, b, prepack="replace")
    assert not other.prepared[0].joined, "what was computed is not a view of anything"


def test_a_cast_to_the_format_of_a_chip_is_a_step_that_other_machines_skip():
    gm, outcome = prepared(gated, X, A, B, rule=FractalGate())
    (each,) = outcome.prepared
    assert "npu.npu_format_cast.default" in names(each.module)
    assert "npu.npu_format_cast.default" not in names(gm)
    assert torch.equal(each.module(A, B), torch.cat([A, B]))


def explain(model, rule=CountedGate(), **options):
    return fusion.explain(model, X, options={"target": "host", "lower": "eager", **options}, rules=(rule,))


def test_explain_tells_the_bytes_and_runs_nothing():
    RAN.clear()
    report = explain(Layers(Gate(), Gate(factor=3.0)))
    assert report.prepared_bytes == 2 * (2 * 32 * 16 * 4)
    assert [part.prepared_bytes for part in report.parts] == [report.prepared_bytes]
    assert "8,192 bytes" in str(report)
    assert '"bytes": 8192' in report.to_json()
    assert not RAN
    replaced = explain(Layers(Gate(), Gate(factor=3.0)), JoinedGate(), prepack="replace")
    assert replaced.prepared_bytes == 2 * 32 * 16 * 4
    assert "in place of them" in str(replaced)
    assert "a copy" in str(replaced)


def test_a_buffer_is_not_a_parameter():
    class Buffers(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", numbers(32, 16, 1))
            self.register_buffer("b", numbers(32, 16, 1, seed=1))

        def forward(self, x):
            return gated(x, self.a, self.b)

    assert explain(Buffers()).prepared == []
    assert len(explain(Gate()).prepared) == 1


aten = torch.ops.aten


def joined(*pieces, target=aten.cat.default, dim=(0,)):
    """A call that joins what is made of Parameters."""

    def made(build):
        weights = [build.input(32, 16), build.input(32, 16)]
        return build(target, [piece(build, weight) for piece, weight in zip(pieces, weights, strict=True)], *dim)

    return made


def itself(build, weight):
    return weight


def part(build, weight):
    return build(aten.slice.Tensor, weight, 0, 0, 16)


def turned(build, weight):
    return build(aten.t.default, weight)


def turned_back(build, weight):
    return build(aten.t.default, build(aten.t.default, weight))


def narrow(build, weight):
    return build.input(32, 16, dtype=torch.float16)


def turned_square(build, weight):
    return build(aten.t.default, build.input(16, 16))


def lying_otherwise(build, weight):
    """A Parameter that lies column by column."""
    made = build.input(16, 16)
    made.meta["val"] = made.meta["val"].new_empty_strided((16, 16), (1, 16))
    return made


def lying_otherwise_and_turned(build, weight):
    return build(aten.t.default, lying_otherwise(build, weight))


@pytest.mark.parametrize(
    ("form", "is_join"),
    [
        (joined(itself, itself), True), (joined(itself, turned_back), True), (joined(itself, itself, dim=()), True),
        (joined(itself, itself, dim=(-2,)), True), (joined(itself, itself, dim=(1,)), False),
        (joined(itself, itself, dim=(-1,)), False), (joined(part, part), False), (joined(turned, turned), False),
        (joined(itself, narrow), False), (joined(itself, turned_square), False),
        (joined(itself, lying_otherwise), False), (joined(itself, lying_otherwise_and_turned), False),
        (joined(itself, itself, target=aten.stack.default), False),
    ],
)  # fmt: skip
def test_parameters_become_views_of_their_join_if_they_lie_in_it_as_they_are(form, is_join):
    assert _is_join(form(Build())) == is_join


def test_nothing_is_prepared_where_a_graph_takes_nothing():
    build = Build()
    with build._mode:
        held = torch.ones(4)
    node = build.graph.create_node("get_attr", "held")
    node.meta["val"] = held
    build.graph.output((build(torch.ops.aten.cos.default, node),))
    assert prepare(build.graph, Facts(extensible=True), "copy") == ()
