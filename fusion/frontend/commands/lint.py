"""The command `cann-fusion lint`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from fusion.frontend.commands.console import console, reported
from fusion.frontend.commands.explained import Plan, explained, require_traced
from fusion.frontend.commands.flags import CallFlags, ModelName, OptionFlags, Traceback, with_flags
from fusion.report.lint import Finding
from fusion.report.lint import lint as findings_in

FOUND = 1
"""Exit code for a model with findings."""


@with_flags
def lint(
    model: ModelName,
    flags: OptionFlags,
    call: CallFlags,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    full: Traceback = False,
) -> None:
    """Find places of the fused graphs that a change of the model makes cheaper, each with its line and the change.

    The model is named as for `explain`, and nothing runs.

    Exit code 0: nothing to change. 1: there are findings, or the model raised. 2: an argument is wrong.

    [dim]cann-fusion lint hf:qwen3 --mode decode[/dim]
    """
    with reported(f"explaining {model}", full):
        report = explained(model, Plan(flags.options(), flags.library()), call)
        findings = findings_in(report)
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in findings], indent=2, ensure_ascii=False))
    elif findings:
        console().print(_table(findings))
    else:
        typer.echo(f"{model}, for {report.target}: nothing to change")
    require_traced(model, report, full)
    if findings:
        raise typer.Exit(FOUND)


def _table(findings: Iterable[Finding]) -> Table:
    table = Table(title="to change in the model", title_justify="left", show_lines=True)
    for name in ("linter", "finding", "change", "at"):
        table.add_column(name, overflow="fold")
    for name in ("times", "saves"):
        table.add_column(name, justify="right")
    for each in findings:
        texts = each.linter, each.what, each.cure, each.place.replace(" at ", "\nat ")
        table.add_row(*map(escape, texts), str(each.times), str(each.saves or "-"))
    return table
