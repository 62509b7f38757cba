"""Matching: products in any order, casts pinned to their dtype, several results, and nothing that is not proven."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

from fusion import Options, Rule, lookalike, lowering, pattern, require, scalar, tensor
from fusion.errors import RuleError
from fusion.frontend.backend import FusionBackend
from fusion.graph import Miss, Reading, Readings
from fusion.language import captured, levels
from fusion.stages.match import Search, match

from .graphs import norm, numbers, read_graph, rotate, said, traced
from .rules import DoubleExp, Scores, WrongNorm

X, Y, A, B = numbers(2, 3, 8), numbers(2, 3, 8, seed=1), numbers(8, seed=2), numbers(8, seed=3)


def found(function, args, *rules, unsafe=frozenset()):
    return match(read_graph(traced(function, *args).graph), rules, unsafe)


class Triple(Rule):
    """x · y · sigmoid(x)."""

    @pattern
    def written(self, p, x=tensor("*B D"), y=tensor("*B D")):
        """Silu times another."""
        return p.silu(x) * y

    @lowering
    def none(self, x, y):
        """Never run here."""
        return x * y


@pytest.mark.parametrize("order", itertools.permutations(range(3)), ids=str)
@pytest.mark.parametrize("left", [True, False])
@pytest.mark.rotates(3)
def test_products_match_in_any_order_and_association(order, left):
    def form(x, y):
        factors = (x, y, torch.sigmoid(x))
        one, two, three = factors[order[0]], factors[order[1]], factors[order[2]]
        return (one * two) * three if left else one * (two * three)

    (one,) = found(form, (X, Y), Triple()).matches
    assert one.captures["x"].attrs[0] != one.captures["y"].attrs[0]
    assert f"sigmoid({said(one.captures['x'])})" in said(one.results[0])


def test_a_product_of_more_factors_leaves_the_rest_to_the_last_capture():
    matches = found(lambda x, y, a: x * a * torch.sigmoid(x) * y, (X, Y, A), Triple()).matches
    assert {one.captures["y"].op for one in matches} == {"mul"}


def test_a_form_is_tried_only_above_what_it_needs_most_rarely(monkeypatch: pytest.MonkeyPatch):
    tried: list[str] = []
    attempt = Search._try
    monkeypatch.setattr(Search, "_try", lambda *given: tried.append(said(given[3])) or attempt(*given))

    def form(x, y, a):
        return (x * a) * y, (y * a).exp() * x, torch.sigmoid(x) * x * y, torch.sigmoid(y).exp() * y

    (one,) = found(form, (X, Y, A), Triple()).matches
    assert said(one.results[0]) in tried
    assert len(tried) == 2, "the product below, and that of all factors"
    assert all("sigmoid" in each for each in tried)


def test_a_cast_is_taken_only_to_the_dtype_that_the_pattern_pins():
    def through(dtype):
        def form(x, a, b):
            s = (x * a).to(dtype) + (x * b).to(dtype)
            return s, s.mean(-1, keepdim=True)

        return form

    half = [each.half() for each in (X, A, B)]
    assert len(found(through(torch.float32), half, Scores()).matches) == 1
    assert not found(through(torch.bfloat16), half, Scores()).matches, "a rounding of the user's own was swallowed"
    assert len(found(through(torch.float16), half, Scores()).matches) == 1, "no cast at all"


def test_several_results_are_one_match_and_attributes_are_captured():
    (one,) = found(lambda x, a, b: (x * a + x * b, (x * a + x * b).mean(-1, keepdim=True)), (X, A, B), Scores()).matches
    assert len(one.results) == len(one.roots) == 2
    assert one.captures["dims"] == -1
    assert [len(makers) for makers in one.roots] == [2, 1], "what is written twice is one value"


def test_all_results_have_to_be_there():
    assert not found(lambda x, a, b: x * a + x * b, (X, A, B), Scores()).matches


def test_dims_have_to_fit():
    assert len(found(norm, (X, A), WrongNorm()).matches) == 1
    assert not found(norm, (X, numbers(3, 1)), WrongNorm()).matches
    assert len(found(norm, (X, A[None, None]), WrongNorm()).matches) == 1, "leading dims of size 1 are none"


def test_guard_refuses_with_its_text_unless_unsafe():
    rule = DoubleExp()
    assert found(lambda x: x.exp() * 2, (X,), rule).matches
    refused = found(lambda x: x.exp() * 3, (X,), rule)
    assert not refused.matches
    assert [each.reason for each in refused.refusals] == ["the factor is 3.0, not 2"]
    assert found(lambda x: x.exp() * 3, (X,), rule, unsafe=frozenset({rule.name})).matches
    unasked = match(read_graph(traced(lambda x: x.exp() * 3, X).graph), (rule,), diagnose=False)
    assert not unasked.matches
    assert not unasked.refusals


def test_a_match_never_takes_what_its_own_result_is_needed_for():
    from patterns.norm.add_norm import AddNorm
    from patterns.norm.layer_norm import LayerNorm
    from patterns.norm.rms_norm import RMSNorm

    def form(x, y, w):
        s = x + y
        n = norm(s, w)
        return s + n * torch.sigmoid(n)

    one = numbers(1, 1, 8)
    for each in found(form, (one, numbers(1, 1, 8, seed=1), A), AddNorm(), RMSNorm(), LayerNorm()).matches:
        gamma = each.captures.get("norm.gamma")
        assert len(each.results) == 1 or gamma is None or gamma.op == "input"


def test_pairs_are_found_once_and_only_with_the_same_tables():
    from patterns.rotary.rope import Rope

    q, k, cos, sin = numbers(2, 4, 3, 8), numbers(2, 2, 3, 8, seed=1), numbers(3, 8, seed=2), numbers(3, 8, seed=3)
    pair = found(lambda q, k, c, s: (rotate(q, c, s), rotate(k, c, s)), (q, k, cos, sin), Rope())
    assert sorted(len(each.results) for each in pair.matches) == [1, 1, 2]
    other = found(lambda q, k, c, s: (rotate(q, c, s), rotate(k, c.cos(), s.sin())), (q, k, cos, sin), Rope())
    assert [len(each.results) for each in other.matches] == [1, 1]


class ExpOfNorm(Rule):
    """Exp of a norm without weight."""

    @pattern
    def written(self, p, x=tensor("*B D"), eps=scalar()):
        """Speaks of x and eps alone."""
        return p.op("exp", p.rms_norm(x=x, eps=eps))

    @lowering
    def none(self, x):
        """Never run here."""
        return x


def test_what_a_meaning_takes_beyond_what_a_pattern_names_is_never_lost():
    from patterns.norm.rms_norm import RMSNorm

    def exp_of_norms(*rules):
        def form(x, w):
            return norm(x, w).exp(), (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).exp()

        return [each for each in found(form, (X, A), *rules).matches if each.rule.name == "exp_of_norm"]

    assert len(exp_of_norms(RMSNorm(), ExpOfNorm())) == 1


class Above(Rule):
    """exp of what DoubleExp reads."""

    @pattern
    def written(self, p, x=tensor("*B D"), factor=scalar()):
        """Uses a meaning."""
        return p.op("exp", p.double_exp(x=x, factor=factor))

    @lowering
    def none(self, x):
        """Never run here."""
        return x


class Below(Rule):
    """Uses what uses it."""

    @pattern
    def written(self, p, x=tensor("*B D")):
        """A circle."""
        return p.op("exp", p.circle(x=x))


class Circle(Rule):
    """The other half of the circle."""

    @pattern
    def written(self, p, x=tensor("*B D")):
        """A circle."""
        return p.op("exp", p.below(x=x))


def test_levels_follow_from_what_rules_use():
    above, double = Above(), DoubleExp()
    assert levels([above, double]) == [[double], [above]]
    assert {each.rule.name for each in found(lambda x: (x.exp() * 2).exp(), (X,), above, double).matches} == {
        "above", "double_exp",
    }  # fmt: skip
    with pytest.raises(RuleError, match="circle"):
        levels([Below(), Circle()])


def test_what_a_pattern_takes_must_be_declared():
    class Undeclared(Rule):
        @pattern
        def written(self, p, x=3):
            return p.op("exp", x)

    with pytest.raises(RuleError, match=r"tracing pattern Undeclared.written: capture 'x'"):
        Undeclared().patterns()


def test_captures_are_given_by_name():
    form = WrongNorm().patterns()[0]
    assert set(form.captures) == {"x", "gamma", "eps"}
    assert captured(form, {form.captures["eps"]: 1e-6}) == {"eps": 1e-6}


# one of several -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wave(Rule):
    """sin(exp(x)) of eight lanes, in two forms that are the same."""

    @pattern
    def first(self, p, x=tensor("*B D")):
        """As it is."""
        return p.op("sin", p.op("exp", x))

    @pattern
    def second(self, p, x=tensor("*B D")):
        """Again."""
        return p.op("sin", p.op("exp", x))

    @lookalike("its angle is no exponential")
    def plain(self, p, x=tensor("*B D")):
        """sin(x)."""
        return p.op("sin", x)

    @lookalike("it is the power {x}")
    def power(self, p, x=tensor("*B D")):
        """x ** y, which a division holds."""
        return p.op("power", x)

    @lookalike("they are two", apart=("x", "y"))
    def joined(self, p, x=tensor("*B D"), y=tensor("*B D")):
        """Two, one behind the other."""
        return p.op("cat", x, y)

    def guard(self, x):
        """Eight lanes."""
        require(x.shape[-1] == 8, "there are {lanes} lanes", lanes=x.shape[-1])

    @lowering
    def none(self, x):
        """Never run here."""
        return x


@dataclass(frozen=True)
class Quotient(Rule):
    """x / y, and 1 / y, which no node holds."""

    @pattern
    def written(self, p, x=tensor("*B D"), y=tensor("*B D")):
        """The quotient and the reciprocal in it."""
        inverse = p.op("power", y)
        return p.op("mul", x, inverse), inverse

    @lowering
    def none(self, x, y):
        """Never run here."""
        return x, y


@dataclass(frozen=True)
class Both(Rule):
    """Two meanings of one x."""

    @pattern
    def written(self, p, x=tensor("*B D")):
        """Of two values."""
        return p.one_meaning(x=x), p.other_meaning(x=x)

    @lowering
    def none(self, x):
        """Never run here."""
        return x, x


def reasons(function, *args, rules=(Wave(),)):
    return [each.reason for each in found(function, args, *rules).refusals]


def test_of_forms_that_hold_at_one_value_the_first_is_the_match():
    (one,) = found(lambda x: x.exp().sin(), (X,), Wave()).matches
    assert one.form == "first"


def test_what_forms_refuse_alike_is_told_once_and_of_no_variant():
    (refusal,) = found(lambda x: x.exp().sin(), (X[..., :4].clone(),), Wave()).refusals
    assert (refusal.reason, refusal.variant) == ("there are 4 lanes", "")


def test_a_refusal_says_nothing_of_what_was_captured():
    narrow = X[..., :4].clone()
    assert reasons(lambda x: x.sin().exp().sin(), narrow) == ["there are 4 lanes", "its angle is no exponential"]
    assert not reasons(lambda x: x.exp().sin(), X)


def test_what_another_rule_recognises_is_still_told_of():
    class Sine(Triple):
        @pattern
        def written(self, p, x=tensor("*B D")):
            """sin(x)."""
            return p.op("sin", x)

    assert reasons(lambda x: x.sin(), X, rules=(Sine(), Wave())) == ["its angle is no exponential"]


def test_what_a_node_holds_inside_is_told_of_unless_the_node_is_recognised():
    (told,) = reasons(lambda x, y: x / y, X, Y)
    assert told.startswith("it is the power")
    (one,) = found(lambda x, y: x / y, (X, Y), Wave(), Quotient()).matches
    assert [len(makers) for makers in one.roots] == [1, 0]
    assert not reasons(lambda x, y: x / y, X, Y, rules=(Wave(), Quotient()))


def test_captures_that_have_to_be_apart_are():
    assert reasons(lambda x, y: torch.cat((x, y)), X, Y) == ["they are two"]
    assert not reasons(lambda x: torch.cat((x, x)), X)


def test_two_results_with_meanings_of_their_own_are_two_values():
    graph = read_graph(traced(lambda x: (x.exp(), x.sin()), X).graph)
    exp, sin = (graph.value_of[node] for node in graph.source.output_node().args[0])
    means = [(exp, Reading(name, {"x": exp.arg})) for name in ("one_meaning", "other_meaning")]
    graph = replace(graph, readings=Readings().joined([*means, (sin, means[1][1])]))
    (one,) = match(graph, (Both(),)).matches
    assert one.results == (exp, sin)


def test_a_miss_is_told_unless_it_was_read_as_that_after_all():
    graph = read_graph(traced(lambda x: x.exp().sin(), X).graph)
    (value,) = (graph.value_of[node] for node in graph.source.output_node().args[0])
    missed = replace(graph, readings=Readings().joined([(value, Miss("other", "it is none"))]))
    for rule in (Quotient(), Wave()):  # of one that is taken for something else it is told only where that is not fused
        assert [each.reason for each in match(missed, (rule,)).refusals] == ["it is none"]
    read = replace(graph, readings=missed.readings.joined([(value, Reading("other", {}))]))
    assert not match(read, (Wave(),)).refusals


@dataclass(frozen=True)
class Near(Rule):
    """x · exp(x), and what is near to it: the nearest first."""

    @pattern
    def written(self, p, x=tensor("*B D")):
        """The product."""
        return x * p.op("exp", x)

    @lookalike("it is no exponential, but a sine")
    def of_sine(self, p, x=tensor("*B D"), y=tensor("*B D")):
        """sin(x) · y."""
        return p.op("sin", x) * y

    @lookalike("it is any product")
    def of_two(self, p, x=tensor("*B D"), y=tensor("*B D")):
        """x · y."""
        return x * y

    def guard(self, x):
        """Eight lanes."""
        require(x.shape[-1] == 8, "there are other lanes than 8")

    @lowering
    def none(self, x):
        """Never run here."""
        return x


class Product(Near):
    """Products of eight lanes, which are told of by the guard alone."""

    @pattern
    def written(self, p, x=tensor("*B D"), y=tensor("*B D")):
        """Any."""
        return x * y


def test_of_look_alikes_of_one_value_the_first_is_told():
    assert reasons(lambda x, y: x.sin() * y, X, Y, rules=(Near(),)) == ["it is no exponential, but a sine"]
    assert reasons(lambda x, y: x * y, X, Y, rules=(Near(),)) == ["it is any product"]


def test_look_alikes_are_searched_for_a_report_and_not_for_a_compilation(monkeypatch: pytest.MonkeyPatch):
    searched: list[str] = []
    note = Search.note_lookalikes
    monkeypatch.setattr(Search, "note_lookalikes", lambda self, rule: (searched.append(rule.name), note(self, rule)))
    torch.compiler.reset()
    torch.compile(lambda x, y: x * y, backend=FusionBackend(Options(target="host", lower="eager"), (Near(),)))(X, Y)
    assert not searched
    assert reasons(lambda x, y: x * y, X, Y, rules=(Near(),)) == ["it is any product"]
    assert searched == ["near"]


def test_what_was_recognised_is_not_told_of_with_more_factors():
    assert not reasons(lambda x, y: x * x.exp() * y, X, Y, rules=(Near(),))
    assert reasons(lambda x, y: (x * x.exp()).cos() * y, X, Y, rules=(Near(),)) == ["it is any product"]


def test_where_a_guard_has_said_why_look_alikes_of_other_rules_are_not_told():
    narrow = X[..., :4].clone(), Y[..., :4].clone()
    assert reasons(lambda x, y: x * y, *narrow, rules=(Near(),)) == ["it is any product"]
    assert reasons(lambda x, y: x * y, *narrow, rules=(Product(), Near())) == ["there are other lanes than 8"]
