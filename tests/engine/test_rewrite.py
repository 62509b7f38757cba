"""Rewriting: order, nodes shared and made once, strides that change below a view, and the user's own nodes kept."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

from fusion import Library
from fusion.graph.aliasing import memory_of, outputs
from fusion.graph.origin import location, module_path
from fusion.planning.fake_execution import Fakes
from fusion.report.trace import emitted
from fusion.stages.canonicalise import canonicalise
from fusion.stages.rewrite import is_pure, rewrite
from fusion.testing import capture, emits_valid_calls, trial_of

from .graphs import HOST, Build, fuse, fused, names, norm, numbers, replay, rotate, traced

X, Y, W = numbers(2, 3, 64), numbers(2, 3, 64, seed=1), numbers(64, seed=2)
Q, K = numbers(2, 4, 3, 64, seed=3), numbers(2, 2, 3, 64, seed=4)
COS, SIN = numbers(3, 64, seed=5), numbers(3, 64, seed=6)


def same(function, *args, dtype=torch.float32):
    """The fused graph of `function`, whose results equal those of the captured one."""
    args = [each.to(dtype) for each in args]
    gm = traced(function, *args)
    original = copy.deepcopy(gm)
    inputs = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
    outcome = fuse(gm)
    assert outcome.chosen
    real = [numbers(*each.shape, seed=n, dtype=each.dtype) for n, each in enumerate(inputs)]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for have, want in zip(replay(gm, *real), replay(original, *real), strict=True):
        torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)
    return gm, original


def test_two_results_take_the_place_of_their_nodes_and_later_users_follow():
    def form(x, y, w):
        s = x + y
        early = s.abs()
        return norm(s, w) + 1, early, s

    gm, _ = same(form, X, Y, W)
    assert "npu.npu_add_rms_norm.default" in names(gm)
    gm.graph.lint()


def test_nodes_outside_the_cover_are_the_same_objects_in_the_same_order():
    gm = traced(lambda x, w: (norm(x.abs(), w).sin().cos(), x.tanh()), X, W)
    before = {node: (node.target, node.args) for node in gm.graph.nodes}
    order = list(gm.graph.nodes)
    outcome = fuse(gm)
    gone = {node for each in outcome.chosen for node in each.dying}
    kept = [node for node in gm.graph.nodes if node in before]
    assert kept == [node for node in order if node not in gone]
    made = {node for node in gm.graph.nodes if "fusion" in node.meta}
    for node in kept:
        if not made & set(node.all_input_nodes):
            assert (node.target, node.args) == before[node]


def test_what_two_rewrites_need_is_built_once():
    def form(q, k, cos, sin):
        cos, sin = cos[..., :32], sin[..., :32]
        turn = lambda x: torch.cat((x[..., :32] * cos - x[..., 32:] * sin, x[..., 32:] * cos + x[..., :32] * sin), -1)  # noqa: E731
        return turn(q), turn(k.sin())

    gm, _ = same(form, Q, K, COS, SIN)
    built = [node for node in gm.graph.nodes if "fusion" in node.meta and node.target is torch.ops.aten.cat.default]
    assert len(built) == 2, "one wide table for the cosines and one for the sines"
    calls = [(node.target, str(node.args), str(node.kwargs)) for node in gm.graph.nodes if "fusion" in node.meta]
    assert len(set(calls)) == len(calls)


def test_equal_calls_that_the_user_writes_twice_are_one_fused_call():
    gm, _ = same(lambda x, w: (norm(x, w), norm(x, w).sin()), X, W)
    assert names(gm).count("npu.npu_rms_norm.default") == 1


@pytest.mark.parametrize("shape", [(3, 3, 64), (3, 2, 3, 64)])
def test_what_a_result_repeats_is_repeated_in_memory_of_its_own(shape):
    """The second norm is the first one: what shows it is copied, once for all that it repeats."""
    gm, original = same(lambda x, w: (norm(x, w), norm(x, w).expand(*shape)), X[0], W)
    (first, repeated), (_, before) = (outputs(each.graph) for each in (gm, original))
    assert repeated.meta["val"].stride() == before.meta["val"].stride()
    assert memory_of(repeated) is not memory_of(first)
    assert memory_of(repeated).meta["val"].numel() == X[0].numel()


def test_a_value_inside_that_is_read_outside_stays():
    def form(x, w):
        root = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x * root * w, root

    gm, _ = same(form, X, W)
    assert "npu.npu_rms_norm.default" in names(gm)
    assert "aten.rsqrt.default" in names(gm)


def test_views_fit_the_new_strides():
    def form(x, cos, sin):
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).view(2, 4, 192)

    gm, _ = same(form, torch.as_strided(Q, (2, 4, 3, 64), (768, 64, 256, 1)), COS[:, :32], SIN[:, :32])
    assert "npu.npu_rotary_mul.default" in names(gm)
    strided = [node for node in gm.graph.nodes if str(node.target) in ("aten.view.default", "aten.reshape.default")]
    for node in strided:
        real = torch.empty_strided(*(tuple(map(int, each)) for each in (
            node.all_input_nodes[0].meta["val"].shape, node.all_input_nodes[0].meta["val"].stride())))  # fmt: skip
        node.target(real, node.args[1])


def test_results_of_one_call_lie_as_they_say_where_its_inputs_lie_otherwise_than_planned():
    """Heads that the norm of PyTorch leaves before their positions in other memory than its fused one does."""

    def turned(q, k, w, cos, sin):
        q, k = (F.rms_norm(each.transpose(1, 2), (64,), w, 1e-5) for each in (q, k))
        return F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), k)

    heads = (numbers(2, 24, 8, 64, seed=seed).bfloat16() for seed in range(2))
    tables = (numbers(24, 64, seed=seed).bfloat16() for seed in range(3, 5))
    t = trial_of(capture(turned, (*heads, numbers(64, seed=2).bfloat16(), *tables)), HOST)
    assert {each.match.rule.name for each in t.outcome.chosen} >= {"rms_norm", "rope"}
    emits_valid_calls(t)


def test_new_nodes_say_where_they_come_from():
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(W.clone())

        def forward(self, x):
            return norm(x, self.weight)

    model = torch.nn.Sequential(Layer(), Layer()).eval()
    gm, outcome = fused(model, X)
    assert len(outcome.chosen) == 2
    made = [node for node in gm.graph.nodes if emitted(node)]
    assert [module_path(node) for node in made] == ["0", "1"]
    assert all(location(node).split("/")[-1].startswith("graphs.py:") for node in made)
    roots = [each.match.node.name for each in outcome.chosen]
    made_by = {"rule": "rms_norm", "lowering": "npu", "form": "weighted"}
    assert [node.meta["fusion"] for node in made] == [{**made_by, "root": root} for root in roots]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("L['self'].layers[1]._modules['attn']", "layers.1.attn"),
        ("L['self']", ""),
        ("L['model'].layers[1]", "model.layers.1"),
        ("G['model'].layers[1]", "model.layers.1"),
        ("G['__import_my_package_dot_models'].model.layers[1]", "model.layers.1"),
    ],
)
def test_a_module_is_named_as_in_the_code_that_calls_it(path, name):
    graph = torch.fx.Graph()
    node = graph.call_function(torch.relu, (graph.placeholder("x"),))
    node.meta["nn_module_stack"] = {"": (path, torch.nn.Module)}
    assert module_path(node) == name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chain_of_fusions_reads_the_results_of_the_one_before(dtype):
    def form(x, y, w):
        for _ in range(3):
            s = x + y
            x, y = norm(s, w), s
        return x, y

    gm, _ = same(form, X, Y, W, dtype=dtype)
    assert names(gm).count("npu.npu_add_rms_norm.default") == 3


def test_two_fusions_with_two_results_each_never_wait_for_each_other():
    """Each pair alone can be one call; both at once would be a circle."""

    def form(a, b, c, s):
        first = rotate(a, c, s)
        second = rotate(b, c.cos(), s.cos())
        return first, second, rotate(second.sin(), c, s), rotate(first.sin(), c.cos(), s.cos())

    gm, _ = same(form, Q, Q + 1, COS, SIN)
    assert set(names(gm)) & {"npu.npu_apply_rotary_pos_emb.default", "npu.npu_rotary_mul.default"}
    gm.graph.lint()


def test_a_graph_without_shapes_is_refused_with_what_to_do():
    from fusion.errors import FusionError
    from fusion.options import Options
    from fusion.pipeline import fuse_graph

    graph = torch.fx.symbolic_trace(lambda x: x + 1).graph
    with pytest.raises(FusionError, match="no shape in meta"):
        fuse_graph(graph, Library(()), Options(target="host"))


@pytest.mark.parametrize(
    ("size", "ours", "write_to", "shape", "seen"),
    [
        (1, True, "", (4, 8), True),
        (3, True, "", (4, 8), False),
        (1, False, "", (4, 8), False),
        (1, True, "rows", (4, 8), False),
        (1, True, "whole", (4, 8), False),
        (1, True, "", (8, 4), False),
    ],
    ids=["the one entry", "one of three", "the user's own", "written to", "whose whole is written to", "turned"],
)
def test_what_takes_the_place_of_the_one_entry_of_a_dim_is_seen_there(size, ours, write_to, shape, seen):
    aten = torch.ops.aten
    build = Build()
    rows = made = build(aten.cos.default, build.input(*shape))
    if ours:
        made.meta["fusion"] = {}
    if shape == (8, 4):
        rows = build(aten.t.default, made)
    whole = build(aten.select_scatter.default, build.input(size, 4, 8), rows, 0, 0)
    if write_to:
        build(aten.add_.Tensor, {"rows": rows, "whole": whole}[write_to], 1)
    build.graph.output((build(aten.sin.default, whole),))
    graph = canonicalise(build.graph)
    rewrite(graph, [], Fakes(graph))
    targets = [node.target for node in build.graph.nodes]
    assert (aten.select_scatter.default not in targets, aten.unsqueeze.default in targets) == (seen, seen)


def test_what_writes_or_is_an_input_is_not_pure():
    build = Build()
    x = build.input(4)
    assert is_pure(build(torch.ops.aten.cos.default, x))
    assert not is_pure(build(torch.ops.aten.copy_.default, x, x))
    assert not is_pure(x)
