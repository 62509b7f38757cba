"""Reasons to trust the pass: wrong rules are found out, refusals point at the code, results repeat."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.errors import VerificationError
from fusion.frontend.backend import FusionBackend
from fusion.frontend.library import installed
from fusion.options import Options

from ..support.child import child
from .graphs import fuse, names, norm, numbers, traced
from .rules import DoubleExp, NotTurned, WrongNorm, WrongShape

X, W = numbers(2, 3, 64), numbers(64, seed=1)


def compiled(function, *rules, **options):
    torch.compiler.reset()
    backend = FusionBackend(Options.of({"target": "host", "lower": "eager", **options}), rules or None)
    return torch.compile(function, backend=backend)


def test_verification_catches_a_planted_wrong_lowering():
    with torch.no_grad(), pytest.raises(VerificationError, match=r"output .*causes it: rule 'wrong_norm'"):
        compiled(norm, WrongNorm(), verify=True)(X, W)


def test_without_verification_the_same_rule_goes_unnoticed():
    with torch.no_grad():
        wrong = compiled(norm, WrongNorm())(X, W)
    assert not torch.allclose(wrong, norm(X, W), atol=1e-3)


def test_verification_passes_right_fusions_and_sees_written_inputs():
    def step(x, w, cache):
        cache.copy_(norm(x, w))
        return cache.sum()

    cache = torch.zeros_like(X)
    with torch.no_grad():
        run = compiled(step, verify=True)
        first, second = run(X, W, cache), run(X, W, cache)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(cache, norm(X, W))


def test_a_lowering_of_another_shape_is_refused_not_used():
    gm = traced(norm, X, W)
    outcome = fuse(gm, rules=[WrongShape()])
    assert not outcome.chosen
    assert ["the rewrite gives" in each.reason for each in outcome.refusals] == [True]


def test_a_result_is_seen_in_the_shape_of_the_model_only_where_that_is_a_reshape():
    """What has the shape that was turned has the numbers in another order."""
    outcome = fuse(traced(lambda x: x.exp().t(), X[0]), rules=[NotTurned()])
    assert not outcome.chosen
    assert ["the rewrite gives" in each.reason for each in outcome.refusals] == [True]


def test_a_refusal_points_at_the_line_that_the_user_wrote():
    def form(x):
        here = x * 1.0
        return here * torch.rsqrt(here.pow(2).mean(-1, keepdim=True) + 0.5)

    line = form.__code__.co_firstlineno + 2
    gm = traced(form, X)
    (told,) = [each for each in fuse(gm).refusals if each.rule == "rms_norm"]
    assert told.where == f"{Path(__file__)}:{line}"
    assert told.source.startswith("return here * torch.rsqrt")
    assert "above 0.02, so that it damps rather than" in told.reason
    assert str(told) == f"rms_norm refused: {told.reason} [{told.where}]"


def test_a_refusal_inside_a_module_names_the_module():
    class Damped(torch.nn.Module):
        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.5)

    gm = traced(torch.nn.Sequential(torch.nn.Identity(), Damped()), X)
    (told,) = [each for each in fuse(gm).refusals if each.rule == "rms_norm"]
    assert told.module == "1"


def test_refusals_of_another_chip_are_listed_with_its_name():
    def form(x):
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    nine = numbers(*(1,) * 8, 16)
    gm = traced(form, nine)
    outcome = fuse(gm)
    assert names(gm) == ["npu.npu_swiglu.default"]
    assert [(each.target, "rank(input) <= 8" in each.reason) for each in outcome.refusals] == [("ascend910_93", True)]


DETERMINISM = """
    import torch
    from fusion import FusionPass
    from fusion.testing import capture
    from tests.engine.graphs import norm, numbers, rotate

    def form(x, y, w, q, k, c, s):
        for _ in range(3):
            z = x + y
            x, y = norm(z, w), z
        return x, y, rotate(q, c, s), rotate(k, c, s), norm(q, w) + norm(k[:, :1], w)

    args = numbers(2, 3, 64), numbers(2, 3, 64), numbers(64), numbers(2, 4, 3, 64), numbers(2, 2, 3, 64)
    gm = capture(form, (*args, numbers(3, 64), numbers(3, 64))).graph
    fused = FusionPass({"target": "host"})
    fused(gm)
    print(gm.graph)
    print(fused.uuid())
"""


@pytest.mark.rotates
def test_the_result_does_not_depend_on_the_hash_seed():
    results = [child(DETERMINISM, PYTHONHASHSEED=seed).stdout for seed in ("0", "1", "4711")]
    assert "npu_add_rms_norm" in results[0]
    assert len(set(results)) == 1


def test_two_libraries_in_one_process_leave_each_other_alone():
    def form(x, w):
        return norm(x, w) + x.exp() * 2

    first, second = traced(form, X, W), traced(form, X, W)
    fuse(first, rules=[DoubleExp()])
    fuse(second, rules=[rule for rule in installed().rules if rule.name == "rms_norm"])
    assert "aten.exp2.default" in names(first)
    assert "npu.npu_rms_norm.default" not in names(first)
    assert "npu.npu_rms_norm.default" in names(second)
    assert "aten.exp2.default" not in names(second)


def test_two_models_with_other_sizes_compile_side_by_side():
    def small(x, w):
        return norm(x, w)

    def large(x, w):
        return norm(x, w) * 2

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        one, two = compiled(small), compiled(large, disable="rope")
        for size in (64, 128):
            x, w = numbers(2, size), numbers(size, seed=2)
            torch.testing.assert_close(one(x, w), small(x, w), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(two(x, w), large(x, w), rtol=1e-5, atol=1e-5)


def test_reasons_are_sentences_without_open_braces():
    for rule in installed().rules:
        for form in rule.lookalikes():
            named = set(re.findall(r"{(\w+)}", form.reason))
            assert named <= set(form.captures), f"{rule.name}.{form.name} names {named - set(form.captures)}"


def test_numbers_that_others_may_change_are_no_constants():
    """A graph traced with its module holds Parameters and buffers as attributes, as it holds numbers in the code."""

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(0.125), requires_grad=False)
            self.register_buffer("least", torch.tensor(-1e9))

        def forward(self, q, k, v, seen):
            return torch.where(seen, q @ k.mT * self.scale, self.least).softmax(-1) @ v

    qkv = [numbers(2, 4, 8, 64, seed=each) for each in range(3)]
    seen = torch.ones(8, 8, dtype=torch.bool).tril()
    gm = make_fx(Scaled(), tracing_mode="fake", _allow_non_fake_inputs=True)(*qkv, seen)
    assert len(gm.graph.find_nodes(op="get_attr")) == 2
    outcome = fuse(gm, rules=installed())
    assert not outcome.chosen
    assert any("hidden scores are replaced by a number" in each.reason for each in outcome.refusals)
