"""`Report.why`: the change that it names is made in the source, which then fuses as the change says."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch

import fusion
from fusion.frontend.commands.loading import loaded
from fusion.report.report import Report
from fusion.report.why import Explanation
from fusion.report.why.edits import Edit
from fusion.report.why.statements import difference
from tests.support.tried import declared

OPTIONS = {"target": "ascend910_93", "progress": False}
SOURCE = """
import torch
import torch.nn.functional as F


def no_eps(x, gain):
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True))).to(x.dtype) * gain


def negative_eps(x, gain):
    y = x.float()
    return (y * (y.pow(2).mean(-1, keepdim=True) + -1e-5).rsqrt()).to(x.dtype) * gain


def capped(q, k, v):
    scores = torch.tanh(q @ k.mT * 0.125)
    return scores.softmax(-1) @ v


def over_queries(q, k, v):
    scores = q @ k.mT * 0.125
    return F.softmax(
        scores, dim=-2
    ) @ v


def filled(q, k, v):
    places = torch.arange(64)
    scores = (q @ k.mT * 0.125).masked_fill(places[:, None] < places, -100.0)
    return scores.softmax(-1) @ v


def scaled_gate(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate * 2.0) * up


class Layers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Layer(torch.nn.Module):
    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) @ torch.ones(64, 64, dtype=x.dtype)


layers = Layers()


def exchanged(x):
    left, right = x.chunk(2, -1)
    return left * F.silu(right)


def bounded_otherwise(x):
    gate, up = x[..., ::2], x[..., 1::2]
    gate = gate.clamp(max=7.0)
    up = up.clamp(min=-6.0, max=7.0)
    return (up + 1) * (gate * torch.sigmoid(gate * 1.702))


def cut_off(x):
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x / scale).to(torch.int8), scale


def masked(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def exponents(q, k, v):
    return torch.exp(q @ k.mT * 0.125) @ v
"""


def tensor(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


HEADS = tuple(tensor(1, 8, 64, 64) for _ in range(3))
CHANGED = {
    "no_eps": ((tensor(8, 64), tensor(64)), "mean(-1, keepdim=True) + 1e-06)"),
    "negative_eps": ((tensor(8, 64), tensor(64)), "+ 1e-06).rsqrt()"),
    "capped": (HEADS, "scores = (q @ k.mT * 0.125)"),
    "over_queries": (HEADS, "scores, dim=-1"),
    "filled": (HEADS, 'float("-inf")'),
    "scaled_gate": ((tensor(8, 128),), "F.silu(gate) * up"),
    "layers": ((tensor(1, 8, 64),), "+ 1e-06)"),
    "exchanged": ((tensor(8, 128),), "right, left = x.chunk(2, -1)"),
    "bounded_otherwise": ((tensor(8, 128),), "up.clamp(min=-7.0, max=7.0)"),
    "cut_off": ((tensor(8, 64),), "(x / scale).round().to(torch.int8)"),
}


def model_of(folder: Path, source: str, name: str) -> Callable[..., Any]:
    path = folder / f"model_{abs(hash(source))}.py"
    path.write_text(source)
    return loaded(f"{path}:{name}", "testing")


def explained(model: Callable[..., Any], inputs: tuple[Any, ...]) -> Report:
    return fusion.explain(model, *inputs, options=OPTIONS)


def patched(source: str, diff: str) -> str:
    """Replace the lines that `diff` removes by those that it adds."""
    lines = diff.splitlines()[3:]
    old = "\n".join(each[1:] for each in lines if each.startswith("-"))
    new = "\n".join(each[1:] for each in lines if each.startswith("+"))
    assert source.count(old) == 1
    return source.replace(old, new)


@pytest.mark.parametrize("name", CHANGED)
@pytest.mark.rotates(4)
def test_the_change_in_the_source_makes_the_fusion(name: str, tmp_path: Path):
    inputs, text = CHANGED[name]
    before = explained(model_of(tmp_path, SOURCE, name), inputs)
    assert before.refusals
    (explanation,) = {each.refusal.reason: each for each in before.why(before.refusals[0])}.values()
    change = explanation.change
    assert change is not None
    assert text in change.diff
    after = explained(model_of(tmp_path, patched(SOURCE, change.diff), name), inputs)
    assert change.rule in {each.rule for each in after.matches}
    assert change.rule not in {each.rule for each in before.matches}
    assert before.launches[1] - after.launches[1] == change.saves > 0
    assert explanation.refusal.reason not in [each.reason for each in after.refusals]


@pytest.mark.parametrize(
    ("line", "edit", "expected"),
    [
        ("y = F.softmax(x.transpose(1, d), d)", Edit("", "softmax", "constant", "dim", 1, -1, 1), ""),
        ("y = x.topk(1, d)", Edit("", "topk", "constant", "dim", 1, -1, 2), ""),
        ("y = x.topk(1, 1)", Edit("", "topk", "constant", "dim", 1, -1, 2), "y = x.topk(1, -1)"),
        ("y = torch.topk(x, 1, dim=1)", Edit("", "topk", "constant", "dim", 1, -1, 2), "y = torch.topk(x, 1, dim=-1)"),
        ("y = a.tanh() + b.tanh()", Edit("", "tanh", "omit", "self"), ""),
        ("y = self.act(x)", Edit("", "tanh", "omit", "self"), ""),
        ("y = 0.5 * (x + 2)", Edit("", "mul", "omit", "self", 0.5), "y = (x + 2)"),
        ("y = ä.float() @ w", Edit("", "_to_copy", "omit", "self"), "y = ä @ w"),
        ("y = x.var(-1)", Edit("", "var", "constant", "correction", 1, 0, 2), "y = x.var(-1, correction=0)"),
        ("y = torch.where(m, x, -1e3)", Edit("", "full", "constant", "fill_value", -1e3, -inf, 1),
         'y = torch.where(m, x, float("-inf"))'),
        ("y = (x", Edit("", "mul", "omit", "self", 0.5), ""),
    ],
)  # fmt: skip
def test_a_statement_is_edited_only_where_its_place_is_certain(line: str, edit: Edit, expected: str, tmp_path: Path):
    file = tmp_path / "statement.py"
    file.write_text(f"{line}\n")
    changed = [each[1:] for each in difference(f"{file}:1", edit).splitlines()[3:] if each.startswith("+")]
    assert changed == ([expected] if expected else [])


@pytest.fixture
def refused(tmp_path: Path) -> Report:
    return explained(model_of(tmp_path, SOURCE, "layers"), (tensor(1, 8, 64),))


def test_a_place_is_a_line_a_module_or_a_refusal(refused: Report):
    where = refused.refusals[0].where
    at_line = refused.why(where, tries=0)
    assert [each.refusal.where for each in at_line] == [where]
    assert len(refused.why(Path(where).name, tries=0)) == 1
    assert len(refused.why("layers.1", tries=0)) == len(refused.why("layers", tries=0)) == 1
    assert not refused.why("layer", tries=0)
    assert not refused.why("other.py:1", tries=0)


def test_reasons_alone_are_cheap_and_survive_pickling(refused: Report):
    expected = [Explanation(each.refusal, None) for each in refused.why("layers", tries=0)]
    assert refused.why("layers", tries=0) == expected
    again = pickle.loads(pickle.dumps(refused))
    assert [each.refusal.reason for each in again.why("layers")] == [each.refusal.reason for each in expected]
    assert all(each.change is None for each in again.why("layers"))


def test_a_reason_without_a_small_change_says_so(tmp_path: Path):
    report = explained(model_of(tmp_path, SOURCE, "exponents"), HEADS)
    (explanation,) = report.why(report.refusals[0])
    assert explanation.change is None
    assert str(explanation).endswith("no small change of the model is known to make it")


def test_an_exported_program_has_changes(tmp_path: Path):
    program = torch.export.export(model_of(tmp_path, SOURCE, "layers"), (tensor(1, 8, 64),))
    report = fusion.explain(program, options=OPTIONS)
    (explanation,) = report.why(report.refusals[0])
    assert explanation.change is not None
    assert (explanation.change.rule, explanation.change.what) == ("rms_norm", "add 1e-06 under rsqrt")


def test_a_mask_that_is_passed_in_is_assumed(tmp_path: Path):
    report = explained(model_of(tmp_path, SOURCE, "masked"), (*HEADS, tensor(1, 1, 64, 64)))
    (explanation,) = report.why(report.refusals[0])
    assert "name a mask that is passed in by the option assume" in explanation.refusal.reason
    assert explanation.change is not None
    assert explanation.change.what == "set the option assume to {'mask': 'causal'}"


def test_an_option_is_a_change():
    example = next(each for each in declared()["page_gather"] if not each.refusal)
    report = explained(example.function, example.inputs(torch.bfloat16))
    refusal = next(each for each in report.refusals if "set the option plan_lower" in each.reason)
    (explanation,) = report.why(refusal)
    assert explanation.change is not None
    assert explanation.change.what == "set the option plan_lower to 'eager'"
    eager = fusion.explain(
        example.function, *example.inputs(torch.bfloat16), options={**OPTIONS, "plan_lower": "eager"}
    )
    assert explanation.change.rule in {each.rule for each in eager.matches}
