"""Rules that are off unless they are named: they match nothing, refuse nothing, and a wrong name is told."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fusion.errors import OptionError
from fusion.frontend.catalogue import rule_entries
from fusion.frontend.library import installed, library_for
from fusion.language import Library
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.records import Refusal
from tests.engine.graphs import traced
from tests.engine.rules import DoubleExp


@dataclass(frozen=True)
class SwitchedExp(DoubleExp):
    """The stand-in that is easy to count, switched off."""

    opt_in = True


LIBRARY = Library((SwitchedExp(),))


def outcome(function, **options):
    gm = traced(function, torch.ones(2, 3))
    return fuse_graph(gm.graph, LIBRARY, Options(target="host", lower="eager", plan_cache="off", **options))


def twice(x):
    return x.exp() * 2


def thrice(x):
    return x.exp() * 3


def test_it_is_off_unless_it_is_named():
    assert not outcome(twice).chosen
    assert [each.match.rule.name for each in outcome(twice, opt_in="switched_exp").chosen] == ["switched_exp"]


def test_what_is_off_refuses_nothing():
    def refused(**options) -> list[Refusal]:
        return list(outcome(thrice, **options).refusals)

    assert not refused()
    assert [each.reason for each in refused(opt_in={"switched_exp"})] == ["the factor is 3.0, not 2"]


def test_a_name_that_is_no_opt_in_rule_is_told_with_the_nearest():
    with pytest.raises(OptionError, match="not a known opt-in rule; did you mean 'switched_exp'"):
        library_for(Options(opt_in={"switched_exps"}), LIBRARY)
    with pytest.raises(OptionError, match="'rms_norm' is not a known opt-in rule"):
        library_for(Options(opt_in={"rms_norm"}))


def test_rules_that_are_off_are_not_the_only_ones():
    with pytest.raises(OptionError, match="rules names 'switched_exp', which is off; add it to opt_in"):
        library_for(Options(rules={"switched_exp"}), LIBRARY)
    assert library_for(Options(rules={"switched_exp"}, opt_in={"switched_exp"}), LIBRARY).rules == LIBRARY.rules


def test_options_that_differ_in_it_have_other_keys():
    assert Options().key() != Options(opt_in={"switched_exp"}).key()


def test_the_catalogue_says_which_rules_are_off():
    assert {each.name for each in rule_entries() if each.opt_in} == {
        each.name for each in installed().rules if each.opt_in
    }
