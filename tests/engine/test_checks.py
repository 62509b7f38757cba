"""Checks of rules that are handed over: what is declared wrongly is an error before a model is compiled."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fusion
from fusion import (
    Captures,
    FusionBackend,
    FusionPass,
    Group,
    Library,
    Rule,
    lookalike,
    lowering,
    pattern,
    reader,
    require,
    scalar,
    tensor,
    variants,
    word,
)
from fusion.errors import RuleError
from fusion.language.checks import check_library
from fusion.language.rule import lacking

from .graphs import norm, numbers
from .rules import DoubleExp

X, W = numbers(2, 3, 64), numbers(64, seed=1)
HOST = {"target": "host", "lower": "eager"}


@dataclass(frozen=True)
class Tables(Group):
    """Two tables."""

    cos: Any = tensor("D")
    sin: Any = tensor("D")

    def refuse(self, x: Any) -> None:
        """Refuse all that is not of rank 2."""
        require(x.rank == 2, "x has rank {rank}", rang=x.rank)


def sound(**methods: Any) -> Rule:
    """Make a rule in which nothing is wrong but what is given."""

    @pattern
    def written(self: Any, p: Any, x: Any = tensor("*B D"), factor: Any = scalar()) -> Any:
        return p.scale(p.op("exp", x), factor)

    @lowering
    def run(self: Any, x: Tensor) -> Tensor:
        return x.exp2()

    members = {"written": written, "run": run, **methods}
    kind = type("Mine", (Rule,), {name: each for name, each in members.items() if each is not None})
    return dataclass(frozen=True)(kind)()


def form(method: Callable[..., Any]) -> Rule:
    return sound(written=pattern(method))


def word_of_a_rule(self, p, x=tensor("*B D"), gamma=tensor("D"), eps=scalar()):
    return p.rms_nrom(x=x, gamma=gamma, eps=eps)


def word_of_a_reader(self, p, x=tensor("*B D"), w=tensor("E D")):
    return p.liner(x=x, weight=w)


def argument_of_a_word_of_a_reader(self, p, x=tensor("*B D"), w=tensor("E D")):
    return p.linear(x=x, weigth=w)


def argument_of_a_rule(self, p, x=tensor("*B D"), gamma=tensor("D"), eps=scalar()):
    return p.rms_norm(x=x, gama=gamma, eps=eps)


def too_few_arguments_of_a_rule(self, p, x=tensor("*B D")):
    return p.rms_norm(x=x)


def function_of_forms(self, p, x=tensor("*B D")):
    return p.rsqt(x)


def argument_of_a_function_of_forms(self, p, x=tensor("*B D")):
    return p.mean(x, dim=-1)


def attribute_in_the_place_of_a_tensor(self, p, x=tensor("*B D"), factor=scalar()):
    return p.op("exp", factor)


def nothing_returned(self, p, x=tensor("*B D")):
    p.op("exp", x)


def without_vocabulary(self, x=tensor("*B D")):
    return x * x


def undeclared(self, p, x):
    return p.op("exp", x)


def declared_as_a_number(self, p, x=3):
    return p.op("exp", x)


def raising(self, p, x=tensor("*B D")):
    y = x * x
    return y.shape


FORMS = {
    word_of_a_rule: (1, "'rms_nrom', which no rule or reader gives; did you mean 'rms_norm'?"),
    word_of_a_reader: (1, "'liner', which no rule or reader gives; did you mean 'linear'?"),
    argument_of_a_word_of_a_reader: (1, "linear of 'weigth', which is no capture of it; did you mean 'weight'?"),
    argument_of_a_rule: (1, "rms_norm of 'gama', which it never takes; did you mean 'gamma'?"),
    too_few_arguments_of_a_rule: (1, "rms_norm of x, but no match of it takes these alone; name all"),
    function_of_forms: (1, "p.rsqt is no function of forms; did you mean p.rsqrt?"),
    argument_of_a_function_of_forms: (1, "it raised TypeError: .*'dim'"),
    attribute_in_the_place_of_a_tensor: (0, "exp is applied to Parameter.*; apply it to tensors"),
    nothing_returned: (0, "it returned None; return the term"),
    without_vocabulary: (0, "its first parameter is no vocabulary; declare it as"),
    undeclared: (None, "capture 'x' is declared without a default; declare it with tensor"),
    declared_as_a_number: (None, "capture 'x' is declared as 3; declare it with tensor"),
    raising: (2, "it raised AttributeError: .*shape"),
}
"""By form: which of its lines the error names, counted from `def`, and what it says."""


@pytest.mark.parametrize(("method", "line", "text"), [(each, *wrong) for each, wrong in FORMS.items()])
def test_a_form_that_is_declared_wrongly_is_an_error_with_its_line(method: Any, line: int | None, text: str):
    with pytest.raises(RuleError, match=text) as caught:
        FusionBackend(HOST, fusion.installed() + form(method))
    assert "mine" in str(caught.value).lower()
    if line is not None:
        assert f"{__file__}:{method.__code__.co_firstlineno + line}" in str(caught.value)


def guard_of_another_name(self, factr):
    require(factr == 2, "no")


def guard_that_returns(self, factor):
    return factor == 2


def guard_that_returns_both(self, factor):
    if factor > 3:
        return False
    return factor > 1 and factor != 2


def guard_that_yields(self, factor):
    yield factor == 2


def guard_without_a_field(self, factor):
    require(factor > 1, "{factor} is too small", factor=factor)
    require(
        factor == 2,
        "the factor is {factor}, not {wanted}",
        factor=factor,
    )


def guard_with_a_brace(self, factor):
    require(factor == 2, "the set {2 does not hold it")


def remark_of_another_name(self, machin):
    return f"on {machin}"


def within_of_another_name(self, fctor):
    return frozenset()


@dataclass(frozen=True)
class MisnamedMatch(Captures):
    """A record with a field that no form captures."""

    x: Tensor
    factr: float


def run_of_a_misnamed_match(self, match: MisnamedMatch):
    return match.x * match.factr


METHODS = {
    "guard, argument": (dict(guard=guard_of_another_name), "argument 'factr'; did you mean 'factor'?"),
    "guard, result": (dict(guard=guard_that_returns), "it returns a value, which refuses nothing; refuse with require"),
    "guard, one of its results": (dict(guard=guard_that_returns_both), "it returns a value"),
    "guard, generator": (dict(guard=guard_that_yields), "it returns a value"),
    "guard, field": (dict(guard=guard_without_a_field), "names {wanted}, which is not given; give it by that name"),
    "guard, brace": (dict(guard=guard_with_a_brace), "cannot be formatted"),
    "remark, argument": (dict(remark=remark_of_another_name), "argument 'machin'; did you mean 'machine'?"),
    "within, argument": (dict(within=within_of_another_name), "argument 'fctor'; did you mean 'factor'?"),
    "lowering, argument": (dict(run=lowering(lambda self, y: y)), "no form captures its argument 'y'"),
    "lowering, field of its record": (
        dict(run=lowering(run_of_a_misnamed_match)),
        "no form captures its argument 'factr'; did you mean 'factor'?",
    ),
    "lowering, result": (dict(run=lowering(lambda self, x: None)), "it returns nothing; return the tensors"),
    "no form": (dict(written=None), "it is recognised in no form; mark a method with @pattern"),
    "no lowering": (dict(run=None), "there is no way to run it; mark a method with @lowering"),
    "look-alike, field": (
        dict(plain=lookalike("times {faktor}")(lambda self, p, x=tensor("D"), factor=scalar(): p.scale(x, factor))),
        "names {faktor}, which is not given",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("methods", "text"), METHODS.values(), ids=METHODS)
def test_a_method_that_is_declared_wrongly_is_an_error_that_names_it(methods: dict[str, Any], text: str):
    with pytest.raises(RuleError, match=re.escape(text)) as caught:
        FusionBackend(HOST, [sound(**methods)])
    (name, method) = next(iter(methods.items()))
    assert "rule mine: Mine" in str(caught.value)
    if method is not None:
        assert f"Mine.{name} ({__file__}:" in str(caught.value)


UNSUITABLE: dict[str, tuple[dict[str, Any], str]] = {
    "memoised": (
        dict(guard=functools.cache(lambda self, factor: None)),
        r"Mine\.guard: .*no plain method; write `def gu",
    ),
    "partial": (dict(guard=functools.partialmethod(lambda self, k, x: None, 2)), r"Mine\.guard: .* is no plain method"),
    "a value": (
        dict(readers_of_results=3),
        r"Mine\.readers_of_results: it is 3, which is no plain method; write `def readers_of_results\(self",
    ),
    "memoised lowering": (dict(run=lowering(functools.cache(lambda self, x: x))), r"Mine\.run: .* is no plain method"),
    "of the class": (dict(guard=classmethod(lambda cls, x: None)), r"Mine\.guard \(.*write it without @classmethod"),
    "any arguments": (dict(run=lowering(lambda self, *x: x)), r"Mine\.run \(.*its argument \*x names no capture"),
    "any keywords": (dict(guard=lambda self, **each: None), r"Mine\.guard \(.*its argument \*\*each names no capture"),
    "opt_in": (dict(opt_in="yes"), r"Mine\.opt_in: it is 'yes'; write True or False"),
    "aliases": (dict(aliases="mine"), r"Mine\.aliases: it is 'mine'; write a tuple of names"),
    "readers": (
        dict(readers_of_results=lambda self: {"atention"}),
        "is offered beside 'atention', which is no rule.*'attention'",
    ),
}


@pytest.mark.parametrize(("methods", "text"), UNSUITABLE.values(), ids=UNSUITABLE)
def test_what_is_no_method_or_names_no_rule_is_an_error(methods: dict[str, Any], text: str):
    with pytest.raises(RuleError, match=text):
        FusionBackend(HOST, [sound(**methods)])


def test_the_line_of_a_text_and_of_a_result_is_named():
    for method, line in ((guard_without_a_field, 2), (guard_that_returns_both, 2)):
        with pytest.raises(RuleError, match=rf"{__file__}:{method.__code__.co_firstlineno + line}\)"):
            FusionBackend(HOST, [sound(guard=method)])


def test_a_text_of_a_group_is_checked_with_the_rule_that_takes_it():
    def turned(self, p, x=tensor("*B D"), tables=Tables):
        return x * tables.cos + p.op("neg", x) * tables.sin

    with pytest.raises(RuleError, match=re.escape("Mine.Tables.refuse") + ".*names {rank}"):
        FusionBackend(HOST, [sound(written=pattern(turned))])


def test_a_sound_rule_is_accepted_in_every_way_to_write_one():
    def returning_calls(self, x, factor):
        return require(factor == 2, "not {factor}", factor=factor)

    def asking_for_nothing(self):
        """Refuse nothing."""

    chosen = variants(how=(1, 2))(lambda self, x, factor, how: (x * factor * how, x))
    for methods in (
        dict(guard=returning_calls),
        dict(guard=asking_for_nothing),
        dict(guard=staticmethod(lambda factor: require(factor == 2, "not {factor}", factor=factor))),
        dict(guard=functools.wraps(asking_for_nothing)(lambda *given: asking_for_nothing(*given))),
        dict(readers_of_results=lambda self: frozenset({"attention"})),
        dict(remark=lambda self, x, lowering, machine: f"{lowering} on {machine.name}"),
        dict(run=lowering(chosen)),
        dict(guard=lambda self, factor: require(factor == 2, "{factor.real}, {factor!r} {{}}", factor=factor)),
    ):
        FusionBackend(HOST, [sound(**methods)])


class Annotated(DoubleExp):
    """A rule with a field that no dataclass makes."""

    factor: int = 2


class Assigned(DoubleExp):
    """A rule with a value that equality does not look at."""

    def __init__(self) -> None:
        self.factor = 2


class Plain(DoubleExp):
    """A rule without fields, which needs no decorator."""

    opt_in: ClassVar[bool] = False

    @functools.cached_property
    def number(self) -> int:
        """Memoised."""
        return 1


@dataclass(frozen=True)
class Listed(DoubleExp):
    """A rule with a value that can change."""

    numbers: Any = ()


HANDED: dict[str, tuple[Callable[[], Any], str]] = {
    "a class": (lambda: [DoubleExp], "DoubleExp is a class; hand over an instance, DoubleExp()"),
    "a class alone": (lambda: DoubleExp, "DoubleExp is a class; hand over an instance, DoubleExp()"),
    "a name": (lambda: ["rms_norm"], "'rms_norm' is a name; the option `rules` takes the names"),
    "a name alone": (lambda: "rms_norm", "'rms_norm' is a name"),
    "a function": (lambda: [norm], "is a function; mark a reader with @reader"),
    "a number": (lambda: 3, "3 is no rule, no reader and no operator; hand over instances"),
    "a field of no dataclass": (lambda: [Annotated()], "Annotated.factor: it is no field of a frozen dataclass; write"),
    "a value of no dataclass": (lambda: [Assigned()], "Assigned.factor: it is no field of a frozen dataclass; write"),
    "two of one name": (
        lambda: [DoubleExp(), DoubleExp()],
        "the rule 'double_exp' is provided twice, by tests.engine.rules.DoubleExp; rename one of them, or leave one",
    ),
    "an installed one": (lambda: fusion.installed() + fusion.installed().rules[0], "the rule 'rms_norm' is provided"),
    "a value that changes": (lambda: [Listed([1])], "has a field that cannot be hashed"),
    "a rule among readers": (lambda: Library((), (DoubleExp(),)), "write Library(rules, readers, operators, packages)"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize(("given", "text"), HANDED.values(), ids=HANDED)
def test_what_is_no_rule_is_an_error_at_every_door(given: Callable[[], Any], text: str):
    for door in (
        lambda rules: FusionBackend(HOST, rules),
        lambda rules: FusionPass(HOST, rules),
        lambda rules: fusion.explain(norm, X, W, options=HOST, rules=rules),
    ):
        with pytest.raises(RuleError, match=re.escape(text)):
            door(given())


def test_a_rule_without_fields_needs_no_decorator():
    rule = Plain()
    assert rule.number == 1
    FusionBackend(HOST, [rule])


def test_a_word_that_is_a_rule_already_is_an_error():
    @reader(gives=(word("double_exp", "exp(x) · 2", x="[*B, D]"),))
    def found(graph: Any) -> Any:
        return iter(())

    with pytest.raises(RuleError, match="the word 'double_exp' is provided twice, by the reader found and by the rule"):
        Library((DoubleExp(),), (found,))


@dataclass(frozen=True)
class ExpOfNorm(Rule):
    """exp of an RMS norm."""

    @pattern
    def written(self, p, x=tensor("*B D"), gamma=tensor("D"), eps=scalar()):
        """Of an installed rule."""
        return p.op("exp", p.rms_norm(x=x, gamma=gamma, eps=eps))

    @lowering
    def run(self, x, gamma, eps):
        """Run as it came."""
        return torch.ops.aten.exp2(torch.ops.npu.npu_rms_norm(x, gamma, eps)[0])


def test_a_word_that_is_installed_and_not_handed_over_is_named():
    with pytest.raises(
        RuleError, match=r"'rms_norm', which is installed but not among .*hand over `fusion.installed\(\) \+"
    ):
        FusionBackend(HOST, [ExpOfNorm()])


def test_rules_are_added_to_those_that_are_installed():
    known = fusion.installed()
    more = known + [ExpOfNorm()]  # noqa: RUF005
    assert more == known + ExpOfNorm() == known + Library((ExpOfNorm(),))
    assert more.rules == (*known.rules, ExpOfNorm())
    assert ([ExpOfNorm()] + known).rules == (ExpOfNorm(), *known.rules)  # noqa: RUF005
    report = fusion.explain(lambda x, w: norm(x, w).exp(), X, W, options=HOST, rules=more)
    assert [each.rule for each in report.matches] == ["exp_of_norm"]


def test_readers_are_added_too():
    @reader(gives=(word("doubled", "x + x", x="[*B, D]"),))
    def doubles(graph: Any) -> Any:
        return iter(())

    both = Library.of([DoubleExp(), doubles])
    assert (both.rules, both.readers) == ((DoubleExp(),), (doubles,))
    assert (fusion.installed() + doubles).readers[-1] is doubles
    assert FusionBackend(HOST, [DoubleExp(), doubles]).rules == (
        Library((), fusion.installed().readers) + [DoubleExp(), doubles]  # noqa: RUF005
    )


def test_what_only_running_shows_is_told_there():
    """A guard that returns what another function says, and a lowering whose result nobody knows."""
    answers = {"guard": lambda self, factor: bool.__eq__(True, factor), "run": lowering(lambda self, x: print(end=""))}
    for name, text in (("guard", "its guard raised TypeError: it returned"), ("run", "it returned nothing")):
        rule = sound(**{name: answers[name]})
        report = fusion.explain(lambda x: x.exp() * 2, X, options=HOST, rules=[rule])
        assert any(text in each.reason for each in report.refusals), report


def test_a_text_without_a_field_is_told_where_it_refuses():
    with pytest.raises(TypeError, match=r"names \{b\}, which is not given"):
        require(False, "{a} and {b}", a=1)
    require(True, "{a} and {b}", a=1)
    assert lacking("{a.b[0]!r:>3} {{c}}", {"a"}) == ""


def test_a_library_is_checked_once(monkeypatch: pytest.MonkeyPatch):
    from fusion.frontend import library

    checked: list[Library] = []
    library._checked.cache_clear()
    monkeypatch.setattr(library, "check_library", lambda each, hints: checked.append(each))
    for _ in range(3):
        FusionBackend(HOST, (DoubleExp(),))
    assert len(checked) == 1


def test_the_installed_library_is_sound():
    check_library(fusion.installed())
