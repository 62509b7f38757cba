"""The library of rules: those of the entry points of group `fusion.patterns`, filtered by the options.

Entry points of group `fusion.operators` bring operators and packages without rules.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import entry_points

from fusion.errors import NoRulesError, OptionError, RuleError
from fusion.frontend.expectations.contract import expectations
from fusion.language import Example, Library, Reader, Rule
from fusion.language.cache_keys import names_read
from fusion.language.checks import check_library
from fusion.operators import OPERATORS, PACKAGES, provide
from fusion.operators.profiles import PROFILES
from fusion.operators.vendor_versions import PREFIX, versions
from fusion.options import Options, check_names

GROUP = "fusion.patterns"
OPERATORS_GROUP = "fusion.operators"
EXAMPLES = "fusion.examples"
Rules = Library | Iterable[Rule | Reader] | None
"""Rules as users hand them over: a library, or rules and readers, to which the installed ones are added; None for the
installed library."""


@cache
def installed() -> Library:
    """Return the rules, readers, operators and packages that all installed distributions provide; names are unique.

    Raises:
        NoRulesError: no package provides any.
        RuleError: two packages provide one name, or one uses a word that no reader gives.
    """
    library = Library(())
    for group in (OPERATORS_GROUP, GROUP):
        for entry in sorted(entry_points(group=group), key=lambda each: each.name):
            library += provided_by(entry.load())
    if not library.rules:
        raise NoRulesError(
            f"loading rules: no installed package provides the entry-point group {GROUP!r}, so nothing could ever be "
            "fused; install the package instead of only importing its folder (pip install -e .)"
        )
    provide(library.operators, library.packages)
    check_library(library)
    return library


@cache
def examples() -> Mapping[str, tuple[Example, ...]]:
    """Return the examples and rejects of installed packages by the name of their rule.

    Raises:
        RuleError: two packages have examples of one rule.
    """
    by_rule: dict[str, tuple[Example, ...]] = {}
    for entry in sorted(entry_points(group=EXAMPLES), key=lambda each: each.name):
        for name, tried in entry.load()().items():
            if name in by_rule:
                raise RuleError(f"loading examples from {entry.value}: {name!r} is already tried; rename the rule")
            by_rule[name] = tuple(tried)
    return by_rule


def provided_by(provider: object) -> Library:
    """Make a library from the object of an entry point: a library, parts of one, or a function that returns either."""
    return Library.of(provider() if callable(provider) else provider)


def library_for(options: Options, given: object = None) -> Library:
    """Return the library `given` with all its readers, and the rules that `options` select.

    Args:
        options: the options.
        given: a library, a rule, or a collection of rules and readers, to which the installed readers are added; None
            for the installed library.

    Raises:
        OptionError: an option names a rule that does not exist (`disable`: neither a rule nor an operator; `opt_in`:
            no rule that is off by default; `expect`: none at all), `rules` one that is off, or `packages` an unknown
            package or two versions of torch_npu; or the expectations cannot be read.
        RuleError: `given` is declared wrongly.
    """
    library = library_of(given)
    rules = {rule.name: rule for rule in library.rules}
    switched = {name for name, rule in rules.items() if rule.opt_in}
    operators = {operator.short.partition(".")[0] for operator in OPERATORS.values()}  # without their overloads
    _check_rules("rule", options.rules | options.unsafe, library, rules)
    _check_rules("rule", options.disable, library, {*rules, *operators})
    check_names("package", options.packages, [*PACKAGES, *PROFILES, *(f"{PREFIX}{each}" for each in versions())])
    if len(named := sorted(each for each in options.packages if each.startswith(PREFIX))) > 1:
        raise OptionError(f"reading options: packages names {' and '.join(named)}; name one version of torch_npu")
    for name in sorted((options.opt_in & rules.keys()) - switched):
        check_names("opt-in rule", [name], switched, f"{name!r} is on anyway: leave it out. ")
    _check_rules("opt-in rule", options.opt_in, library, switched)
    if off := sorted((options.rules & switched) - options.opt_in):
        raise OptionError(f"reading options: rules names {off[0]!r}, which is off; add it to opt_in as well")
    if options.expect:
        expected = expectations(options.expect)
        for table, named in expected.rules().items():
            _check_rules(f"rule in {table}", named, library, rules, f"reading expectations of {expected.source}")
    names = (options.rules or frozenset(rules)) - options.disable
    return replace(library, rules=tuple(rule for name, rule in rules.items() if name in names))


def library_of(given: object) -> Library:
    """Return the library `given` with all its rules and readers, checked; the installed one if None.

    Raises:
        RuleError: `given` is declared wrongly.
    """
    return installed() if given is None else _checked(completed(given))


def uses_of(given: object) -> dict[str, frozenset[str]]:
    """Map each rule of the library `given`, the installed one if None, to the words and rules that its forms use."""
    return {rule.name: frozenset(rule.uses()) for rule in library_of(given).rules}


def why_unused(rule: str, options: Options, given: object = None) -> str:
    """Return the reason why `rule` is not one of the rules that `library_for` returns, "" if it is one."""
    rules = {each.name: each for each in library_of(given).rules}
    if rule not in rules:
        near = difflib.get_close_matches(rule, rules, n=1, cutoff=0.5)
        return "it is no known rule" + f"; did you mean {near[0]!r}?" * bool(near)
    if rule in options.disable:
        return "the option disable names it; remove it from disable to use it"
    if options.rules and rule not in options.rules:
        return "the option rules does not name it; add it, or leave the option out"
    if rules[rule].opt_in and rule not in options.opt_in:
        return "it is off unless the option opt_in names it; add it to opt_in"
    return ""


def completed(given: object) -> Library:
    """Return `given` if it is a library, else a library of its parts and all that is installed but rules."""
    if isinstance(given, Library):
        return given
    return replace(installed(), rules=()) + given


@cache
def _checked(library: Library) -> Library:
    provide(library.operators, library.packages)
    check_library(library, _installed_names)
    return library


def _installed_names() -> frozenset[str]:
    """List installed rules and words; none where nothing is installed."""
    try:
        library = installed()
    except NoRulesError:
        return frozenset()
    return frozenset([*library.words(), *(rule.name for rule in library.rules)])


def _check_rules(
    what: str, names: Collection[str], library: Library, known: Collection[str], doing: str = "reading options"
) -> None:
    """Raise an OptionError for the first of `names` that is not `known`, with the rule that it may refer to.

    `what` is the option and `doing` the beginning, for the message; `library` has the rules.
    """
    for name in sorted(set(names) - set(known)):
        listed = [rule.name for rule in library.rules if rule.name in known]
        check_names(what, [name], known, rule_called(name, library.rules), listed, doing)


def rule_called(name: str, rules: Iterable[Rule]) -> str:
    """Return a hint for `name` if it is an alias of a rule, one of its forms, or an operator that it emits; else ""."""
    for names_of, verb in ((_name_and_aliases, "is"), (_parts_of, "is part of"), (_operators_of, "is emitted by")):
        named = [rule.name for rule in rules if _plain(name) in map(_plain, names_of(rule))]
        if 0 < len(named) <= _MOST_RULES:
            return f"{name!r} {verb} the rule{'s' * (len(named) > 1)} {', '.join(map(repr, named))}. "
    return ""


_MOST_RULES = 6
"""Most rules in a hint: a name that is part of more rules, such as "written", is too general."""


def _plain(name: str) -> str:
    """Strip `name` of case, hyphens, underscores and namespace."""
    return re.sub(r"[^a-z0-9.]", "", name.lower().rpartition("::")[2])


def _name_and_aliases(rule: Rule) -> Iterable[str]:
    return rule.name, *rule.aliases


def _parts_of(rule: Rule) -> Iterable[str]:
    methods = {each.method for each in (*rule.patterns(), *rule.lookalikes(), *rule.lowerings())}
    return *methods, *(f"{rule.name}.{method}" for method in methods)


@cache
def _operators_of(rule: Rule) -> Iterable[str]:
    """List the operators that the code of `rule` refers to, with their in-place forms."""
    read = names_read(type(rule))
    emitted = [each for each in OPERATORS.values() if each.short.partition(".")[0] in read]
    return [each.partition("::")[2].partition(".")[0] for one in emitted for each in (one.name, one.in_place)]
