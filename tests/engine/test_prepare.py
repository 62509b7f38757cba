"""The stage: what leaves the graph, what stays in it, and what that costs."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import conv1d, silu
from torch.testing._internal.two_tensor import TwoTensor

import fusion
import fusion.runtime.joined_parameters
from fusion import Library, Options
from fusion.errors import VerificationError
from fusion.facts import Facts
from fusion.frontend import hf
from fusion.graph.parameter_only import derived, marks, parameter_inputs
from fusion.pipeline import fuse_graph
from fusion.stages import prepare as stage
from fusion.stages.prepare import adjacent_parameters as adjacent
from fusion.stages.verify import contract, verify
from fusion.testing import capture

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
    outcome = fuse_graph(gm.graph, fusion.frontend.library.installed(), Options(target="host", lower="eager"), known)
    (each,) = outcome.prepared
    assert (each.sources, each.bytes) == ((), 3 * 4)
    assert inputs_of(gm) == ["arg0_1", each.name]


def test_nothing_is_prepared_for_whom_it_cannot_be_handed():
    captured = capture(lambda x: F.rms_norm(x, (3,)), (X,))
    gm = captured.graph
    outcome = fuse_graph(gm.graph, fusion.frontend.library.installed(), Options(target="host", lower="eager"), Facts())
    (chosen,) = outcome.chosen
    assert chosen.launches == -1  # the gain of ones is made at every call
    assert not outcome.prepared
    assert inputs_of(gm) == ["arg0_1"]


def test_what_parameters_alone_give_becomes_the_last_input():
    gm, outcome = prepared(gated, X, A, B)
    (each,) = outcome.prepared
    assert inputs_of(gm) == ["arg0_1", "arg1_1", "arg2_1", each.name]
    assert len(each.sources) == 2
    assert "aten.cat.default" not in names(gm)
    assert names(each.module) == ["aten.cat.default"]


def test_views_of_it_cost_nothing_and_stay():
    gm, outcome = prepared(gated, X, A, B, rule=TurnedGate())
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


def test_a_weight_that_the_model_lays_out_anew_at_every_call_is_prepared():
    def turned(x, a, b, w):
        return gated(x, a, b), x @ w.transpose(0, 1).contiguous()

    gm, outcome = prepared(turned, X, A, B, nn.Parameter(numbers(5, X.shape[-1], seed=5)))
    assert [names(each.module) for each in outcome.prepared][-1] == ["aten.transpose.int", "aten.clone.default"]
    assert "aten.clone.default" not in names(gm)


def test_a_copy_of_a_weight_that_the_caller_gets_stays():
    gm, _ = prepared(lambda x, a, b: (gated(x, a, b), a.transpose(0, 1).contiguous()), X, A, B)
    assert "aten.clone.default" in names(gm)


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


def test_parameters_are_known_by_their_place_among_the_inputs_of_dynamo():
    captured = capture(gated, (X, A, B))
    source, inputs = captured.graph.graph, captured.inputs
    names_of = {
        name for name, each in zip(inputs_of(captured.graph), inputs, strict=True) if isinstance(each, nn.Parameter)
    }
    assert parameter_inputs(source, marks(inputs)) == names_of
    assert parameter_inputs(source, marks(inputs[:2])) == names_of & set(inputs_of(captured.graph)[:2])
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
    ("shapes", "why"),
    [(((32, 16, 1), (32, 16, 1)), ""), (((3, 5, 1), (3, 5, 1)), adjacent.UNEVEN.format(60, 64))],
    ids=["aligned", "not aligned"],
)
def test_parameters_become_views_of_their_concatenation(shapes, why):
    x, a, b = numbers(2, shapes[0][1], 3), *(nn.Parameter(numbers(*shape, seed=1)) for shape in shapes)
    _, outcome = prepared(gated, x, a, b)
    (each,) = outcome.prepared
    assert (each.copied, each.joined) == (why, not why)
    assert each.bytes == (2 * a.numel() * 4 if why else 0)
    _, other = prepared(lambda x, a, b: gated(x, a * 2, b), x, a, b)
    assert other.prepared[0].copied == adjacent.COMPUTED
    _, kept = prepared(gated, x, a, b, prepack="copy")
    assert (kept.prepared[0].copied, kept.prepared[0].bytes) == (adjacent.BY_OPTION, 2 * a.numel() * 4)


def test_a_parameter_becomes_a_view_of_one_join():
    """The second join of one Parameter with others is a copy; the same join again is the same input."""

    def thrice(x, a, b, c):
        return gated(x, a, b), gated(x.sin(), b, c), gated(x.cos(), a, b)

    gm, outcome = prepared(thrice, X, A, B, C)
    first, second = outcome.prepared
    assert (first.copied, second.copied) == ("", adjacent.TAKEN)
    assert first.key != second.key
    assert inputs_of(gm)[-2:] == [first.name, second.name]


def test_a_cast_to_the_format_of_a_chip_is_a_step_that_other_machines_skip():
    gm, outcome = prepared(gated, X, A, B, rule=FractalGate())
    (each,) = outcome.prepared
    assert "npu.npu_format_cast.default" in names(each.module)
    assert "npu.npu_format_cast.default" not in names(gm)
    assert torch.equal(each.module(A, B), torch.cat([A, B]))
    assert each.copied == adjacent.IN_BLOCKS


def explain(model, rule=CountedGate(), **options):
    return fusion.explain(model, X, options={"target": "host", "lower": "eager", **options}, rules=(rule,))


def test_explain_tells_the_bytes_and_runs_nothing():
    RAN.clear()
    report = explain(Layers(Gate(), Gate(factor=3.0)))
    weights = 4 * 32 * 16 * 4
    assert (report.prepared_bytes, report.parameter_bytes) == (weights, weights)
    assert [part.prepared_bytes for part in report.parts] == [report.prepared_bytes]
    assert "0.01 MiB beside the Parameters, 100.00 % of these" in str(report)
    assert '"bytes": 8192' in report.to_json()
    assert not RAN
    shared = explain(Layers(Gate(), Gate(factor=3.0)), JoinedGate())
    assert (shared.prepared_bytes, shared.copies) == (weights // 2, {adjacent.COMPUTED: (1, weights // 2)})
    assert "in place of the Parameters" in str(shared)
    assert f"a copy: {adjacent.COMPUTED}" in " ".join(str(shared).split())
    assert "fusion.refresh" in str(shared)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda model: nn.Parameter(model.gate.weight.data), fusion.runtime.joined_parameters.SHARED),
        (
            lambda model: setattr(model.gate.weight, "data", numbers(64, 16, 1)[:32]),
            fusion.runtime.joined_parameters.SLICE,
        ),
        (lambda model: model.gate.weight.share_memory_(), fusion.runtime.joined_parameters.PROCESSES),
    ],
)
def test_explain_foresees_which_parameters_stay_where_they_are(spoil, why):
    model = Gate()
    assert explain(model, JoinedGate()).prepared_bytes == 0
    other = spoil(model)
    report = explain(model, JoinedGate())
    assert report.copies == {why: (1, 32 * 16 * 4)}, "the other Parameter becomes a view"
    del other


def test_what_a_guest_and_a_wrapped_parameter_lose_is_told():
    report = explain(Gate(), JoinedGate())
    assert report.unprepared == []
    (part,) = report.parts
    assert "FusionPass is a guest" in replace(part, facts=Facts()).unprepared
    model = Gate()
    model.up.weight = nn.Parameter(TwoTensor(model.up.weight.data, model.up.weight.data), requires_grad=False)
    told = explain(model, JoinedGate())
    assert told.prepared == []
    assert told.unprepared == [
        "up.weight: it wraps other tensors (DTensor, a quantised subclass), which are no Parameters"
    ]
    assert "not prepared: up.weight" in str(told)
    assert "up.weight" in told.to_json()


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


def transposed(build, weight):
    return build(aten.t.default, weight)


def transposed_back(build, weight):
    return build(aten.t.default, build(aten.t.default, weight))


def in_heads(build, weight):
    return build(aten.view.default, weight, [2, 16, 16])


def reshaped_in_another_order(build, weight):
    """A reshape that has to copy, and another back to the shape of the Parameter."""
    return build(aten.reshape.default, build(aten.reshape.default, build(aten.t.default, weight), [-1]), [32, 16])


def half(build, weight):
    return build.input(32, 16, dtype=torch.float16)


def transposed_square(build, weight):
    return build(aten.t.default, build.input(16, 16))


def columns_first(build, weight):
    """A Parameter that is contiguous column by column."""
    made = build.input(16, 16)
    made.meta["val"] = made.meta["val"].new_empty_strided((16, 16), (1, 16))
    return made


def columns_first_transposed(build, weight):
    return build(aten.t.default, columns_first(build, weight))


def row(build, weight):
    return build(aten.view.default, weight, [1, 512])


def interleaved(build):
    """Two stacks, joined matrix by matrix."""
    stacks = [build(aten.stack.default, [build.input(8, 16) for _ in range(3)]) for _ in range(2)]
    return build(aten.cat.default, stacks, 1)


def with_an_empty_line(build):
    return build(aten.cat.default, [build.input(0), build.input(8, 16)], 1)


def cast(build):
    return build(aten.cat.default, [build(aten._to_copy.default, build.input(8, 16), dtype=torch.float16)] * 2)


def twice(build):
    return build(aten.cat.default, [build.input(8, 16)] * 2)


def transposed_copy(build):
    return build(aten.clone.default, build(aten.t.default, build.input(8, 16)), memory_format=torch.contiguous_format)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (joined(itself, itself), ""), (joined(itself, transposed_back), ""), (joined(itself, itself, dim=()), ""),
        (joined(itself, itself, dim=(-2,)), ""), (joined(itself, itself, dim=(1,)), adjacent.REORDERED),
        (joined(itself, itself, dim=(-1,)), adjacent.REORDERED), (joined(part, part), adjacent.PARTS),
        (joined(transposed, transposed), adjacent.REORDERED),
        (joined(itself, half), adjacent.CAST.format(torch.float32)),
        (joined(itself, transposed_square), adjacent.REORDERED), (joined(itself, columns_first), adjacent.REORDERED),
        (joined(itself, columns_first_transposed), adjacent.REORDERED), (joined(in_heads, in_heads), ""),
        (joined(itself, itself, target=aten.stack.default), ""),
        (joined(itself, itself, target=aten.stack.default, dim=(1,)), adjacent.REORDERED), (interleaved, ""),
        (joined(row, row, target=aten.cat.default, dim=(1,)), ""), (with_an_empty_line, adjacent.REORDERED),
        (joined(itself, reshaped_in_another_order), adjacent.REORDERED), (cast, adjacent.CAST.format(torch.float16)),
        (twice, adjacent.REORDERED), (transposed_copy, adjacent.REORDERED),
    ],
)  # fmt: skip
def test_parameters_become_views_of_what_lays_them_one_behind_the_other(form, why):
    node = form(Build())
    assert adjacent.why_copied(node, stage.closure_of(node), adjacent.parts(node)) == why


def test_nothing_is_prepared_where_a_graph_takes_nothing():
    build = Build()
    with build._mode:
        held = torch.ones(4)
    node = build.graph.create_node("get_attr", "held")
    node.meta["val"] = held
    build.graph.output((build(torch.ops.aten.cos.default, node),))
    assert stage.prepare(build.graph, Facts(extensible=True), "share") == ()


class Int8(nn.Module):
    """A layer in W8A8 whose weight is a Parameter."""

    def __init__(self):
        super().__init__()
        weight = torch.randint(-128, 128, (96, 64), generator=torch.Generator().manual_seed(0))
        self.weight = nn.Parameter(weight.to(torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(96) + 0.5, requires_grad=False)

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
        rows = torch.round(x / scale).to(torch.int8)
        return (torch._int_mm(rows, self.weight.t()).float() * scale * self.scale).to(torch.bfloat16)


@pytest.mark.parametrize("target", ["host", "ascend910_93"])
@pytest.mark.parametrize(("prepack", "why"), [("share", {}), ("copy", {adjacent.BY_OPTION: (1, 96 * 64)})])
@pytest.mark.rotates(3)
def test_a_weight_is_read_as_it_is_stored_where_its_operator_can(target, prepack, why):
    model, x = Int8(), numbers(32, 64)
    options = {"target": target, "lower": "eager", "prepack": prepack}
    report = fusion.explain(model, x, options=options)
    assert report.ops["npu::npu_quant_matmul"] == 1
    assert report.copies == why
    run = torch.compile(model, backend="cann_fusion", options=options)
    with torch.no_grad():
        close(run(x).float(), model(x).float(), 1e-2)
        model.weight.data.neg_()
        close(run(x).float(), model(x).float(), 1e-2)


@pytest.mark.rotates(12)
@pytest.mark.parametrize(
    ("target", "copied"),
    [
        ("host", {adjacent.PARTS}),
        ("ascend910_93", {adjacent.PARTS, adjacent.IN_BLOCKS}),
    ],
)
def test_latent_attention_holds_what_its_operators_cannot_read_as_stored(target, copied):
    call = hf.build(hf.Request("deepseek_v3", mode="decode", layers=1))
    report = fusion.explain(call.model, **call.kwargs, options={"target": target, "lower": "eager"})
    assert report.ops["npu::npu_mla_prolog_v3"] == 1
    assert report.copies.keys() - {adjacent.CONSTANT} == copied
    assert report.prepared_bytes < (0.02 if target == "host" else 0.12) * report.parameter_bytes


def test_parameters_are_named_in_the_order_of_their_memory():
    node = interleaved(Build())
    given = node.graph.find_nodes(op="placeholder")
    assert adjacent.parts(node) == [given[number] for number in (0, 3, 1, 4, 2, 5)]


class Experts(nn.Module):
    """Experts as modules, each token to two of them."""

    def __init__(self, count=4, width=64, inner=32):
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.gates, self.ups = (
            nn.ModuleList(nn.Linear(width, inner, bias=False) for _ in range(count)) for _ in range(2)
        )
        self.downs = nn.ModuleList(nn.Linear(inner, width, bias=False) for _ in range(count))

    def forward(self, x):
        weights, chosen = torch.topk(F.softmax(self.router(x).float(), -1), 2, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        y = torch.zeros_like(x)
        for number, (gate, up, down) in enumerate(zip(self.gates, self.ups, self.downs, strict=True)):
            y = y + down(F.silu(gate(x)) * up(x)) * ((chosen == number) * weights).sum(-1, keepdim=True)
        return y


@pytest.mark.parametrize("lower", ["eager", pytest.param("inductor", marks=pytest.mark.rotates)])
def test_experts_that_are_modules_are_held_once(lower):
    """The operator reads [E, H, 2I]: a transposed view of [E, 2I, H], where gate and up of an expert are neighbours."""
    torch.manual_seed(0)
    model, x = Experts(), torch.randn(16, 64)
    report = fusion.explain(model, x, options={"target": "ascend910_93"})
    assert report.ops["npu::npu_grouped_matmul"] == 2
    assert report.prepared_bytes == 0
    run = torch.compile(model, backend="cann_fusion", options={"lower": lower})
    with torch.no_grad():
        close(run(x), model(x))
        for each in model.parameters():
            each.data += 0.01
        close(run(x), model(x))
    gate, up = model.gates[1].weight, model.ups[1].weight
    assert up.data_ptr() == gate.data_ptr() + gate.numel() * 4
