"""Every rule of the library keeps every law, for each of its examples and rejects, in each dtype, at each level."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import patterns
from fusion import Example, Rule, testing
from fusion.errors import OptionError
from fusion.frontend.library import installed, library_for
from fusion.language import Pattern, Refused, Term
from fusion.operators import operator_of
from fusion.options import Options
from fusion.records import Plan
from fusion.testing import DTYPES, LEVELS
from tests.support.tried import cases, tried

pytestmark = pytest.mark.rotates(48)

LIBRARY = Path(inspect.getfile(patterns)).parent


def recognised(rule: Rule) -> list[Example]:
    """The examples of a rule but its rejects."""
    return [each for each in tried()[rule.name] if not each.refusal]


def settings() -> Iterator[Any]:
    """Yield every example at every level in every dtype."""
    for (rule, example), level, dtype in product(cases(installed().rules), LEVELS, DTYPES):
        kind = "reject" if example.refusal else "example"
        name = f"{rule.name}-{kind} {example.name}-{level}-{str(dtype).removeprefix('torch.')}"
        yield pytest.param(rule, example, dtype, level, id=name)


@pytest.mark.parametrize(("rule", "example", "dtype", "level"), settings())
def test_rule_keeps_the_laws(rule: Rule, example: Example, dtype: torch.dtype, level: testing.Level):
    testing.check(rule, example, dtype, level)


@pytest.mark.parametrize("rule", installed().rules, ids=lambda rule: rule.name)
def test_rule_is_tried(rule: Rule):
    own = tried()[rule.name]
    assert sum(not each.refusal for each in own) >= 2
    assert len({each.name for each in own}) == len(own)
    assert rule.reference.__doc__
    assert rule.patterns()
    assert rule.lowerings()


def _choices(form: Pattern) -> frozenset[str]:
    """The form by each thing that it chose."""
    chosen = (getattr(each, "__name__", str(each)) for each in form.choices.values())
    return frozenset(f"{form.method}[{each}]" for each in chosen) or frozenset([form.name])


@pytest.mark.parametrize("rule", installed().rules, ids=lambda rule: rule.name)
def test_every_form_is_used_by_an_example(rule: Rule):
    """An example is fused in it; or, where an operator does not take it, it is what a reject is refused in.

    Of a form that varies each choice is used: their product is taken by the tests of the facets.
    """
    told = {form.name: _choices(form) for form in rule.patterns()}
    declared = frozenset().union(*told.values())
    used = set[str]()
    for dtype, example in product((torch.bfloat16, *DTYPES), tried()[rule.name]):
        if declared <= used:
            break
        t = testing.trial(rule, example, dtype)
        if example.refusal:
            met = {each.variant for each in t.outcome.refusals if isinstance(each.cause, str)}
        else:
            met = {each.match.form for each in t.outcome.chosen}
        used |= set().union(*(told.get(each, ()) for each in met))
    assert declared <= used, f"no example is written as {sorted(declared - used)}"


FORMER = {
    "dynamic_quant": "quantisation",
    "static_quant": "quantisation",
    "rope_pair": "rope",
    "quant_matmul": "quantised_linear",
    "weight_only_linear": "quantised_linear",
    "add_rms_norm": "add_norm",
    "add_layer_norm": "add_norm",
    "expert_gating": "expert_routing",
    "swiglu": "activation",
}


@pytest.mark.parametrize(("former", "rule"), FORMER.items(), ids=FORMER)
def test_a_name_that_a_rule_had_is_told_and_not_passed_over(former: str, rule: str):
    with pytest.raises(OptionError, match=f"{former!r} is not a known rule; .*{rule}"):
        library_for(Options(disable=frozenset({former})))


def test_no_function_of_the_library_has_more_than_ten_parameters():
    """Captures that belong together are a group; groups may hold groups."""
    for path in LIBRARY.rglob("*.py"):
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                given = each.args
                count = len([*given.posonlyargs, *given.args, *given.kwonlyargs])
                assert count <= 10, f"{path.name}:{each.lineno} has {count}"


def test_guards_and_lowerings_take_more_than_six_captures_as_one_record():
    for rule in installed().rules:
        for each in (rule.guard, *(getattr(rule, way.method) for way in rule.lowerings())):
            assert len(inspect.signature(each).parameters) <= 6, f"{rule.name}: {each.__name__}"


def _below(term: Term) -> Iterator[Term]:
    for each in term.below():
        if isinstance(each, Term):
            yield from (each, *_below(each))


def test_a_result_of_a_common_op_comes_before_those_that_it_is_computed_from():
    """They are found in it; the other way round, all values of that op are tried beside each of them."""
    for form in (form for rule in installed().rules for form in rule.patterns()):
        for number, term in enumerate(form.results):
            common = not any(head.startswith("reading:") for head in term.heads())
            assert not common or set(form.results[:number]).isdisjoint(_below(term)), form.name


@pytest.mark.parametrize(
    ("name", "operators", "lowerings"),
    [
        ("sparse_attention", {"npu_transpose_batchmatmul"}, {"indexed[multiplied]", "listed[multiplied]"}),
        pytest.param("mla_prolog", {"npu_mla_prolog_v3"}, {"older[npu_mla_prolog_v2]"}, marks=pytest.mark.rotates),
        pytest.param(
            "mla_prolog",
            {"npu_mla_prolog_v3", "npu_mla_prolog_v2"},
            {"older[npu_mla_prolog]"},
            marks=pytest.mark.rotates,
        ),
    ],
)
def test_what_runs_where_an_operator_is_left_out_means_the_same(name: str, operators: set[str], lowerings: set[str]):
    rule = next(each for each in installed().rules if each.name == name)
    options = Options(target="host", lower="eager", disable=frozenset(operators))
    used: set[str] = set()
    for example in recognised(rule):
        t = testing.trial(rule, example, torch.bfloat16, options=options)
        testing.means_what_it_says(t)
        used |= {each.lowering for each in t.outcome.chosen}
        assert all(named(each.match.rule)[each.lowering] in ("", *called(each.plan)) for each in t.outcome.chosen)
    assert lowerings <= used


def named(rule: Rule) -> dict[str, str]:
    """The operator that each lowering says it is for."""
    return {each.name: each.operator for each in rule.lowerings()}


def called(plan: Plan) -> set[str]:
    """The operators of a plan."""
    return {each.name for each in (operator_of(step.target) for step in plan.steps) if each is not None}


def refusing_texts(source: str) -> set[str]:
    """The texts of `require` and `lookalike` in a module."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    named = [(getattr(call.func, "id", ""), call.args) for call in calls]
    texts = [args[1] if name == "require" else args[0] for name, args in named if name in ("require", "lookalike")]
    return {text.value for text in texts if isinstance(text, ast.Constant) and isinstance(text.value, str)}


@pytest.mark.rotates
def test_every_reason_to_refuse_is_exercised(monkeypatch):
    given: set[str] = set()
    init = Refused.__init__

    def spy(self: Refused, template: str, values: Any) -> None:
        given.add(template)
        init(self, template, values)

    monkeypatch.setattr(Refused, "__init__", spy)
    files = [*LIBRARY.rglob("*.py")]
    written = set[str]().union(*(refusing_texts(each.read_text()) for each in files))
    assert len(written) > 30
    rejects_first = sorted(cases(installed().rules), key=lambda each: not each[1].refusal)
    for target, (rule, example) in product(("host", "ascend910_93"), rejects_first):
        if written <= given:
            break
        testing.trial(rule, example, torch.bfloat16, options=Options(target=target, lower="eager"))
    assert written <= given, f"no example or reject leads to {sorted(written - given)}"


def test_a_law_that_is_broken_is_found():
    class TwiceTheNorm(type(installed().rules[0])):
        def npu(self, x, gamma, weight, eps, factor):
            return 2 * super().npu(x, gamma, weight, eps, factor)

        npu.fusion_role = "lowering"

    rule = TwiceTheNorm()
    example = recognised(installed().rules[0])[0]
    with pytest.raises(AssertionError, match="algebra is wrong"):
        testing.check(rule, example, torch.float32)


def test_an_example_that_is_not_recognised_is_found():
    rule = installed().rules[0]
    example = Example("a scaled sum", lambda x, y: torch.add(x, y) * 3, lambda dtype: (torch.ones(3, dtype=dtype),) * 2)
    with pytest.raises(AssertionError, match="does not recognise") as raised:
        testing.check(rule, example, torch.float32)
    assert str(raised.value).endswith("v2 = scale(v0, 6.0)  float32[3]"), "the normal form of x + x, times 3"


def test_a_reject_that_is_recognised_is_found():
    rule = installed().rules[0]
    example = recognised(rule)[0]
    with pytest.raises(AssertionError, match="must be refused"):
        testing.check(rule, Example(example.name, example.function, example.inputs, "never"), torch.float32)
