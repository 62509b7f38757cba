"""The library of rules: what the entry points of group `fusion.patterns` provide, filtered by the options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points

from fusion.errors import NoRulesError, RuleError
from fusion.language import Example, Rule
from fusion.operators import OPERATORS
from fusion.options import Options, check_names

GROUP = "fusion.patterns"
EXAMPLES = "fusion.examples"


@cache
def installed() -> tuple[Rule, ...]:
    """Every rule that an installed package provides, each under a name of its own.

    Raises:
        NoRulesError: no package provides any.
        RuleError: two packages provide one name.
    """
    found: dict[str, Rule] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda each: each.name):
        for rule in _provided(entry.load()):
            if rule.name in found:
                raise RuleError(
                    f"loading rules from {entry.value}: {rule.name!r} is already provided; rename one of them"
                )
            found[rule.name] = rule
    if not found:
        raise NoRulesError(
            f"loading rules: no installed package provides the entry-point group {GROUP!r}, so nothing could ever be "
            "fused; install the package instead of only importing its folder (pip install -e .)"
        )
    return tuple(found.values())


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


def _provided(provider: object) -> Iterable[Rule]:
    return provider() if callable(provider) else provider  # type: ignore[return-value]


def operator_names() -> frozenset[str]:
    """What the operators that can be emitted are called, without their overloads."""
    return frozenset(operator.short.partition(".")[0] for operator in OPERATORS.values())


def rules_for(options: Options, given: Iterable[Rule] | None = None) -> tuple[Rule, ...]:
    """The rules that these options leave.

    Raises:
        OptionError: an option names a rule that does not exist (`disable`: neither a rule nor an operator).
    """
    rules = tuple(given) if given is not None else installed()
    known = [rule.name for rule in rules]
    for names in (options.rules, options.disable - operator_names(), options.unsafe):
        check_names("rule", names, known)
    kept = options.rules or frozenset(known)
    return tuple(rule for rule in rules if rule.name in kept and rule.name not in options.disable)
