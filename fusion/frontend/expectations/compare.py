"""Comparison of a report with expectations: each mismatch with the places that lack a fusion, and the reasons."""

from __future__ import annotations

import difflib
import warnings
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.fx as fx

from fusion._torch.operators import short_name
from fusion.errors import ExpectationWarning
from fusion.frontend.expectations.contract import Expectations, expectations
from fusion.frontend.expectations.path_patterns import folded, is_within, matches, with_parents
from fusion.frontend.library import uses_of, why_unused
from fusion.graph.launches import is_launch
from fusion.graph.origin import location, module_path, source_text
from fusion.options import Options
from fusion.planning.cost import has_flops
from fusion.records import Refusal
from fusion.report.refusals import missing
from fusion.report.regions import listed
from fusion.report.report import Report
from fusion.report.text import operators
from fusion.report.trace import displayed_place

MOST_REASONS = 3
"""Most reasons that are listed for one place."""


@dataclass(frozen=True)
class Reason:
    """Reason why a fusion did not happen.

    Attributes:
        rule: the rule, or the word of its forms, that was refused.
        text: the reason.
        where: `file:line` in the model's code, or "".
        source: the text of that line, or "".
    """

    rule: str
    text: str
    where: str = ""
    source: str = ""

    def __str__(self) -> str:
        place = ": ".join(filter(None, (displayed_place(self.where), self.source)))
        return f"{self.rule}: {self.text}" + f"\n  at {place}" * bool(place)


@dataclass(frozen=True)
class Lack:
    """Places that lack a fusion for the same reasons.

    Attributes:
        modules: pattern of the paths of the modules; "" for the whole model.
        count: number of fusions in each.
        where: `file:line` of the first call in the first of them.
        fused: number of other fusions in each, by rule.
        reasons: the reasons.
    """

    modules: str
    count: int
    where: str
    fused: Mapping[str, int]
    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        at = f" at {displayed_place(self.where)}" * bool(self.where)
        head = [f"in {self.modules}{at}: found {self.count}; fused there: {listed(self.fused)}"] * bool(self.modules)
        return "\n".join([*head, *(_indented(str(each)) for each in self.reasons)])


@dataclass(frozen=True)
class Mismatch:
    """An expectation that a model does not meet.

    Attributes:
        table: the table of the expectations, or the region.
        name: the rule or the limit.
        expected: the expected value.
        actual: the value of the model.
        lacks: the places that lack the fusion.
        advice: advice to the user, or "".
    """

    table: str
    name: str
    expected: int | str
    actual: int | str
    lacks: tuple[Lack, ...] = ()
    advice: str = ""

    def __str__(self) -> str:
        subject = " ".join(filter(None, (self.table, self.name)))
        head = f"{subject}: expected {self.expected}, found {self.actual}" + f"; {self.advice}" * bool(self.advice)
        return "\n".join([head, *(_indented(str(each)) for each in self.lacks)])


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


@dataclass(frozen=True)
class Comparison:
    """A report, and what reasons are looked up by.

    Attributes:
        report: the report.
        options: the options that it was made with.
        rules: the rules that were handed over; None for the installed ones.
        is_complete: False for a part of a model, which is not held to totals or to modules that it lacks.
    """

    report: Report
    options: Options
    rules: Any = None
    is_complete: bool = True

    def mismatches(self, expected: Expectations | None) -> list[Mismatch]:
        """List the mismatches with the expectations, if any, and with the regions of the model."""
        regions = list(self._regions())
        if expected is None:
            return regions
        if expected.target not in ("", self.report.target):
            advice = f'set option target (--target) to "{expected.target}", or write expectations for this target'
            return [Mismatch("target", "", expected.target, self.report.target, advice=advice)]
        in_modules = list(self._modules(expected))
        explained = {each.name for each in (*in_modules, *regions)}
        totals = list(self._totals(expected, explained)) if self.is_complete else []
        limits = list(self._limits(expected, not [*in_modules, *totals, *regions])) if self.is_complete else []
        return [*in_modules, *totals, *limits, *regions]

    @cached_property
    def _uses(self) -> Mapping[str, frozenset[str]]:
        return uses_of(self.rules)

    @cached_property
    def _known(self) -> frozenset[str]:
        """The paths of the modules in which something is called."""
        return modules_of(self.report)

    @cached_property
    def _fused(self) -> Counter[tuple[str, str]]:
        """Number of fusions by module path and rule."""
        return Counter((each.module, each.rule) for each in self.report.matches)

    def _fused_in(self, module: str) -> Counter[str]:
        counts: Counter[str] = Counter()
        for (path, rule), count in self._fused.items():
            if is_within(path, module):
                counts[rule] += count
        return counts

    def _modules(self, expected: Expectations) -> Iterator[Mismatch]:
        for pattern, counts in expected.modules.items():
            table, paths = f'[modules."{pattern}"]', [path for path in self._known if matches(pattern, path)]
            if not paths and self.is_complete:
                yield self._renamed(table, pattern)
            for rule, count in counts.items():
                counted = {path: self._fused_in(path)[rule] for path in paths}
                lacking = {path: each for path, each in counted.items() if each < count}
                if lacking:
                    lacks = tuple(self._lacks(lacking, rule))
                    yield Mismatch(table, rule, count, _range(lacking.values()), lacks)

    def _renamed(self, table: str, pattern: str) -> Mismatch:
        """Describe a `pattern` that no module has, with the nearest path and its line."""
        paths = [path for path, _ in folded(dict.fromkeys(self._known, None), self._known)]
        near = difflib.get_close_matches(pattern, paths, n=1, cutoff=0.5)
        advice = f"the nearest path is {near[0]!r}" if near else "`cann-fusion explain` lists the modules"
        at = [path for path in sorted(self._known) if near and matches(near[0], path)][:1]
        where = [f" at {displayed_place(place)}" for path in at if (place := self._where(path))]
        return Mismatch(table, "", "a module of this path", "none", advice="".join([advice, *where]))

    def _lacks(self, lacking: Mapping[str, int], rule: str) -> Iterator[Lack]:
        """Describe the modules `lacking` a fusion by `rule`, joining those that are alike."""
        alike = {path: (count, *self._there(path, rule)) for path, count in lacking.items()}
        for pattern, row in folded(alike, self._known):
            yield Lack(pattern, *row)

    def _there(self, module: str, rule: str) -> tuple[str, Mapping[str, int], tuple[Reason, ...]]:
        """Return the line of `module`, the other fusions in it, and why `rule` did not fuse there."""
        fused = dict(sorted(self._fused_in(module).items()))
        fused.pop(rule, None)
        parent = module.rpartition(".")[0]
        inside = [each for each in self.report.refusals if is_within(each.module, module)]
        around = [each for each in self.report.refusals if each.module == parent and self._is_about(each, rule)]
        refusals = missing(inside, rule, self._uses)
        if around and not any(self._is_about(each, rule) for each in refusals):
            refusals = missing(around, rule, self._uses)
        staying = () if refusals or why_unused(rule, self.options, self.rules) else self._staying(module)
        return self._where(module), fused, (*self._reasons(rule, refusals), *staying)

    def _is_about(self, refusal: Refusal, rule: str) -> bool:
        return refusal.rule == rule or refusal.rule in self._uses.get(rule, ())

    def _where(self, module: str) -> str:
        """Return `file:line` of the first call in a module, its own calls before those of modules inside it."""
        places = self._first_lines
        inside = (place for path, place in places.items() if is_within(path, module))
        return places.get(module) or next(inside, "")

    @cached_property
    def _first_lines(self) -> dict[str, str]:
        lines: dict[str, str] = {}
        for source in self.report.graphs:
            calls: Iterable[fx.Node] = (node for node in source.graph.nodes if node.op == "call_function")
            for node in calls:
                if place := location(node):
                    lines.setdefault(module_path(node), place)
        return lines

    def _reasons(self, rule: str, refusals: Sequence[Refusal]) -> tuple[Reason, ...]:
        if unused := why_unused(rule, self.options, self.rules):
            return (Reason(rule, unused),)
        if not refusals:
            text = f"nothing has one of its written forms; `cann-fusion rules {rule}` shows them"
            return (Reason(rule, text),)
        names = {word: name for part in self.report.parts for word, name in part.rule_of.items()}
        listed = [
            Reason(names.get(each.rule, each.rule), each.reason, each.where, each.source)
            for each in refusals[:MOST_REASONS]
        ]
        more = len(refusals) - len(listed)
        rest = [Reason(rule, f"{more} more reasons; `cann-fusion explain` lists them")] * bool(more)
        return (*listed, *rest)

    def _totals(self, expected: Expectations, explained: Iterable[str]) -> Iterator[Mismatch]:
        """Compare totals, with the reasons for rules that are not `explained` by other mismatches."""
        counted = self._fused_in("")
        for rule, count in expected.fusions.items():
            if counted[rule] >= count:
                continue
            about = [each for each in self.report.refusals if self._is_about(each, rule)]
            reasons = self._reasons(rule, missing(about, rule, self._uses))
            lacks = () if rule in explained else (Lack("", counted[rule], "", {}, reasons),)
            yield Mismatch("[fusions]", rule, count, counted[rule], lacks)

    def _limits(self, expected: Expectations, is_alone: bool) -> Iterator[Mismatch]:
        """Compare the counts of `at_most`; `is_alone` is True if no lack of a fusion explains more launches."""
        counts = counts_of(self.report)
        for name, most in expected.at_most.items():
            if counts[name] > most:
                is_unexplained = name == "launches" and is_alone
                lines = self._copies() if name == "prepared_bytes" else self._staying("") if is_unexplained else ()
                lacks = (Lack("", 0, "", {}, lines),) * bool(lines)
                advice = "`cann-fusion explain` lists the launches of each module" * is_unexplained
                yield Mismatch("[at_most]", name, f"at most {most}", counts[name], lacks, advice)

    def _staying(self, module: str) -> tuple[Reason, ...]:
        """List the lines of `module` on which most launches stay, with their operators; products stay in any model."""
        calls = (node for part in self.report.parts for node in part.graph.graph.nodes)
        by_line: dict[tuple[str, str], Counter[str]] = {}
        for node in calls:
            is_unfused = is_launch(node) and "fusion" not in node.meta and not has_flops(node.target)
            if is_unfused and is_within(module_path(node), module):
                place = location(node), source_text(node)
                by_line.setdefault(place, Counter())[short_name(node.target)] += 1
        most = sorted(by_line, key=lambda place: -by_line[place].total())[:MOST_REASONS]
        texts = ((f"{operators(by_line[place])} on this line, outside of any fusion", *place) for place in most)
        return tuple(Reason("launches", *each) for each in texts)

    def _copies(self) -> tuple[Reason, ...]:
        """List the reasons to copy Parameters or constants, with their bytes and the line that reads the first."""
        readers = {
            (number, node.name): next(iter(node.users), node)
            for number, part in enumerate(self.report.parts)
            for node in part.graph.graph.find_nodes(op="placeholder")
        }
        first: dict[str, fx.Node] = {}
        for number, part in enumerate(self.report.parts):
            for each in part.prepared:
                if each.copied:
                    first.setdefault(each.copied, readers[number, each.name])
        return tuple(
            Reason(
                "prepared", f"{size} bytes in {tensors} copies: {why}", location(first[why]), source_text(first[why])
            )
            for why, (tensors, size) in self.report.copies.items()
        )

    def _regions(self) -> Iterator[Mismatch]:
        """List the regions in which the expected rule did not fuse, those alike once."""
        lacking: dict[tuple[str, str, str], dict[str, Lack]] = {}
        for each in self.report.regions:
            if not each.is_met:
                lack = Lack(each.module, 0, each.where, each.fused, self._reasons(each.rule, each.refusals))
                lacking.setdefault((each.name, each.rule, each.where), {})[each.module] = lack
        for (name, rule, _), lacks in lacking.items():
            alike = {path: (each.where, each.fused, each.reasons) for path, each in lacks.items()}
            rows = [Lack(path or "the model", 0, *row) for path, row in folded(alike, self._known)]
            yield Mismatch(f"region {name}".strip(), rule, 1, 0, tuple(rows))


def _range(counts: Collection[int]) -> int | str:
    least, most = min(counts), max(counts)
    return least if least == most else f"{least} to {most}"


def modules_of(report: Report) -> frozenset[str]:
    """List the paths of the modules in which `report` has calls, and of the modules that hold them."""
    return with_parents([*report.layers, *(each.module for each in (*report.matches, *report.refusals))])


def counts_of(report: Report) -> dict[str, int]:
    """Count for `report` what `at_most` may limit."""
    copies = sum(part.result_copies for part in report.parts)
    return {"launches": report.launches[1], "prepared_bytes": report.prepared_bytes, "result_copies": copies}


def unmet(report: Report, options: Options, rules: Any = None, is_complete: bool = True) -> str:
    """Describe what of the option `expect`, and of regions, `report` does not meet; "" if it meets all.

    Args:
        report: the report.
        options: the options that it was made with.
        rules: the rules that were handed over; None for the installed ones.
        is_complete: False for a report on a part of the model.

    Raises:
        OptionError: the expectations cannot be read.
    """
    if not options.expect and not report.regions:
        return ""
    expected = expectations(options.expect) if options.expect else None
    texts = list(map(str, Comparison(report, options, rules, is_complete).mismatches(expected)))
    source = f" of {expected.source}" if expected is not None else ""
    return "\n".join([f"cann-fusion: expectations{source} are not met:", *texts]) if texts else ""


def warn_unmet(text: str) -> None:
    """Warn the caller's caller of the expectations in `text`, if it is not ""."""
    if text:
        warnings.warn(text, ExpectationWarning, stacklevel=3)
