"""Regions that torch compiles apart are fused where they are called; other code that runs graphs is left as it came."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fusion

from ..engine.graphs import norm, numbers

X, W = numbers(4, 64), numbers(64, seed=1)
OPTIONS = {"target": "host", "lower": "eager"}
NORM = "npu::npu_rms_norm"


@pytest.fixture(autouse=True)
def fresh():
    torch.compiler.reset()


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
    return torch.cond(x.sum() > 0, lambda a, b: norm(a, b), lambda a, b: a * 2, (norm(x, w), w))


def of_while(x, w):
    start = (torch.tensor(0), norm(x, w))
    return torch._higher_order_ops.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a * 1.5), start)[1]


def of_map(x, w):
    return torch._higher_order_ops.map(lambda row, by: norm(row, by), norm(x, w), w)


def of_scan(x, w):
    return torch._higher_order_ops.scan(lambda c, row: (c + row, c * row), w, norm(x, w), dim=0)[1]


@pytest.mark.parametrize(
    ("function", "name"), [(of_cond, "cond"), (of_while, "while_loop"), (of_map, "map_impl"), (of_scan, "scan")]
)
def test_code_that_runs_graphs_is_left_as_it_came_and_the_report_says_so(function, name):
    close(compiled(function, X, W), function(X, W))
    report = fusion.explain(function, X, W, options=OPTIONS)
    assert report.ops == {NORM: 1}
    (told,) = [each for each in report.refusals if "not entered" in each.reason]
    assert told.rule == name
    assert told.where.startswith(f"{__file__}:")
    assert not report.failures


def test_what_runs_again_for_gradients_is_fused():
    def run(x, w):
        return checkpoint(norm, x, w, use_reentrant=False) + 1

    close(compiled(run, X, W), run(X, W))
    assert fusion.explain(run, X, W, options=OPTIONS).ops == {NORM: 1}
