"""The catalogue: every operator and every installed rule, as plain data for a terminal, for JSON and for the docs."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

from fusion.frontend.library import GROUP, installed, provided_by, rule_called
from fusion.language import Rule
from fusion.operators import CHIPS, HOST, OPERATORS, PACKAGES, Limit, Operator, Package, package_of
from fusion.operators.packages import import_failure
from fusion.options import check_names


@dataclass(frozen=True)
class OperatorEntry:
    """One operator that is declared.

    Attributes:
        name: qualified name, `npu::npu_rms_norm`.
        package: the package that registers it on an NPU, "" for an unknown one.
        summary: its formula.
        schema: its schema, as torch_npu prints it.
        targets: the chips that have it.
        lowerings: the compilers that support it.
        dims: named dims by argument.
        dtypes: accepted dtypes by argument.
        limits: limits of a call by target.
        computed: the arguments that the decomposition computes.
        uncomputed: by argument, the reason why a call is refused unless the argument has its default.
        without_effect: the arguments that change no result.
        source: sources of these facts.
        older: the name of the operator in an older package, "" for none.
    """

    name: str
    package: str
    summary: str
    schema: str
    targets: tuple[str, ...]
    lowerings: tuple[str, ...]
    dims: dict[str, str]
    dtypes: dict[str, tuple[str, ...]]
    limits: dict[str, tuple[str, ...]]
    computed: tuple[str, ...]
    uncomputed: dict[str, str]
    without_effect: tuple[str, ...]
    source: str
    older: str


@dataclass(frozen=True)
class PackageEntry:
    """One package that registers operators.

    Attributes:
        name: its name, as the option `packages` takes it.
        namespaces: the namespaces of its operators.
        summary: its content.
        source: its repository.
        state: "is imported", or the reason why it cannot be.
    """

    name: str
    namespaces: tuple[str, ...]
    summary: str
    source: str
    state: str


@dataclass(frozen=True)
class RuleEntry:
    """One installed rule.

    Attributes:
        name: the semantic op of its matches.
        meaning: its docstring.
        formula: the first line of its module.
        patterns: description of each form by its name.
        refuses: reason of refusal by lookalike.
        lowerings: description of each lowering by its name.
        uses: the semantic ops that its patterns are made of.
        package: the distribution that provides it.
        opt_in: True if it is off unless the option `opt_in` names it.
    """

    name: str
    meaning: str
    formula: str
    patterns: dict[str, str]
    refuses: dict[str, str]
    lowerings: dict[str, str]
    uses: tuple[str, ...]
    package: str
    opt_in: bool


def operator_entries() -> tuple[OperatorEntry, ...]:
    """List all operators, sorted by name."""
    return tuple(_operator(each) for _, each in sorted(OPERATORS.items()))


def package_entries() -> tuple[PackageEntry, ...]:
    """List all packages in the order in which they are declared; imports those that are installed."""
    return tuple(_package(each) for each in PACKAGES.values())


def rule_entries() -> tuple[RuleEntry, ...]:
    """List all installed rules, in the order in which the packages provide them."""
    return tuple(_rule(each) for each in installed().rules)


def operator_entry(name: str) -> OperatorEntry:
    """Return the entry of the operator `name`, with or without its namespace.

    Raises:
        OptionError: there is none; the message names the nearest.
    """
    entries = {each.name.split("::")[1]: each for each in operator_entries()}
    short = next((known for known, each in entries.items() if each.name == name), name)
    check_names("operator", [short], entries)
    return entries[short]


def rule_entry(name: str) -> RuleEntry:
    """Return the entry of the installed rule `name`.

    Raises:
        OptionError: there is none; the message names the nearest.
    """
    entries = {each.name: each for each in rule_entries()}
    check_names("rule", [name], entries, rule_called(name, installed().rules))
    return entries[name]


def _package(package: Package) -> PackageEntry:
    state = import_failure(package) or "is imported"
    return PackageEntry(package.name, package.namespaces, package.summary, package.source, state)


def _operator(op: Operator) -> OperatorEntry:
    package = package_of(op.namespace)
    return OperatorEntry(
        op.name,
        package.name if package else "",
        op.summary,
        op.schema,
        tuple(chip for chip in CHIPS if chip in op.limits),
        tuple(sorted(op.lowerings)),
        dict(op.dims),
        {name: tuple(sorted(str(each).removeprefix("torch.") for each in given)) for name, given in op.dtypes.items()},
        {chip: tuple(_limit(each) for each in op.limits[chip]) for chip in (HOST, *CHIPS) if chip in op.limits},
        op.computed,
        dict(op.uncomputed),
        tuple(name for name in op.arguments if name in op.without_effect),
        op.source,
        op.older,
    )


def _limit(limit: Limit | str) -> str:
    if isinstance(limit, str):
        return limit
    when = f" where {limit.when}" if limit.when else ""
    route = f" under {limit.lowering}" if limit.lowering else ""
    because = f": {limit.because}" if limit.because else ""
    return f"{limit.text}{when}{route}{because}"


def _rule(rule: Rule) -> RuleEntry:
    return RuleEntry(
        rule.name,
        _first_line(type(rule)),
        _first_line(inspect.getmodule(type(rule))),
        {each.method: _first_line(getattr(rule, each.method)) for each in rule.patterns()},
        {each.name: each.reason for each in rule.lookalikes()},
        {each.name: _first_line(getattr(rule, each.method)) for each in rule.lowerings()},
        tuple(sorted(rule.uses())),
        _packages().get(rule.name, ""),
        rule.opt_in,
    )


def _first_line(described: object) -> str:
    return (inspect.getdoc(described) or "").partition("\n")[0]


@cache
def _packages() -> dict[str, str]:
    """Map each rule to the distribution whose entry point provides it."""
    packages: dict[str, str] = {}
    for entry in entry_points(group=GROUP):
        name = entry.dist.name if entry.dist else entry.value
        packages |= {rule.name: name for rule in provided_by(entry.load()).rules}
    return packages
