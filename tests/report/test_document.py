"""The document of a report: lines that became a call, launches that stay, savings, reasons, layers."""

from __future__ import annotations

import inspect
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion
from fusion.frontend.catalogue import rule_entries
from fusion.planning.target import Target
from fusion.report.document import Document
from fusion.report.folding import folded, layers_of, ranges

from .models import Layer, Norm, added, capped, inputs, layered

pytestmark = pytest.mark.usefixtures("fresh")

A3 = Target.named("ascend910_93")


def explained(model: Any, *args: Any, **options: Any) -> fusion.Report:
    model = model.bfloat16() if isinstance(model, torch.nn.Module) else model
    return fusion.explain(model, *args, options={"target": A3.name, **options})


def lines_of(function: Callable[..., Any], *texts: str) -> set[int]:
    """Numbers of the lines of a function that hold one of `texts`."""
    lines, first = inspect.getsourcelines(function)
    numbers = {number for number, line in enumerate(lines, first) if any(text in line for text in texts)}
    assert len(numbers) == len(texts)
    return numbers


def test_all_lines_that_became_a_call_are_listed_with_their_modules():
    document = layered(4).document()
    (rewrite,) = document.rewrites
    assert (rewrite.rule, rewrite.calls) == ("add_norm", {"npu_add_rms_norm": 1})
    listed = {(origin.module, line.number) for origin in rewrite.origins for line in origin.lines}
    own = lines_of(Norm.forward, "x.float()", "y.pow", "torch.rsqrt", "self.weight *")
    assert listed == {("layers.0-3.norm", each) for each in own} | {("layers.0-3", *lines_of(added, "x + y"))}
    texts = {line.text for origin in rewrite.origins for line in origin.lines}
    assert "variance = y.pow(2).mean(-1, keepdim=True)" in texts
    assert {line.file for origin in rewrite.origins for line in origin.lines} == {"tests/report/models.py"}


def test_a_launch_that_stays_has_its_line_time_and_bytes():
    x, _ = inputs()
    (sine,) = [each for each in layered(4).document().left if each.op == "sin"]
    moved = 2 * x[..., 0].numel() * 96 * x.element_size()
    assert (sine.module, sine.times, sine.bytes) == ("layers.0-3", 4, 4 * moved)
    assert sine.us == pytest.approx(4 * (A3.launch + moved / A3.bandwidth), rel=1e-3)
    assert {sine.line.number} == lines_of(Layer.forward, ".sin()")
    assert sine.reason == ""


def test_a_gather_is_not_priced_by_its_table():
    table = torch.randn(100_000, 64, dtype=torch.bfloat16)
    (gather,) = explained(lambda i, t: torch.nn.functional.embedding(i, t), torch.tensor([1, 2]), table).document().left
    assert gather.bytes == 2 * 2 * 64 * 2


def test_a_refused_place_says_what_it_keeps_and_would_save():
    document = layered(3, 1).document()
    (change,) = document.changes
    assert (change.rule, change.module, change.times) == ("rms_norm", "layers.1.norm", 1)
    assert change.reason.startswith("eps: it is 0.5")
    assert {each.op for each in document.left if each.reason} == {"_to_copy", "pow", "mean", "add", "rsqrt", "mul"}
    kept = [each for each in document.left if each.reason == change.reason]
    assert change.launches == sum(each.times for each in kept) == 7 + 1, "the residual add is part of the place"
    assert 0 < change.us < sum(each.us for each in kept)
    assert not change.is_planned


def test_changes_are_sorted_by_what_they_would_save():
    damped = Norm(0.5).bfloat16()

    def both(x: Tensor, y: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        return damped(x), capped(q, q, q)

    changes = explained(both, *inputs(), torch.randn(1, 4, 512, 64).bfloat16()).document().changes
    assert [each.us for each in changes] == sorted((each.us for each in changes), reverse=True)
    assert changes[0].us > 0
    assert {each.rule for each in changes} <= {entry.name for entry in rule_entries()}
    assert {each.rule for each in changes} >= {"rms_norm", "attention"}


def test_what_the_model_can_mend_comes_first():
    damped = Norm(0.5).bfloat16()

    def both(x: Tensor, y: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
        return damped(x), y * torch.sigmoid(gate)

    report = explained(both, *inputs(), inputs()[0])
    first, last = report.document().changes
    assert (first.rule, first.is_mendable) == ("rms_norm", True)
    assert (last.rule, last.is_mendable) == ("activation", False)
    assert last.reason.endswith("nothing to change")
    text = str(report)
    assert text.index("eps: it is 0.5") < text.index("not fused, with nothing to change in the model")


def test_one_reason_at_one_line_is_one_refusal():
    def twice(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return tuple(each * torch.rsqrt(each.pow(2).mean(-1, keepdim=True) + 0.5) for each in (x, y))

    report = explained(twice, *inputs())
    assert len(report.refusals) == 1
    assert len(report.parts[0].refusals) == 2
    assert report.document().changes[0].times == 2


def test_a_place_that_fused_otherwise_is_shown_where_it_is_asked_for():
    wide = torch.randn(*(1,) * 8, 64)
    report = fusion.explain(Norm(), wide, options={"target": "host", "lower": "eager"})
    assert [each.target for each in report.document().changes] == [A3.name], "another chip refuses what fuses here"
    report = explained(capped_twice, *(torch.randn(1, 2, 16, 64).bfloat16() for _ in range(3)))
    shown, everything = report.document(), report.document(everything=True)
    assert 0 < sum(each.times for each in everything.changes) <= len(report.refusals)
    assert shown.hidden == sum(each.times for each in everything.changes if each not in shown.changes)
    assert not any(each.fused_otherwise for each in shown.changes)
    assert len(json.loads(report.to_json(everything=True))["refusals"]) == len(everything.changes)


def capped_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return capped(q, k, v) + torch.nn.functional.scaled_dot_product_attention(q, k, v)


def total(document: Document, side: str) -> tuple[int, float]:
    outermost = [getattr(each, side) for each in document.modules if not each.depth]
    return sum(each.launches for each in outermost), sum(each.us for each in outermost)


def branching(x: Tensor, y: Tensor, gain: Tensor) -> Tensor:
    def normed(x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(added(x, x.sin()), (64,), gain, 1e-6)

    return torch.cond(x.sum() > 0, normed, lambda x: x.cos(), (x,)) + y


def broken(x: Tensor, y: Tensor) -> Tensor:
    x = torch.nn.functional.rms_norm(x, (64,))
    torch._dynamo.graph_break()
    return torch.nn.functional.rms_norm(x + y, (64,))


@pytest.mark.parametrize(
    "made",
    [
        lambda: layered(3, 1),
        lambda: explained(branching, *inputs(), torch.ones(64).bfloat16()),
        lambda: explained(broken, *inputs()),
    ],
    ids=["layers", "bodies", "graphs"],
)
def test_launches_and_times_add_up(made: Callable[[], fusion.Report]):
    report = made()
    document = report.document()
    assert (document.before.launches, document.after.launches) == report.launches
    assert document.rewrites
    for side in ("before", "after"):
        cost = getattr(document, side)
        assert total(document, side) == (cost.launches, pytest.approx(cost.us))
    saved = sum(each.saved.us for each in document.rewrites)
    assert document.before.us - document.after.us == pytest.approx(saved, rel=0.1)
    fused = sum(sum(each.calls.values()) * each.times for each in document.rewrites)
    assert sum(each.times for each in document.left) + fused == document.after.launches
    names = [call.name for scope in document.scopes for call in scope.after]
    assert len(names) == len(set(names))


def test_equal_layers_are_one_and_others_are_named():
    document = layered(6, 0, 4).document()
    rows = {each.path: each for each in document.layers}
    assert rows.keys() == {"layers.0,4", "layers.1-3,5"}
    assert [(each.numbers, each.usual, each.times) for each in rows.values()] == [("0,4", "1-3,5", 2), ("1-3,5", "", 4)]
    assert "-npu_add_rms_norm in norm" in rows["layers.0,4"].differences
    assert "+rsqrt in norm" in rows["layers.0,4"].differences
    paths = [each.path for each in document.modules]
    assert paths[:2] == ["layers.0,4", "layers.0,4.norm"]
    (rewrite,) = document.rewrites
    assert (rewrite.module, rewrite.times) == ("layers.1-3,5.norm", 4)
    assert {origin.module for origin in rewrite.origins} == {"layers.1-3,5", "layers.1-3,5.norm"}


class Positions(torch.nn.Module):
    """A layer that launches nothing: integers alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[-1]) + x.shape[0]


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Positions(), Norm()])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        positions, norm = self.layers
        return positions(x), norm(x)


def test_a_layer_without_launches_is_a_layer():
    document = explained(Mixed(), inputs()[0]).document()
    assert [(each.path, each.after.launches) for each in document.layers] == [("layers.0", 0), ("layers.1", 1)]
    assert [each.path for each in document.modules if each.bookkeeping] == ["layers.0"]


def test_json_folds_equal_layers():
    four, eight = (json.loads(layered(depth).to_json()) for depth in (4, 8))
    assert [each["layers"] for each in four["layers"]] == ["layers.0-3"]
    assert [each["layers"] for each in eight["layers"]] == ["layers.0-7"]
    for name in ("rewrites", "left", "modules"):
        assert len(four[name]) == len(eight[name])
    assert [each["times"] for each in eight["rewrites"]] == [8]


def test_copies_of_inputs_that_are_left_are_named():
    def step(cache: Tensor, x: Tensor) -> Tensor:
        other = cache.clone()
        cache.copy_(cache * 2)
        return torch.nn.functional.rms_norm(x, (64,)) + other

    copies = [each for each in explained(step, *inputs()).document().left if each.copies]
    assert {(each.op, each.copies) for each in copies} == {("clone", ("args[0]",)), ("copy_", ("args[0]",))}


class Copying(nn.Module):
    """cache [B, T, D], pages [P, W], x [B, D], slots [S], rows [S, W] → [B, D]; each kind of copy once."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(64, eps=1e-6)

    def forward(self, cache: Tensor, pages: Tensor, x: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        before = cache.clone()
        cache.copy_(torch.where(cache > 0, cache, 2 * cache))
        pages[slots] = rows
        return self.norm(x) + before + pages.sum()


def copied(lower: str) -> set[tuple[str, str, tuple[str, ...]]]:
    """Return operator, kind and inputs of the copies that stay of a step planned for the compiler `lower`."""
    given = torch.ones(4, 64), torch.ones(9, 8), torch.ones(4, 64), torch.tensor([7, 0]), torch.ones(2, 8)
    options = {"target": "ascend910_93", "plan_lower": lower}
    with torch.no_grad():
        document = fusion.explain(Copying().eval(), *given, options=options).document()
    return {(each.op, each.kind, each.inputs) for each in document.copied}


CACHE = {("clone", "state", ("args[0]",)), ("copy_", "state", ("args[0]",))}


@pytest.mark.parametrize("lower", ["torchair", "npugraph_ex"])
def test_copies_of_states_that_stay_are_listed(lower: str):
    assert copied(lower) == CACHE, "rows of pages are written in place by these compilers"


def test_a_copied_input_has_a_place_and_a_cure():
    def step(cache: Tensor, x: Tensor) -> Tensor:
        cache.copy_(torch.cat((cache[1:], x[:1])))
        return torch.nn.functional.rms_norm(x, (64,))

    report = explained(step, *inputs())
    (one,) = report.document().copied
    assert (one.op, one.kind, one.times) == ("copy_", "state", 1)
    assert one.line is not None
    assert one.line.text.startswith("cache.copy_")
    assert one.cure.startswith("assigned as a whole, from cat; a write in place requires the rows that change")
    assert json.loads(report.to_json())["copies"][0]["cure"] == one.cure
    assert "copies of caches, states and weights" in str(report)


def test_a_copy_of_a_report_has_the_same_document():
    report = layered(3, 1)
    again = pickle.loads(pickle.dumps(report))
    assert again.document(everything=True) == report.document(everything=True)


@pytest.mark.parametrize(
    ("paths", "text"),
    [
        (["a.0.b", "a.2.b", "a.1.b"], "a.0-2.b"),
        (["a.0", "a.2", "a.3"], "a.0,2-3"),
        (["a.1.b.0", "a.1.b.1", "a.2.b.0", "a.2.b.1"], "a.1-2.b.0-1"),
        (["a.1", "b", "a.2"], "a.1-2, b"),
        (["", ""], ""),
    ],
)
def test_paths_are_folded(paths: list[str], text: str):
    assert folded(paths) == text


def test_layers_are_the_outermost_numbered_modules_with_siblings():
    paths = ["net.0.layers.1.mlp", "net.0.layers.2.mlp.experts.3", "head", ""]
    assert {path: str(layer) for path, layer in layers_of(paths).items()} == {
        "net.0.layers.1.mlp": "net.0.layers.1",
        "net.0.layers.2.mlp.experts.3": "net.0.layers.2",
    }
    assert ranges([3, 1, 2, 7]) == "1-3,7"
