"""Groups: captures taken as one, and facets: kinds of group among which the forms of one rule vary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from fusion import (
    Group,
    Library,
    Rule,
    attribute,
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
from fusion.graph import Reading
from fusion.language import call
from fusion.pipeline import fuse_graph
from fusion.stages.match import match

from .graphs import HOST, numbers, read_graph, traced

X, Y, A = numbers(2, 3, 8), numbers(2, 3, 8, seed=1), numbers(8, seed=2)


@dataclass(frozen=True)
class Gated(Group):
    """x · sigmoid(gate)."""

    gate: Any = tensor("*B D")
    bias: Any = tensor("D", optional=True)

    def term(self, p, x):
        return x * p.sigmoid(self.gate)

    def guard(self):
        require(self.bias is None, "a gate has no bias")

    def factor(self):
        return self.gate.sigmoid()


@dataclass(frozen=True)
class Scaled(Group):
    """x · number."""

    number: Any = scalar()

    def term(self, p, x):
        return p.scale(x, self.number)

    def guard(self):
        require(self.number > 0, "{by} is not positive", by=self.number)

    def factor(self):
        return self.number


class Share(Rule):
    """sigmoid(x), gated or scaled."""

    @pattern
    @variants(factor=(Gated, Scaled))
    def written(self, p, factor, x=tensor("*B D")):
        return factor.term(p, p.sigmoid(x))

    def guard(self, factor):
        factor.guard()

    @lowering
    def run(self, x, factor):
        return torch.sigmoid(x) * factor.factor()


@dataclass(frozen=True)
class Halved(Scaled):
    """A kind of another kind."""


class Apart(Rule):
    """The same with a lowering for each choice."""

    @pattern
    @variants(factor=(Gated, Scaled, Halved))
    def written(self, p, factor, x=tensor("*B D")):
        return factor.term(p, p.sigmoid(x))

    @lowering
    @variants(factor=(Gated,), by=("hand", "library"))
    def gated(self, x, factor, by):
        return torch.sigmoid(x) * factor.factor()

    @lowering
    @variants(factor=(Scaled,))
    def scaled(self, x, factor):
        return torch.sigmoid(x) * factor.number

    @lowering
    @variants(factor=(Halved,))
    def halved(self, x, factor):
        return torch.sigmoid(x) * factor.number


@dataclass(frozen=True)
class Closed(Gated):
    """A gate that lets nothing through."""

    def factor(self):
        return 1


class Whole(Rule):
    """A form with one kind of group, and a lowering that takes it as another."""

    @pattern
    def written(self, p, factor=Gated, x=tensor("*B D")):
        return factor.term(p, p.sigmoid(x))

    @lowering
    @variants(factor=(Closed,))
    def run(self, x, factor):
        return x * factor.factor()


@dataclass(frozen=True)
class Divided(Group):
    """x · a half or a quarter."""

    by: Any = attribute(0.5, 0.25)


@dataclass(frozen=True)
class Raised(Group):
    """x · 2 or x · 4."""

    by: Any = attribute(2.0, 4.0)


class Steps(Rule):
    """sigmoid(x), halved or raised."""

    @pattern
    @variants(times=(Divided, Raised))
    def written(self, p, times, x=tensor("*B D")):
        return p.scale(p.sigmoid(x), times.by)


class Neither(Rule):
    """A form whose word nothing gives."""

    @pattern
    def written(self, p, x=tensor("*B D")):
        return p.something(x=x)


def found(function, args, *rules):
    return match(read_graph(traced(function, *args).graph), rules)


def test_a_group_takes_its_captures_as_one():
    (one,) = found(lambda x, y: torch.sigmoid(x) * y.sigmoid(), (X, Y), Share()).matches
    assert set(one.captures) == {"x", "factor", "factor.gate"} or one.captures["factor.bias"] is None
    assert one.captures["factor"] is Gated
    given = {**one.captures, "x": X, "factor.gate": Y}
    torch.testing.assert_close(call(one.rule.run, given), torch.sigmoid(X) * Y.sigmoid())


def test_each_choice_is_matched_for_itself_and_guards_ask_for_it():
    matches = found(lambda x, y: (torch.sigmoid(x) * y.sigmoid(), torch.sigmoid(y) * 2.0), (X, Y), Share()).matches
    assert {one.captures["factor"] for one in matches} == {Gated, Scaled}
    assert {one.form for one in matches} == {"written[Gated]", "written[Scaled]"}
    (refusal,) = found(lambda x: torch.sigmoid(x) * -2.0, (X,), Share()).refusals
    assert refusal.reason == "-2.0 is not positive"


def test_a_lowering_is_for_the_choices_that_it_names():
    matches = found(lambda x, y: (torch.sigmoid(x) * y.sigmoid(), torch.sigmoid(y) * 2.0), (X, Y), Apart()).matches
    ways = {one.form: [each.name for each in one.rule.lowerings() if each.suits(one.choices)] for one in matches}
    assert ways == {
        "written[Gated]": ["gated[Gated, hand]", "gated[Gated, library]"],
        "written[Scaled]": ["scaled[Scaled]"],
        "written[Halved]": ["halved[Halved]"],
    }


def test_a_group_that_no_variant_chose_is_taken_as_a_lowering_says():
    (one,) = found(lambda x, y: torch.sigmoid(x) * y.sigmoid(), (X, Y), Whole()).matches
    (way,) = [each for each in one.rule.lowerings() if each.suits(one.choices)]
    torch.testing.assert_close(way.run(one.rule, {**one.captures, "x": X, "factor.gate": Y}), X)


@pytest.mark.parametrize(("number", "kind"), [(0.25, Divided), (4.0, Raised), (3.0, None)])
def test_an_attribute_may_be_one_of_some(number: float, kind: type[Group] | None):
    found_ = found(lambda x: torch.sigmoid(x) * number, (X,), Steps())
    assert [each.captures["times"] for each in found_.matches] == ([] if kind is None else [kind])
    assert not found_.refusals


def test_a_form_is_not_tried_where_nothing_reads_as_one_of_its_words(monkeypatch):
    monkeypatch.setattr("fusion.stages.match._Search._try", lambda *_: pytest.fail("tried"))
    assert not found(lambda x: torch.sigmoid(x), (X,), Neither()).matches


def test_what_is_no_declaration_is_refused_with_its_name():
    class Wrong(Rule):
        @pattern
        def written(self, p, x=tensor("*B D"), axis=3):
            return p.mean(x)

    with pytest.raises(RuleError, match="'axis' is declared as 3; declare it with tensor"):
        Wrong().patterns()


class Biased(Rule):
    """sigmoid(x + bias), in which a lowering reads the bias where there is one."""

    @pattern
    def written(
        self, p, x=tensor("*B D"), bias=tensor("D", optional=True), by=tensor("D", optional=True, needed=False)
    ):
        return p.biased_sigmoid(x=x, bias=bias, by=by)

    @lowering
    def run(self, x, bias, by):
        return torch.sigmoid(x if bias is None else x + bias) * (1.0 if by is None else by)


@pytest.mark.parametrize("lacking", ["bias", "by"])
def test_what_nothing_gives_is_left_out_only_where_it_is_not_needed(lacking: str):
    """An optional tensor that is there, but cannot be computed, is no tensor that is not there."""

    @reader(gives=(word("biased_sigmoid", "sigmoid of a sum", x="[*B, D]", bias="[D]", by="[D]"),))
    def read(graph):
        for value in list(graph.places):
            if value.op == "sigmoid":
                unknown = graph.algebra.make("of_no_recipe", (), (), (8,), torch.float32)
                yield value, Reading("biased_sigmoid", {"x": value.arg, lacking: unknown})

    gm = traced(lambda x: (torch.sigmoid(x),), X)
    outcome = fuse_graph(gm.graph, Library((Biased(),), (read,)), HOST)
    said = [str(each.reason) for each in outcome.refusals]
    if lacking == "bias":
        assert not outcome.chosen
        assert any("of_no_recipe" in each for each in said), said
    else:
        assert not any("of_no_recipe" in each for each in said), said


@dataclass(frozen=True)
class ApartFromNothing(Rule):
    """A look-alike speaks of a capture that it has not."""

    @lookalike("they are two", apart=("x", "z"))
    def two(self, p, x=tensor("*B"), y=tensor("*B")):
        """x and y."""
        return x + y


def test_what_is_to_be_apart_is_a_capture():
    with pytest.raises(RuleError, match=r"'z' is to be apart, and is no capture: there are \['x', 'y'\]"):
        ApartFromNothing().lookalikes()
