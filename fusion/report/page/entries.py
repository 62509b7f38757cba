"""Entries of the page: each remark of a document with an identifier, by which its panes are linked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusion.report.document import Change, Document, Left, Rewrite
from fusion.report.text import counted, microseconds, operators, place, size, stay
from fusion.report.trace import Call, Line, displayed

PASSED, MISSED, STAYS, ANALYSIS = "passed", "missed", "stays", "analysis"
"""Kinds of entries: a rewrite, a refusal, a launch that stays, something assumed or not traced."""


@dataclass(frozen=True)
class Entry:
    """One remark.

    Attributes:
        id: identifier of the entry in the page.
        kind: PASSED, MISSED, STAYS or ANALYSIS.
        title: subject, in one line.
        place: modules, layers folded.
        rule: the rule, for the filter.
        us: predicted microseconds: saved, to save, or taken.
        details: sentences that say more.
        lines: lines of the model.
        names: names of calls and rewrites in the traces.
    """

    id: str
    kind: str
    title: str
    place: str
    rule: str
    us: float
    details: tuple[str, ...]
    lines: tuple[Line, ...]
    names: frozenset[str]


def entries(document: Document) -> list[Entry]:
    """List the remarks of `document`: what to change, what was fused, what stays, what else to know."""
    return [
        *(_change(f"c{number}", each) for number, each in enumerate(document.changes)),
        *(_rewrite(f"r{number}", each) for number, each in enumerate(document.rewrites)),
        *(_left(f"l{number}", each) for number, each in enumerate(document.left)),
        *(_remark(f"a{number}", *each) for number, each in enumerate(_remarks(document))),
    ]


def _change(identifier: str, change: Change) -> Entry:
    at_most = "" if change.is_planned else "at most "
    details = (
        change.reason,
        f"would save {at_most}{microseconds(change.us)}" * (change.us > 0),
        stay(change.launches) * (change.launches > 0),
        f"on {change.target}" * bool(change.target),
        "the place was fused otherwise" * change.fused_otherwise,
    )
    where, lines = place(change.module, change.times), (change.line,) if change.line else ()
    return Entry(
        identifier,
        MISSED,
        change.rule or change.op,
        where,
        change.rule,
        change.us,
        _given(details),
        lines,
        change.names,
    )


def _rewrite(identifier: str, rewrite: Rewrite) -> Entry:
    calls, replaced = (operators(each) for each in (rewrite.calls, rewrite.replaced))
    in_all = f" in all {rewrite.times}" * (rewrite.times > 1)
    saved = f"saves {counted(rewrite.saved.launches, 'launch')}, {microseconds(rewrite.saved.us)}{in_all}"
    lines = tuple(line for origin in rewrite.origins for line in origin.lines)
    details = _given((f"by {rewrite.rule}, {saved}", rewrite.remark, f"from {replaced}" * bool(replaced)))
    where = place(rewrite.module, rewrite.times)
    return Entry(identifier, PASSED, calls, where, rewrite.rule, rewrite.saved.us, details, lines, rewrite.roots)


def _left(identifier: str, left: Left) -> Entry:
    details = (
        f"{microseconds(left.us)}, {size(left.bytes)}",
        f"made by {left.made_by}" * bool(left.made_by),
        f"copies the input {', '.join(left.copies)}" * bool(left.copies),
        left.reason,
    )
    lines = (left.line,) if left.line and not left.made_by else ()
    where, rule = place(left.module, left.times), left.rule or left.made_by
    return Entry(identifier, STAYS, left.op, where, rule, left.us, _given(details), lines, left.names)


def _remark(identifier: str, title: str, detail: str, where: str) -> Entry:
    file, _, number = where.rpartition(":")
    lines = (Line(displayed(file), int(number), path=file),) if file and number.isdigit() else ()
    return Entry(identifier, ANALYSIS, title, "", "", 0.0, _given((detail,)), lines, frozenset())


def _remarks(document: Document) -> Iterator[tuple[str, str, str]]:
    """Yield title, detail and `file:line` of everything else that a reader has to know."""
    if (given := document.interruption) is not None:
        yield "not traced to the end: the report is of the graphs before", str(given), given.where
    for number, failure in document.failures:
        yield f"failed in the pass, graph {number}: please report it", str(failure), failure.where
    for each in document.breaks:
        yield f"{each.function} is not traced itself" if each.function else "graph break", each.reason, each.where
    for region in document.expected:
        state = "found" if region.is_met else "missing"
        yield f"{region.rule} is expected, {state}: {region.name}", region.state, region.where
    for each in document.copied:
        title = f"{each.op} copies the {each.kind} {', '.join(each.inputs)}: {place(each.module, each.times)}"
        where = f"{each.line.path}:{each.line.number}" if each.line else ""
        yield title, f"{each.cure} ({microseconds(each.us)}, {size(each.bytes)})", where
    for where, times in document.guesses.items():
        yield "read from data: from a sample, as nothing was run", counted(times, "time"), where
    for name, kind in document.assumptions.items():
        yield "assumed, and checked at every call", f"{name}: {kind}", ""
    for note in document.notes:
        yield note, "", ""
    if document.result_copies:
        yield "copies so that results lie in memory as those of the model do", str(document.result_copies), ""
    if document.host_reads:
        yield "each step waits for the device, to read lengths", counted(document.host_reads, "time"), ""


def by_call(listed: Iterable[Entry]) -> dict[str, list[str]]:
    """Map the names of calls and rewrites to the identifiers of their entries."""
    identifiers: dict[str, list[str]] = {}
    for each in listed:
        for name in each.names:
            identifiers.setdefault(name, []).append(each.id)
    return identifiers


def by_line(listed: Iterable[Entry]) -> dict[tuple[str, int], list[Entry]]:
    """Map file and number of lines to their entries."""
    remarks: dict[tuple[str, int], dict[str, Entry]] = {}
    for each in listed:
        for line in each.lines:
            remarks.setdefault((line.file, line.number), {})[each.id] = each
    return {where: list(each.values()) for where, each in remarks.items()}


def ids_of(call: Call, known: Mapping[str, Sequence[str]]) -> list[str]:
    """List the identifiers of the entries about `call`, by its own name and that of its rewrite."""
    return list(dict.fromkeys((*known.get(call.root, ()), *known.get(call.name, ()))))


def _given(details: Iterable[str]) -> tuple[str, ...]:
    return tuple(filter(None, details))
