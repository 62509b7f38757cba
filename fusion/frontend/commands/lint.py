"""The command `cann-fusion lint`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Group, RenderableType

from fusion.frontend.commands.console import console, reported
from fusion.frontend.commands.explained import Plan, explained, require_traced
from fusion.frontend.commands.flags import CallFlags, ModelName, OptionFlags, Traceback, with_flags
from fusion.report.lint import Finding
from fusion.report.lint import lint as findings_in
from fusion.report.text import WIDTH, counted, entry

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
        console(WIDTH).print(_rendered(findings))
        typer.echo(f"{model}, for {report.target}: {counted(len(findings), 'finding')}")
    else:
        typer.echo(f"{model}, for {report.target}: nothing to change")
    require_traced(model, report, full)
    if findings:
        raise typer.Exit(FOUND)


def _rendered(findings: Iterable[Finding]) -> RenderableType:
    """Build the text of `findings`, each with its change, its place and what the change saves."""
    return Group(*(entry(f"{each.linter}: {each.what}", [each.cure, each.place, _worth(each)]) for each in findings))


def _worth(finding: Finding) -> str:
    """Describe how often `finding` was made, and how many launches its change saves at all places."""
    places = f"at {finding.times} places" * (finding.times > 1)
    saved = f"saves {counted(finding.saves * finding.times, 'launch')}" * bool(finding.saves)
    return ", ".join(filter(None, (places, saved)))
