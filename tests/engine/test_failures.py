"""What raises inside the pass costs a rule or a graph, never the model: it says where, and the rest goes on."""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx

import fusion
from fusion import lowering, pipeline
from fusion.errors import StageError
from fusion.frontend.backend import FusionBackend
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.stages.canonicalise import translators

from .graphs import HOST, names, norm, numbers, traced
from .rules import DoubleExp

X, W = numbers(2, 3, 64), numbers(64, seed=1)
OPTIONS = {"target": "host", "lower": "eager"}
STAGES = {
    "canonicalise": "canonicalise", "match": "match", "Planner": "plan", "select": "select", "tally": "report",
    "rewrite": "rewrite", "prepare": "prepare", "verify": "verify", "reinplace": "reinplace",
}  # fmt: skip


def step(x, w, cache):
    """A norm, a write into a cache, and a graph of its own behind them."""
    y = norm(x, w)
    cache.add_(y)
    torch._dynamo.graph_break()
    return norm(y.sin(), w)


def warned(function, *args, rules=None, **options):
    """What the compiled function gives, and our warnings."""
    torch.compiler.reset()
    backend = FusionBackend(Options.of({**OPTIONS, **options}), rules)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        result = torch.compile(function, backend=backend)(*args)
    return result, [str(each.message) for each in caught if str(each.message).startswith("cann-fusion")]


def close(have, want):
    torch.testing.assert_close(have, want, rtol=1e-5, atol=1e-5)


def planted(*args, **kwargs):
    raise TypeError("planted")


def once(real):
    """The same function, failing at its first call."""
    calls = []

    def run(*args, **kwargs):
        calls.append(args)
        return planted() if len(calls) == 1 else real(*args, **kwargs)

    return run


@pytest.mark.rotates(12)
@pytest.mark.parametrize(("function", "stage"), STAGES.items(), ids=STAGES.values())
def test_a_stage_that_fails_leaves_its_graph_as_it_came_and_the_others_fuse(monkeypatch, function, stage):
    monkeypatch.setattr(pipeline, function, once(getattr(pipeline, function)))
    cache, expected = torch.zeros(2, 3, 64), torch.zeros(2, 3, 64)
    have, told = warned(step, X, W, cache)
    close(have, step(X, W, expected))
    close(cache, expected)
    (one,) = told
    assert one.startswith("cann-fusion could not fuse a graph and runs it as it came")
    assert f"stage {stage} failed" in one
    assert "TypeError: planted" in one
    assert "report it" in one

    monkeypatch.setattr(pipeline, function, once(getattr(fusion.pipeline, function).__closure__[1].cell_contents))
    report = fusion.explain(step, X, W, torch.zeros(2, 3, 64), options=OPTIONS)
    assert report.ops == {"npu::npu_rms_norm": 1}
    (failure,) = report.failures
    assert (failure.stage, failure.error, failure.drops_graph) == (stage, "TypeError: planted", True)
    assert [bool(part.failures) for part in report.parts] == [True, False]
    assert json.loads(report.to_json())["failures"] == [{"graph": 0, **vars(failure)}]
    assert "failed in the pass" in str(report)
    assert "TypeError: planted" in str(report)


@pytest.mark.parametrize("function", ["rewrite", "prepare", "reinplace", "verify", "canonicalise"])
def test_a_guest_that_fails_leaves_the_graph_as_it_came(monkeypatch, function):
    real = getattr(pipeline, function)

    def half(*args, **kwargs):
        real(*args, **kwargs)
        planted()

    monkeypatch.setattr(pipeline, function, half)
    gm = traced(lambda x, w, cache: cache.copy_(norm(x, w)) * 2, X, W, torch.zeros(2, 3, 64))
    gm.graph.output_node().meta["kept"] = True
    before = described(gm.graph)
    with pytest.warns(UserWarning, match=rf"could not fuse a graph and runs it as it came: stage {function} failed"):
        fusion.FusionPass(OPTIONS)(gm)
    assert described(gm.graph) == before
    assert gm.graph.output_node().meta["kept"]
    gm.graph.lint()
    cache = torch.zeros(2, 3, 64)
    gm.recompile()
    close(gm(X, W, cache)[0], norm(X, W) * 2)
    close(cache, norm(X, W))


def described(graph: fx.Graph) -> list[str]:
    return [f"{node.name} {node.format_node()} {sorted(node.meta)} {node.meta.get('val')}" for node in graph.nodes]


def test_a_failure_names_the_node_its_module_its_line_and_its_text(monkeypatch):
    from fusion.stages.canonicalise import translators

    class Inner(torch.nn.Module):
        def forward(self, x):
            return x.cos()

    line = Inner.forward.__code__.co_firstlineno + 1
    monkeypatch.setitem(translators.TRANSLATORS, torch.ops.aten.cos.default, planted)
    report = fusion.explain(torch.nn.Sequential(torch.nn.Identity(), Inner()), X, options=OPTIONS)
    (failure,) = report.failures
    assert (failure.stage, failure.node, failure.module) == ("canonicalise", "cos", "1")
    assert failure.where == f"{Path(__file__)}:{line}"
    assert failure.source == "return x.cos()"
    assert f"node cos (1 at {failure.where}: return x.cos())" in str(failure)
    assert isinstance(StageError(failure), fusion.FusionError)


def test_a_translator_that_fails_names_the_node_that_it_translates(monkeypatch):
    monkeypatch.setitem(translators.TRANSLATORS, torch.ops.aten.sigmoid.default, planted)
    _, (told,) = warned(lambda x, w: (norm(x, w), x.sigmoid()), X, W)
    assert "stage canonicalise failed at node sigmoid" in told


def test_a_reader_that_fails_names_a_node_that_holds_the_value_and_is_left_out(monkeypatch):
    from patterns.rotary import read

    monkeypatch.setattr(read, "rotation", planted)
    gm = traced(lambda x, y: (norm(x, W), x.cos() + y), X, X)
    outcome = pipeline.fuse_graph(gm.graph, installed(), HOST)
    (failed,) = outcome.failures
    assert (failed.stage, failed.rule, failed.node) == ("read", "rotations", "add_1")
    assert "TypeError: planted" in failed.error
    assert [each.match.rule.name for each in outcome.chosen] == ["rms_norm"]


def test_a_rewrite_that_fails_names_the_rule_and_how_to_do_without_it(monkeypatch):
    from fusion.stages import rewrite

    monkeypatch.setattr(rewrite._Editor, "_replay", planted)
    have, told = warned(norm, X, W)
    close(have, norm(X, W))
    (one,) = told
    assert "stage rewrite, with the rule 'rms_norm', failed at node mul" in one
    assert "options={'disable': {'rms_norm'}}" in one
    assert warned(norm, X, W, disable="rms_norm")[1] == []


def test_what_the_compiler_does_not_take_runs_as_it_came(monkeypatch):
    from fusion.frontend import backend

    real = backend.lower

    def lower(gm, *args):
        return planted() if "npu.npu_rms_norm.default" in names(gm) else real(gm, *args)

    monkeypatch.setattr(backend, "lower", lower)
    have, told = warned(norm, X, W)
    close(have, norm(X, W))
    assert ["stage lower failed: TypeError: planted" in each for each in told] == [True]


def test_a_compiler_that_fails_by_itself_is_an_error(monkeypatch):
    monkeypatch.setattr("fusion.frontend.backend.lower", planted)
    with pytest.raises(Exception, match="planted"):
        warned(norm, X, W)


def test_a_folder_that_cannot_be_written_to_costs_the_dump_and_not_the_fusing(tmp_path):
    taken = tmp_path / "file"
    taken.write_text("")
    for folder in (taken, taken / "below", "a\0b"):
        have, (one,) = warned(norm, X, W, dump_dir=folder)
        close(have, norm(X, W))
        assert one.startswith("cann-fusion could not write graph")
        assert repr(str(folder)) in one
        assert "option dump_dir" in one
    with pytest.warns(UserWarning, match="could not write graph"):
        report = fusion.explain(norm, X, W, options={**OPTIONS, "dump_dir": taken})
    assert report.ops == {"npu::npu_rms_norm": 1}
    assert report.failures == []


# rules -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BadGuard(DoubleExp):
    """A rule whose guard raises."""

    def guard(self, factor):
        """Not what it should be."""
        planted()


@dataclass(frozen=True)
class BadLowering(DoubleExp):
    """A rule whose lowering raises."""

    @lowering
    def plain(self, x: Tensor):
        """Not what it should be."""
        return x + torch.ones(17, 19)


@dataclass(frozen=True)
class BadRemark(DoubleExp):
    """A rule whose remark raises."""

    def remark(self):
        """Not what it should be."""
        return planted()


def form(x, w):
    return norm(x, w) + x.exp() * 2


NORM = next(rule for rule in installed().rules if rule.name == "rms_norm")


@pytest.mark.parametrize(
    ("bad", "stage", "reason"),
    [
        (BadGuard(), "match", "its guard raised TypeError: planted"),
        (BadLowering(), "plan", "its lowering plain raised"),
    ],
    ids=lambda each: getattr(each, "name", ""),
)
def test_a_rule_that_raises_is_refused_there_and_the_others_go_on(bad, stage, reason):
    have, told = warned(form, X, W, rules=(bad, NORM))
    close(have, form(X, W))
    (one,) = told
    assert one.startswith(f"cann-fusion could not fuse by the rule {bad.name!r} and goes on without it: stage {stage}")
    assert f"options={{'disable': {{{bad.name!r}}}}}" in one
    report = fusion.explain(form, X, W, options=OPTIONS, rules=(bad, NORM))
    assert report.ops == {"npu::npu_rms_norm": 1}
    (refusal,) = [each for each in report.refusals if each.rule == bad.name]
    assert refusal.reason.startswith(reason)
    (failure,) = report.failures
    assert (failure.stage, failure.rule, failure.drops_graph) == (stage, bad.name, False)
    assert f"without {bad.name}" in str(report)


def test_a_guard_that_raises_in_many_places_is_told_once():
    def many(x):
        return x.exp() * 2 + (x.sin().exp() * 2).cos() + x.cos().exp() * 2

    _, told = warned(many, X, rules=(BadGuard(),))
    assert len(told) == 1
    report = fusion.explain(many, X, options=OPTIONS, rules=(BadGuard(),))
    assert len(report.failures) == 1
    assert len(report.refusals) == 1


def test_remarks_and_examples_that_raise_cost_nothing():
    assert warned(form, X, W, rules=(BadRemark(),))[1] == []
    (match,) = fusion.explain(form, X, W, options=OPTIONS, rules=(BadRemark(),)).matches
    assert match.remark == "its remark raised TypeError: planted"
