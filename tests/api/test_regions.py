"""Regions that torch compiles apart are fused where they are called, and graphs that a call runs inside them."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import fusion
from fusion import pipeline
from fusion.frontend.library import installed

from ..engine.graphs import norm, numbers

pytestmark = pytest.mark.usefixtures("fresh")

X, W = numbers(4, 64), numbers(64, seed=1)
OPTIONS = {"target": "host", "lower": "eager"}
NORM = "npu::npu_rms_norm"


def compiled(function, *args):
    with torch.no_grad():
        return torch.compile(function, backend="cann_fusion", options=OPTIONS, fullgraph=True)(*args)


def close(have, want):
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


@torch.compiler.nested_compile_region
def layer(x, w, cache):
    y = norm(x, w)
    cache.add_(y)
    return y.sin(), y + 1


def twice(x, w, cache):
    for _ in range(2):
        x, other = layer(x, w, cache)
    return x + other


@torch.compiler.nested_compile_region
def inner(x, w):
    return norm(x, w) + torch.tensor([0.5])


@torch.compiler.nested_compile_region
def outer(x, w):
    return inner(inner(x, w).cos(), w)


def nested(x, w):
    return outer(x, w) + inner(x.sin(), w)


def test_regions_are_fused_and_give_eagers_numbers_with_their_writes():
    cache, expected, seen = torch.zeros(4, 64), torch.zeros(4, 64), torch.zeros(4, 64)
    close(compiled(twice, X, W, cache), twice(X, W, expected))
    close(cache, expected)
    report = fusion.explain(twice, X, W, seen, options=OPTIONS)
    assert report.ops == {NORM: 2}
    assert not seen.any()


def test_regions_inside_regions_are_fused():
    close(compiled(nested, X, W), nested(X, W))
    report = fusion.explain(nested, X, W, options=OPTIONS)
    assert report.ops == {NORM: 3}
    assert not [each for each in report.refusals if "not entered" in each.reason]


def test_what_is_fused_or_refused_in_a_region_names_the_line():
    def damped(x):
        return norm(x, W) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.5)

    region = torch.compiler.nested_compile_region(damped)
    report = fusion.explain(lambda x: region(x), X, options=OPTIONS)
    (match,) = report.matches
    assert match.where.split("/")[-1].startswith("graphs.py:")
    refused = [each for each in report.refusals if each.rule == "rms_norm"]
    assert refused
    assert {each.where for each in refused} == {f"{__file__}:{damped.__code__.co_firstlineno + 1}"}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(64, eps=1e-6)
        self.project = nn.Linear(64, 64)

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return x + self.project(self.norm(x))


def test_layers_that_are_regions_have_their_own_weights():
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3))).requires_grad_(False)
    for number, each in enumerate(model):
        each.norm.weight.add_(number)
    close(compiled(model, X), model(X))
    report = fusion.explain(model, X, options={"target": "ascend910_93", "lower": "eager"})
    assert sum(report.ops.values()) >= 3


def of_cond(x, w):
    return torch.cond(x.sum() > 0, lambda a, b: norm(a, b), lambda a, b: norm(a.cos(), b), (norm(x, w), w))


def of_cond_inside(x, w):
    def either(a, b):
        return torch.cond(a.sum() > 0, lambda c, d: norm(c, d).sin(), lambda c, d: c * 2, (a, b))

    return torch.cond(x.sum() > 0, either, lambda a, b: a * 2, (norm(x, w), w))


def of_while(x, w):
    start = (torch.tensor(0), norm(x, w))
    return torch._higher_order_ops.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, norm(a, w) * 1.5), start)[1]


def of_map(x, w):
    return torch._higher_order_ops.map(lambda row, by: norm(row[None], by)[0], norm(x, w), w)


def of_scan(x, w):
    return torch._higher_order_ops.scan(lambda c, row: (c + row, norm(c * row, w)), w.cos(), norm(x, w), dim=0)[1]


BODIES = [(of_cond, 3), (of_cond_inside, 2), (of_while, 2), (of_map, 2), (of_scan, 2)]


@pytest.mark.parametrize(("function", "count"), BODIES)
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.rotates(8)
def test_bodies_of_calls_are_fused_and_counted(function, count, sign):
    close(compiled(function, X * sign, W), function(X * sign, W))
    report = fusion.explain(function, X, W, options=OPTIONS)
    assert report.ops == {NORM: count}
    assert len(report.matches) == count
    assert not report.failures
    assert not [each for each in report.refusals if "not entered" in each.reason]
    assert all(each.where for each in report.matches)
    before, after = report.launches
    assert before - after == sum(each.saved for each in report.matches) > 0


@pytest.mark.rotates(8)
@pytest.mark.parametrize("function", [of_cond, of_cond_inside, of_while, of_map])
def test_bodies_of_calls_are_fused_for_inductor(function):
    options = {"target": "host", "lower": "inductor"}
    with torch.no_grad():
        have = torch.compile(function, backend="cann_fusion", options=options, fullgraph=True)(X, W)
    close(have, function(X, W))


@pytest.mark.rotates(4)
def test_what_a_body_is_given_is_not_written_to():
    def put(x, cache, places):
        def write(a, c, p):
            return c.index_copy(0, p, norm(a, W))

        return torch.cond(x.sum() > 0, write, lambda a, c, p: c * 2, (x, cache, places))

    cache, places = numbers(8, 64, seed=2), torch.tensor([5, 1, 2, 7])
    kept = cache.clone()
    close(compiled(put, X.abs(), cache, places), put(X.abs(), kept, places))
    assert torch.equal(cache, kept)


def test_a_body_whose_stage_fails_stays_as_it_came(monkeypatch):
    whole = pipeline.verify

    def failing(source, *rest):
        if len(source.find_nodes(op="get_attr")) == 0:
            raise RuntimeError("no body is right")
        whole(source, *rest)

    monkeypatch.setattr(pipeline, "verify", failing)
    with pytest.warns(UserWarning, match="no body is right"):
        have = compiled(of_cond, X, W)
    close(have, of_cond(X, W))
    report = fusion.explain(of_cond, X, W, options=OPTIONS)
    assert report.ops == {NORM: 1}
    assert {(each.stage, each.drops_graph) for each in report.failures} == {("verify", True)}


@pytest.mark.rotates(3)
def test_fuel_is_used_up_in_bodies_too():
    counts = [fusion.explain(of_cond, X, W, options=OPTIONS | {"fuel": n}).ops[NORM] for n in range(5)]
    assert counts == [0, 1, 2, 3, 3]


def test_a_body_without_shapes_is_left_as_it_came():
    (graph,) = fusion.explain(of_cond, X, W, options={**OPTIONS, "disable": {"npu_rms_norm"}}).graphs
    for node in graph.true_graph_0.graph.nodes:
        node.meta.pop("val", None)
    outcome = pipeline.fuse_graph(graph.graph, installed(), fusion.Options(**OPTIONS))
    assert len(outcome.chosen) == 2
    assert [str(each.reason) for each in outcome.refusals if each.rule == "cond"] == [pipeline.NOT_ENTERED]


def of_elements(x, w):
    heads = norm(x, w).view(1, 2, 2, 64)
    return flex_attention(heads, heads, heads, score_mod=lambda score, b, h, q, k: score * 2)


def test_code_for_elements_is_left_as_it_came_and_the_report_says_so():
    report = fusion.explain(of_elements, X, W, options=OPTIONS)
    assert report.ops == {NORM: 1}
    (told,) = [each for each in report.refusals if "not entered" in each.reason]
    assert told.rule == "flex_attention"
    assert told.where.startswith(f"{__file__}:")
    assert not report.failures


def test_what_runs_again_for_gradients_is_fused():
    def run(x, w):
        return checkpoint(norm, x, w, use_reentrant=False) + 1

    close(compiled(run, X, W), run(X, W))
    assert fusion.explain(run, X, W, options=OPTIONS).ops == {NORM: 1}
