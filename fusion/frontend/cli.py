"""The command `cann-fusion`: explain a model, lint it, hold it to expectations, list the operators and the rules."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fusion import operators
from fusion.errors import OptionError
from fusion.frontend import catalogue
from fusion.frontend.commands import expect
from fusion.frontend.commands.console import BAD_INPUT, complain, console, reported, tell
from fusion.frontend.commands.explained import Plan, calls, explained, require_traced
from fusion.frontend.commands.flags import CallFlags, ModelCode, ModelName, OptionFlags, Traceback, with_flags
from fusion.frontend.commands.lint import lint
from fusion.frontend.port import port as port_call
from fusion.operators.profiles import PROFILES
from fusion.report.failures import worded
from fusion.report.report import Report
from fusion.report.text import WIDTH, rendered

app = typer.Typer(
    name="cann-fusion",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
app.add_typer(expect.app)
app.command()(lint)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"cann-fusion {version('cann-fusion')}")
        raise typer.Exit


@app.callback()
def root(
    shown: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Show which parts of a PyTorch model become fused CANN operators, and why the others do not.

    [b]Nothing runs:[/b] models are traced under fake tensors, so a laptop can explain a model of any size.

    [dim]cann-fusion explain hf:qwen3[/dim]                        a prefill of Qwen3, two layers, real sizes

    [dim]cann-fusion explain hf:deepseek_v3 --mode decode[/dim]    one token behind a cache

    [dim]cann-fusion explain my_model:build[/dim]                  what your own function returns

    [dim]cann-fusion expect check my_model:build expect.toml[/dim] its fusions, held by CI

    [dim]cann-fusion lint hf:gpt_oss[/dim]                         what to change in a model, with its lines

    [dim]cann-fusion ops npu_rms_norm[/dim]                        what the chips accept

    [dim]cann-fusion rules rms_norm[/dim]                          what is recognised as a norm
    """


@app.command()
@with_flags
def explain(
    model: ModelName,
    flags: OptionFlags,
    call: CallFlags,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    html: Annotated[str, typer.Option(help="Write the report as a page into this file.", metavar="FILE")] = "",
    full: Traceback = False,
) -> None:
    """Report the fusions in a model, their savings, and refusals with their reasons.

    A function without parameters is a factory: it returns a module or function, with its arguments if it takes any:
    `model`, `(model, args)` or `(model, args, kwargs)`. A module class is constructed, and takes its arguments from
    `--input`.

    Exit code 0: all of the call is explained. 1: the model raised; the report covers the graphs traced before. 2: an
    argument is wrong.

    [dim]cann-fusion explain hf:gpt_oss --mode decode --context 1024[/dim]

    [dim]cann-fusion explain hf:phi3 --disable npu_apply_rotary_pos_emb --json[/dim]

    [dim]cann-fusion explain path/to/model.py:Model --input x=bf16[2,16,256][/dim]
    """
    with reported(f"explaining {model}", full):
        report = explained(model, Plan(flags.options(), flags.library()), call)
    if html:
        _write_page(report, html)
    if as_json:
        typer.echo(report.to_json())
    elif not html:
        _print(report)
    require_traced(model, report, full)


def _print(report: Report) -> None:
    """Print the text of `report`: in colours on a terminal, without trailing spaces in a pipe."""
    terminal = console(WIDTH)
    if terminal.is_terminal:
        terminal.print(rendered(report.document()))
    else:
        typer.echo(str(report), nl=False)


def _write_page(report: Report, file: str) -> None:
    """Write `report` as a page into `file`; exit with 2 where that is not possible."""
    try:
        report.to_html(file)
    except OSError as error:
        complain(f"writing the report: {file!r} cannot be written ({worded(error)}); name another file with --html")
        raise typer.Exit(BAD_INPUT) from None
    tell(f"[dim]written: {escape(file)}[/dim]")


@app.command()
@partial(with_flags, without=("plan_lower", "lower", "dynamic"))
def port(
    model: ModelCode,
    flags: OptionFlags,
    call: CallFlags,
    output: Annotated[
        str, typer.Option("--output", "-o", help="File to write; without it, the source is printed.")
    ] = "",
    full: Traceback = False,
) -> None:
    """Write the fused forward of a model as PyTorch, to own and to tune.

    Nothing runs. The source calls the fused operators by their names, has one class for all modules that are alike, and
    a function that prepares the weights of the plain model for it. Models are those of explain, but for exported
    programs. Sizes are those of the call.

    [dim]cann-fusion port hf:qwen3 --mode decode -o qwen3_npu.py[/dim]
    """
    with reported(f"porting {model}", full):
        options, library = flags.options(), flags.library()
        given = next(iter(calls(model, call, [])))
        for notice in given.notices:
            tell(f"[dim]note: {escape(notice)}[/dim]")
        source = port_call(given.model, *given.args, options=options, rules=library, **given.kwargs)
        if not output:
            typer.echo(source, nl=False)
            return
        try:
            Path(output).write_text(source, encoding="utf-8")
        except OSError as error:
            raise OptionError(f"porting {model}: {output} cannot be written: {error.strerror}; name another") from error


@app.command()
def ops(
    name: Annotated[str, typer.Argument(help="One operator, with everything that is known of it.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the fused operators that are declared, by package: schema, targets, limits, lowerings, source."""
    with reported("listing operators"):
        entries = [catalogue.operator_entry(name)] if name else list(catalogue.operator_entries())
        origin = operators.ensure()
    if as_json:
        packages = [asdict(each) for each in catalogue.package_entries()]
        profiles = [asdict(each) for each in PROFILES.values()]
        listed = [asdict(each) for each in entries]
        content = {"schemas": asdict(origin), "packages": packages, "profiles": profiles, "operators": listed}
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
        return
    terminal = console()
    terminal.print(_operator(entries[0]) if name else _operators(entries))
    owner = f"torch_npu {origin.version}" if origin.source == "torch_npu" else "cann-fusion itself"
    if not name:
        terminal.print(_packages(catalogue.package_entries()))
        terminal.print(_profiles())
    terminal.print(f"schemas of {owner} are in use: {escape(origin.reason)}")


@app.command()
def rules(
    name: Annotated[str, typer.Argument(help="One rule, with its patterns and lowerings.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the installed rules: what each means, how it may be written, what it becomes."""
    with reported("listing rules"):
        entries = [catalogue.rule_entry(name)] if name else list(catalogue.rule_entries())
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in entries], indent=2, ensure_ascii=False))
        return
    console().print(_rule(entries[0]) if name else _rules(entries))


def _operators(entries: list[catalogue.OperatorEntry]) -> Table:
    """Build the table of operators by package, in the order of the packages."""
    order = [each.name for each in catalogue.package_entries()]
    rows = (
        (each.name, each.summary, "\n".join(each.targets), "\n".join(each.lowerings), each.package)
        for each in sorted(entries, key=lambda each: order.index(each.package) if each.package else len(order))
    )
    columns = "operator", "what it computes", "targets", "lowered by", "from"
    return _listed("operators", columns, rows)


def _packages(entries: Sequence[catalogue.PackageEntry]) -> Table:
    columns = "package", "what it has", "namespaces", "here it"
    rows = (
        (
            each.name,
            each.summary,
            "\n".join(each.namespaces),
            each.state,
        )
        for each in entries
    )
    return _listed("packages that bring them", columns, rows)


def _profiles() -> Table:
    rows = ((each.name, "\n".join(each.packages), each.cann, each.source) for each in PROFILES.values())
    return _listed("profiles of releases", ("profile", "stands for", "CANN", "from"), rows)


def _operator(entry: catalogue.OperatorEntry) -> Table:
    arguments = [(name, f"[{dims}]  {', '.join(entry.dtypes.get(name, ()))}") for name, dims in entry.dims.items()]
    limits = [(f"limits on {target}", "\n".join(each) or "none") for target, each in entry.limits.items()]
    first = ("computes", entry.summary), ("schema", entry.schema), ("lowered by", ", ".join(entry.lowerings))
    package = (("package", entry.package),) if entry.package else ()
    raising = "\n".join(f"{name}: {because}" for name, because in entry.uncomputed.items())
    answers = ("computed", ", ".join(entry.computed)), ("not computed", raising or "none")
    older = (("older name", entry.older),) if entry.older else ()
    return _described(entry.name, (*first, *package, *arguments, *answers, *limits, *older, ("source", entry.source)))


def _rules(entries: list[catalogue.RuleEntry]) -> Table:
    rows = (
        (each.name, _meaning(each), *map("\n".join, (each.patterns, each.lowerings, each.uses)), each.package)
        for each in entries
    )
    return _listed("installed rules", ("rule", "meaning", "written forms", "lowerings", "uses", "from"), rows)


def _rule(entry: catalogue.RuleEntry) -> Table:
    groups = (("pattern", entry.patterns), ("refuses", entry.refuses), ("lowering", entry.lowerings))
    parts = [(f"{kind} {name}", text) for kind, described in groups for name, text in described.items()]
    last = ("uses", ", ".join(entry.uses) or "aten only"), ("from", entry.package)
    return _described(entry.name, (("meaning", _meaning(entry)), ("formula", entry.formula), *parts, *last))


def _meaning(entry: catalogue.RuleEntry) -> str:
    """Format the meaning of a rule, with a note if it is opt-in."""
    return f"{entry.meaning} Opt-in: off unless the option opt_in names it." if entry.opt_in else entry.meaning


def _listed(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Build a table with a row for each entry; the first column has the names."""
    table = Table(title=title, title_justify="left", show_lines=True)
    for number, column in enumerate(columns):
        table.add_column(column, no_wrap=number == 0)
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def _described(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """Build a table of one entry, with a row for each of its properties."""
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(escape(name), escape(text))
    return table


if __name__ == "__main__":
    app()
