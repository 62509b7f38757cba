"""The commands `cann-fusion expect write` and `cann-fusion expect check`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from fusion.errors import OptionError
from fusion.frontend.commands.console import reported, tell, wrapped
from fusion.frontend.commands.explained import Plan, explained, require_traced
from fusion.frontend.commands.flags import TARGET, CallFlags, ModelName, OptionFlags, Traceback, with_flags
from fusion.frontend.expectations.compare import Comparison
from fusion.frontend.expectations.contract import Expectations, expectations
from fusion.frontend.expectations.write import expectations_of, written
from fusion.frontend.library import library_for
from fusion.report.report import Report

UNMET = 1
"""Exit code of `check` for a model that does not meet its expectations."""
app = typer.Typer(
    name="expect",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Write the fusions of a model to a file, and check that a later version of the model has them still.",
)


@app.command()
@with_flags
def write(
    model: ModelName,
    flags: OptionFlags,
    call: CallFlags,
    output: Annotated[
        str, typer.Option("-o", "--output", help="File to write; - for the terminal.", metavar="FILE")
    ] = "-",
    full: Traceback = False,
) -> None:
    """Write what fuses in a model as expectations: fusions at least, launches and copies at most.

    The file is sorted and folds equal layers: edit it, and leave out what you do not mean to hold.

    [dim]cann-fusion expect write hf:qwen3 --mode decode -o qwen3.toml[/dim]
    """
    with reported(f"explaining {model}", full):
        plan = Plan(flags.options(), flags.library())
        report = explained(model, plan, call)
        require_traced(model, report, full)
        note = f"Written by cann-fusion {version('cann-fusion')} for {report.target}: {model}"
        _put(written(expectations_of(report), [note]), output)


@app.command()
@with_flags
def check(
    model: ModelName,
    file: Annotated[str, typer.Argument(help="Expectations, a TOML file.", metavar="FILE", show_default=False)],
    flags: OptionFlags,
    call: CallFlags,
    as_json: Annotated[bool, typer.Option("--json", help="Print the mismatches as JSON.")] = False,
    full: Traceback = False,
) -> None:
    """Check that a model has the fusions that a file of expectations names, and those of its regions.

    Each mismatch is printed with the places that lack the fusion, and the reasons, with their lines. The target is
    that of the file.

    Exit code 0: all are met. 1: some are not, or the model raised. 2: an argument or the file is wrong.

    [dim]cann-fusion expect check hf:qwen3 qwen3.toml --mode decode[/dim]
    """
    with reported(f"explaining {model}", full):
        expected = expectations(file)
        plan = Plan(flags.options(expected.target or TARGET), flags.library())
        library_for(replace(plan.options, expect=file), plan.rules)
        report = explained(model, plan, call)
        require_traced(model, report, full)
        unmet = Comparison(report, plan.options, plan.rules).mismatches(expected)
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in unmet], indent=2, ensure_ascii=False))
    else:
        typer.echo(wrapped("\n".join([*map(str, unmet), _summary(expected, report, len(unmet))])))
    if unmet:
        raise typer.Exit(UNMET)


def _summary(expected: Expectations, report: Report, unmet: int) -> str:
    tables = (expected.at_most, expected.fusions, *expected.modules.values())
    total = sum(map(len, tables)) + len(report.regions)
    result = f"{unmet} of {total} expectations are not met" if unmet else f"all {total} expectations are met"
    return f"{expected.source}, for {report.target}: {result}"


def _put(text: str, output: str) -> None:
    """Write `text` to the file `output`, or to stdout if it is "-"."""
    if output == "-":
        typer.echo(text, nl=False)
        return
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(
            f"writing expectations: {output!r} cannot be written ({error.strerror or error}); name a file in a folder "
            "that exists"
        ) from error
    tell(f"written: {escape(output)}")
