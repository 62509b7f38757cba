"""The library of rules: what the entry points of group `fusion.patterns` provide, filtered by the options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from fusion.errors import NoRulesError, OptionError, RuleError
from fusion.language import Example, Library, Rule
from fusion.operators import OPERATORS
from fusion.options import Options, check_names

GROUP = "fusion.patterns"
EXAMPLES = "fusion.examples"


@cache
def installed() -> Library:
    """Every rule and every reader that installed packages provide, each under a name of its own.

    Raises:
        NoRulesError: no package provides any.
        RuleError: two packages provide one name, or one uses a word that nothing gives.
    """
    found = Library(())
    for entry in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        found = found.joined(provided_by(entry.load()))
    if not found.rules:
        raise NoRulesError(
            f"loading rules: no installed package provides the entry-point group {GROUP!r}, so nothing could ever be "
            "fused; install the package instead of only importing its folder (pip install -e .)"
        )
    return found.checked()


@cache
def examples() -> Mapping[str, tuple[Example, ...]]:
    """By the name of its rule, what an installed package says how a rule is tried.

    Raises:
        RuleError: two packages try one rule.
    """
    found: dict[str, tuple[Example, ...]] = {}
    for entry in sorted(entry_points(group=EXAMPLES), key=lambda each: each.name):
        for name, tried in entry.load()().items():
            if name in found:
                raise RuleError(f"loading examples from {entry.value}: {name!r} is already tried; rename the rule")
            found[name] = tuple(tried)
    return found


def provided_by(provider: object) -> Library:
    """What the object of an entry point gives: a library, or rules alone, or a function of either."""
    provided: Any = provider() if callable(provider) else provider
    return provided if isinstance(provided, Library) else Library(tuple(provided))


def library_for(options: Options, given: Library | Iterable[Rule] | None = None) -> Library:
    """The rules that these options leave, and all readers; rules that are given alone have the installed readers.

    Raises:
        OptionError: an option names a rule that does not exist (`disable`: neither a rule nor an operator; `opt_in`:
            none that is off otherwise), or `rules` one that is off.
    """
    if not isinstance(given, Library):
        given = installed() if given is None else Library(tuple(given), installed().readers)
    known = [rule.name for rule in given.rules]
    switched = {rule.name for rule in given.rules if rule.opt_in}
    check_names("opt-in rule", options.opt_in, sorted(switched))
    if off := sorted((options.rules & switched) - options.opt_in):
        raise OptionError(f"reading options: rules names {off[0]!r}, which is off; add it to opt_in as well")
    operators = {operator.short.partition(".")[0] for operator in OPERATORS.values()}  # without their overloads
    for names in (options.rules, options.disable - operators, options.unsafe):
        check_names("rule", names, known)
    kept = options.rules or frozenset(known)
    left = (rule for rule in given.rules if rule.name in kept and rule.name not in options.disable)
    return replace(given, rules=tuple(left))
