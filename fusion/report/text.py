"""Text of a document, for terminals, pipes and files: 80 columns, the reasons that matter first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from io import StringIO
from itertools import groupby
from typing import TYPE_CHECKING

from fusion.report.document import Change, Copied, Cost, Document, Layers, Left, Memory, Origin, Rewrite

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

WIDTH = 80
"""Columns of the text where no terminal has others."""


def to_text(document: Document) -> str:
    """Write `document` as plain text of `WIDTH` columns."""
    from rich.console import Console

    text = StringIO()
    Console(file=text, width=WIDTH, force_terminal=False, color_system=None).print(rendered(document))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def rendered(document: Document) -> RenderableType:
    """Build the text of `document` for a console of `rich`; sections without entries are left out."""
    from rich.console import Group

    parts = (
        ("not traced to the end: the report is of the graphs before", _interrupted(document)),
        ("failed in the pass: please report it, with the graph that dump_dir writes", _failed(document)),
        ("where Python leaves the graphs", _broken(document)),
        ("not fused, and why (what would save most first)", _changed(document)),
        ("not fused, with nothing to change in the model", _final(document)),
        ("regions in which a fusion is expected", _expected(document)),
        ("fused, and from which lines", [_rewrite(each) for each in document.rewrites]),
        ("launches that stay", _left(document)),
        ("copies of caches, states and weights, and what avoids them", map(_copied, document.copied)),
        ("layers", _layers(document.layers)),
        ("launches by module", _modules(document)),
        ("assumed, and checked at every call", _pairs(document.assumptions)),
        ("read from data: from a sample, as nothing was run", _pairs(document.guesses)),
        ("weights prepared once", _memory(document.memory)),
        ("of the call", [entry("", [each]) for each in _notes(document)]),
    )
    shown = [(title, list(entries)) for title, entries in parts]
    return Group(_head(document), *(each for title, entries in shown if entries for each in (_title(title), *entries)))


def microseconds(us: float) -> str:
    """Format microseconds, with a decimal where they are few."""
    return f"{us:,.0f} us" if us >= 100 else f"{us:,.1f} us"


def size(moved: float) -> str:
    """Format bytes in the unit in which their number is short."""
    units = iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while moved >= 1024 and (larger := next(units, "")):
        moved, unit = moved / 1024, larger
    return f"{moved:,.0f} {unit}" if unit == "B" or moved >= 100 else f"{moved:,.1f} {unit}"


def counted(count: int, noun: str) -> str:
    """Format `count` with its `noun`: "1 launch", "2 launches"."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{count:,} {noun}{plural * (count != 1)}"


def stay(launches: int) -> str:
    """Format the number of launches that stay."""
    return counted(launches, "launch") + (" stays" if launches == 1 else " stay")


def operators(counts: Mapping[str, int]) -> str:
    """List operators with their numbers: "mul x2, add"."""
    return ", ".join(name + f" x{count}" * (count > 1) for name, count in counts.items())


def place(module: str, times: int) -> str:
    """Name the place `module`, with the number of `times` that it stands for."""
    return (module or "outside of modules") + f" x{times}" * (times > 1)


# sections ------------------------------------------------------------------------------------------------------------


def _head(document: Document) -> Text:
    before, after = document.before, document.after
    title = f"fused for {document.target}: {counted(document.graphs, 'graph')}, "
    title += f"{before.launches} launches -> {after.launches}"
    predicted = f"predicted {microseconds(before.us)} -> {microseconds(after.us)} a call, by data sheets, not measured"
    needs = {name: f"  (package {package})" for name, package in document.packages.items()}
    operators = [f"{count:>6} {name}{needs.get(name, '')}" for name, count in document.ops.items()]
    return _styled([(title + "\n", "bold"), (predicted, "dim"), *(("\n" + each, "") for each in operators)])


def _interrupted(document: Document) -> Iterator[RenderableType]:
    if (given := document.interruption) is not None:
        yield entry(given.error, [f"at {given.where}" * bool(given.where), given.advice])


def _failed(document: Document) -> Iterator[RenderableType]:
    for number, each in document.failures:
        runs = "the graph runs as it came" if each.drops_graph else f"runs without {each.rule}"
        yield entry(f"graph {number}, stage {each.stage}: {each.error}", [runs, each.place])


def _broken(document: Document) -> Iterator[RenderableType]:
    for each in document.breaks:
        what = f"{each.function} is not traced itself" if each.function else "break"
        yield entry(f"{what} at {each.where}", [each.reason])


def _changed(document: Document) -> Iterator[RenderableType]:
    yield from (_change(each) for each in document.changes if each.is_mendable)
    if document.hidden:
        refusals = counted(document.hidden, "refusal")
        yield entry("", [f"{refusals} at places that another rewrite fused: report.document(everything=True)"])


def _final(document: Document) -> Iterator[RenderableType]:
    yield from (_change(each) for each in document.changes if not each.is_mendable)


def _change(change: Change) -> RenderableType:
    on = f" [on {change.target}]" * bool(change.target)
    saving = f"{'' if change.is_planned else 'at most '}{microseconds(change.us)}"
    worth = [f"would save {saving}"] * (change.us > 0) + [stay(change.launches)] * bool(change.launches)
    where = [str(change.line), f"    {change.line.text}"] if change.line else []
    fused = ["the place was fused otherwise"] * change.fused_otherwise
    return entry(
        f"{change.rule or change.op}: {place(change.module, change.times)}{on}",
        [change.reason, *fused, ", ".join(worth), *where],
    )


def _expected(document: Document) -> Iterator[RenderableType]:
    for each in document.expected:
        state = "found" if each.is_met else "missing"
        yield entry(f"{each.rule} {state}: {place(each.name, each.times)} at {each.where}", [each.state])


def _rewrite(rewrite: Rewrite) -> RenderableType:
    calls, replaced = operators(rewrite.calls), operators(rewrite.replaced)
    saved = f"saves {counted(rewrite.saved.launches, 'launch')}, {microseconds(rewrite.saved.us)}"
    saved += f" in all {rewrite.times}" * (rewrite.times > 1)
    title = f"{calls} by {rewrite.rule}: {place(rewrite.module, rewrite.times)}"
    remarks = saved, rewrite.remark, f"from {replaced}" * bool(replaced)
    return entry(title, [*remarks, *_lines(rewrite.origins)])


def _lines(origins: Iterable[Origin]) -> Iterator[str]:
    """Write the lines of `origins` below the names of their files and modules."""
    lines = sorted((line.file, origin.module, line.number, line.text) for origin in origins for line in origin.lines)
    for file, in_file in groupby(lines, lambda each: each[0]):
        yield file
        for module, in_module in groupby(in_file, lambda each: each[1]):
            yield f"  in {module}" * bool(module)
            yield from (f"{number:>7}  {text}" for _, _, number, text in in_module)


def _left(document: Document) -> Iterator[RenderableType]:
    if not document.left:
        return
    shown, more = document.left[:_LONGEST], document.left[_LONGEST:]
    above = {each.reason for each in document.changes}
    yield entry(_sum(document.left), [])
    for each in shown:
        moved = f"{microseconds(each.us)}, {size(each.bytes)}"
        copied = f"copies the input {', '.join(each.copies)}" * bool(each.copies)
        why = f"{each.rule or each.op}: {each.reason}" if each.reason else ""
        why = f"not fused, and why: {each.rule or each.op} above" if each.reason in above else why
        above.add(each.reason)
        made = f"made by {each.made_by}" * bool(each.made_by)
        where = [str(each.line), f"    {each.line.text}"] if each.line and not made else []
        yield entry(f"{each.op}: {place(each.module, each.times)}, {moved}", [*where, made, copied, why])
    if more:
        yield entry("", [f"{_sum(more)} more, of shorter ones: listed by --html, --json and report.document()"])


_LONGEST = 20
"""Number of entries of launches that stay, those that take longest."""


def _sum(left: Sequence[Left]) -> str:
    launches, us = sum(each.times for each in left), sum(each.us for each in left)
    return f"{counted(launches, 'launch')}, {microseconds(us)}"


def _copied(copied: Copied) -> RenderableType:
    title = f"{copied.op}: {place(copied.module, copied.times)}, {microseconds(copied.us)}, {size(copied.bytes)}"
    where = [str(copied.line), f"    {copied.line.text}"] if copied.line else []
    return entry(title, [f"{copied.kind} {', '.join(copied.inputs)}: {copied.cure}", *where])


def _layers(layers: Sequence[Layers]) -> Iterator[RenderableType]:
    if not layers:
        return
    rows = ((place(each.path, each.times), *_sides(each.before, each.after)) for each in layers)
    yield _table(("one of", *_SIDES), rows)
    for each in layers:
        if each.usual:
            subject = "layers {} differ" if each.times > 1 else "layer {} differs"
            yield entry(f"{subject.format(each.numbers)} from {each.usual}: {', '.join(each.differences)}", [])


_SIDES = ("launches:", "->:", "us:", "->:")


def _sides(before: Cost, after: Cost) -> tuple[object, ...]:
    return before.launches, after.launches, f"{before.us:,.0f}", f"{after.us:,.0f}"


def _modules(document: Document) -> Iterator[RenderableType]:
    rows: list[tuple[object, ...]] = []
    around: list[int] = [1]
    for each in document.modules:
        del around[each.depth + 1 :]
        name = "  " * each.depth + (each.name or "outside of modules")
        name += f" x{each.times}" * (each.times != around[-1])
        around.append(each.times)
        rows.append((name, *_sides(each.before, each.after), each.bookkeeping or ""))
    yield _table(("with its submodules", *_SIDES, "integer calls:"), rows)


def _pairs(pairs: Mapping[str, object]) -> Iterator[RenderableType]:
    for name, each in pairs.items():
        yield entry(f"{name}: {each}", [])


def _memory(memory: Memory) -> Iterator[RenderableType]:
    def share(moved: int) -> str:
        return f"{100 * moved / memory.parameter_bytes:.2f} %" if memory.parameter_bytes else "-"

    if memory.stored:
        title = f"{memory.bytes / 2**20:,.2f} MiB beside the Parameters, {share(memory.bytes)} of these"
        yield entry(title, [])
        rows = ((each.how, each.tensors, f"{each.bytes / 2**20:,.2f}", share(each.bytes)) for each in memory.stored)
        yield _table(("held as", "tensors:", "MiB:", "of the Parameters:"), rows)
    if memory.is_stale_after_data:
        note = "copies: writes through .data are seen on the host alone; elsewhere call fusion.refresh(model)"
        yield entry("", [note])
    for each in memory.not_prepared:
        yield entry("", [f"not prepared: {each}"])


def _notes(document: Document) -> Iterator[str]:
    yield from document.notes
    if copies := document.result_copies:
        yield f"copies so that results lie in memory as those of the model do: {copies}"
    if waits := document.host_reads:
        times = f"{waits} times" if waits > 1 else "once"
        yield f"each step waits {times} for the device, to read lengths (lengths='host')"


# layout --------------------------------------------------------------------------------------------------------------


def _title(title: str) -> RenderableType:
    from rich.console import Group
    from rich.rule import Rule
    from rich.text import Text

    return Group("", Rule(Text(title, style="bold"), align="left", style="dim"))


def entry(title: str, lines: Iterable[str]) -> RenderableType:
    """Build an entry: its `title`, and `lines` indented below; lines of code, which are indented, are cut."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    shown: list[RenderableType] = [Text(title, overflow="fold")] if title else []
    for each in filter(None, lines):
        code = each.startswith("   ")
        text = Text(each, style="" if code else "dim", no_wrap=code, overflow="ellipsis" if code else "fold")
        shown.append(Padding(text, (0, 0, 0, 4 if title else 0)))
    return Group(*shown)


def _styled(parts: Iterable[tuple[str, str]]) -> Text:
    from rich.text import Text

    return Text.assemble(*parts, overflow="fold")


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> RenderableType:
    """Build a table without lines; columns whose names end in a colon are right-aligned."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in columns:
        table.add_column(name.rstrip(":"), justify="right" if name.endswith(":") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(escape(str(each)) for each in row))
    return table
