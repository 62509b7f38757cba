"""The command `cann-fusion`: explain a model, list the operators, list the rules."""

from __future__ import annotations

import importlib
import json
import sys
import traceback
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fusion import operators
from fusion.errors import FusionError, OptionError
from fusion.frontend import catalogue, hf
from fusion.frontend.explain import explain as explain_call
from fusion.frontend.library import library_for
from fusion.options import Options
from fusion.report.failures import worded
from fusion.report.report import Report

MODEL_FAILED, BAD_INPUT = 1, 2
"""Exit codes of the command, beside 0."""
_WIDTH = 130
_HUB = "Hugging Face models (hf:...)"

app = typer.Typer(
    name="cann-fusion",
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_show_locals=False,
)


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

    [dim]cann-fusion ops npu_rms_norm[/dim]                        what the chips accept

    [dim]cann-fusion rules rms_norm[/dim]                          what is recognised as a norm
    """


@app.command()
def explain(
    model: Annotated[str, typer.Argument(help="hf:<model type>, or package.module:factory.", show_default=False)],
    target: Annotated[str, typer.Option(help="Chip to plan for.")] = "ascend910_93",
    disable: Annotated[
        list[str] | None, typer.Option(help="Do without this rule or operator; may be repeated.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    opt_in: Annotated[
        list[str] | None, typer.Option(help="Use this rule, which is off otherwise; may be repeated.")
    ] = None,
    dump: Annotated[str, typer.Option(help="Folder for the graphs before and after, as text.")] = "",
    full: Annotated[
        bool, typer.Option("--traceback", help="Where the model fails: print the whole traceback.")
    ] = False,
    mode: Annotated[str, typer.Option(help="prefill or decode.", rich_help_panel=_HUB)] = "prefill",
    layers: Annotated[int, typer.Option(help="Number of layers.", rich_help_panel=_HUB)] = 2,
    dtype: Annotated[str, typer.Option(help="bf16, f16 or f32.", rich_help_panel=_HUB)] = "bf16",
    attn: Annotated[str, typer.Option(help="sdpa or eager.", rich_help_panel=_HUB)] = "sdpa",
    batch: Annotated[int, typer.Option(help="Number of sequences.", rich_help_panel=_HUB)] = 1,
    seq: Annotated[int, typer.Option(help="Tokens of a prefill.", rich_help_panel=_HUB)] = 32,
    context: Annotated[int, typer.Option(help="Length of the cache.", rich_help_panel=_HUB)] = 256,
    cache: Annotated[str, typer.Option(help="static, dynamic or none.", rich_help_panel=_HUB)] = "static",
    tiny: Annotated[bool, typer.Option("--tiny", help="Small real weights.", rich_help_panel=_HUB)] = False,
) -> None:
    """Report the fusions in a model, their savings, and refusals with their reasons.

    A factory is called without arguments and returns a module or function, with its arguments if it takes any:
    `model`, `(model, args)` or `(model, args, kwargs)`.

    Exit code 0: all of the call is explained. 1: the model raised; the report covers the graphs traced before. 2: an
    argument is wrong.

    [dim]cann-fusion explain hf:gpt_oss --mode decode --context 1024[/dim]

    [dim]cann-fusion explain hf:phi3 --disable npu_apply_rotary_pos_emb --json[/dim]
    """
    with _reported(f"explaining {model}", full):
        off, on = frozenset(disable or ()), frozenset(opt_in or ())
        options = Options(target=target, disable=off, opt_in=on, dump_dir=dump)
        library_for(options)
        named = model.removeprefix("hf:")
        request = hf.Request(named, mode, layers, dtype, attn, batch, seq, context, cache, tiny)
        failures: list[str] = []
        calls = hf.calls(request, failures) if named != model else [_factory(model)]
        report = _explained(calls, failures, options)
    if as_json:
        typer.echo(report.to_json())
    else:
        _console().print(*report.tables())
    if report.interruption is not None:
        _fail(f"explaining {model}", str(report.interruption), report.interruption.traceback if full else "")


@app.command()
def ops(
    name: Annotated[str, typer.Argument(help="One operator, with everything that is known of it.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the fused operators that can be emitted: schema, targets, limits, lowerings, source."""
    with _reported("listing operators"):
        entries = [catalogue.operator_entry(name)] if name else list(catalogue.operator_entries())
        origin = operators.ensure()
    if as_json:
        content = {"schemas": asdict(origin), "operators": [asdict(each) for each in entries]}
        typer.echo(json.dumps(content, indent=2, ensure_ascii=False))
        return
    console = _console()
    console.print(_operator(entries[0]) if name else _operators(entries))
    owner = f"torch_npu {origin.version}" if origin.source == "torch_npu" else "cann-fusion itself"
    console.print(f"schemas of {owner} are in use: {escape(origin.reason)}")


@app.command()
def rules(
    name: Annotated[str, typer.Argument(help="One rule, with its patterns and lowerings.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the installed rules: what each means, how it may be written, what it becomes."""
    with _reported("listing rules"):
        entries = [catalogue.rule_entry(name)] if name else list(catalogue.rule_entries())
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in entries], indent=2, ensure_ascii=False))
        return
    _console().print(_rule(entries[0]) if name else _rules(entries))


@contextmanager
def _reported(doing: str, full: bool = False) -> Generator[None, None, None]:
    """Print errors raised inside the context on stderr and exit: with 2 for wrong input of the user, with 1 for a model
    that fails.

    `doing` begins the message for a model; `full` adds the traceback.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torch")
            yield
    except FusionError as error:
        _complain(str(error))
        raise typer.Exit(BAD_INPUT) from None
    except Exception as error:
        _fail(doing, worded(error), traceback.format_exc() if full else "")


def _fail(doing: str, error: str, shown: str) -> NoReturn:
    """Report that the model failed in `doing` with `error`, after the traceback `shown` if not "", and exit."""
    if shown:
        typer.echo(shown, err=True)
    _complain(
        f"{doing}: the model cannot be traced to the end: {error}" + ("" if shown else "; --traceback shows where")
    )
    raise typer.Exit(MODEL_FAILED) from None


def _complain(text: str) -> None:
    _tell(f"[red]error:[/red] {escape(text)}")


def _tell(text: str) -> None:
    Console(stderr=True, soft_wrap=True, emoji=False, highlight=False).print(text)


def _console() -> Console:
    """Return a console of the width of the terminal, or of a fixed width for a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else _WIDTH, emoji=False)


def _explained(calls: Iterable[hf.Call], failures: list[str], options: Options) -> Report:
    """Explain `calls` one by one up to the first that is traced to its end; if none is, return the report of the first.

    The errors of the others are appended to `failures`, which `calls` reads to choose the next one.
    """
    reports: list[Report] = []
    for call in calls:
        for notice in call.notices:
            _tell(f"[dim]note: {escape(notice)}[/dim]")
        explained = explain_call(call.model, *call.args, options=options, **call.kwargs)
        reports.append(replace(explained, notes=call.notices))
        if explained.interruption is None:
            return reports[-1]
        failures.append(explained.interruption.error)
    return reports[0]


def _factory(model: str) -> hf.Call:
    """Call a factory, named as module:attribute, for the model and its arguments."""
    place, _, name = model.partition(":")
    doing = f"explaining {model}"
    if not place or not name:
        raise OptionError(f"{doing}: it names no model; write hf:<model type>, or package.module:factory")
    sys.path.insert(0, "")
    try:
        factory = getattr(importlib.import_module(place), name, None)
    except ModuleNotFoundError as error:
        hint = "start in the folder that holds it, or install it"
        raise OptionError(f"{doing}: there is no module {error.name!r}; {hint}") from error
    finally:
        sys.path.remove("")
    if not callable(factory):
        raise OptionError(f"{doing}: module {place!r} has no callable {name!r}; name a function that returns the model")
    return _checked(factory(), doing)


def _checked(returned: Any, doing: str) -> hf.Call:
    parts: tuple[Any, ...] = returned if isinstance(returned, tuple) else (returned,)
    if not 1 <= len(parts) <= 3:
        raise OptionError(
            f"{doing}: the factory returned a tuple of {len(parts)}; return (model, args, kwargs) at most"
        )
    model, args, kwargs = parts + ((), {})[len(parts) - 1 :]
    kinds = (("model", model, callable(model)), ("args", args, isinstance(args, (tuple, list))))
    for what, given, right in (*kinds, ("kwargs", kwargs, isinstance(kwargs, Mapping))):
        if not right:
            raise OptionError(
                f"{doing}: the factory returned {type(given).__name__} as {what}; "
                "return model, (model, args) or (model, args, kwargs)"
            )
    return hf.Call(model, kwargs, args=tuple(args))


def _operators(entries: list[catalogue.OperatorEntry]) -> Table:
    rows = ((each.name, each.summary, "\n".join(each.targets), "\n".join(each.lowerings)) for each in entries)
    return _listed("operators that can be emitted", ("operator", "what it computes", "targets", "lowered by"), rows)


def _operator(entry: catalogue.OperatorEntry) -> Table:
    arguments = [(name, f"[{dims}]  {', '.join(entry.dtypes.get(name, ()))}") for name, dims in entry.dims.items()]
    limits = [(f"limits on {target}", "\n".join(each) or "none") for target, each in entry.limits.items()]
    first = ("computes", entry.summary), ("schema", entry.schema), ("lowered by", ", ".join(entry.lowerings))
    raising = "\n".join(f"{name}: {because}" for name, because in entry.uncomputed.items())
    answers = ("computed", ", ".join(entry.computed)), ("not computed", raising or "none")
    older = (("older name", entry.older),) if entry.older else ()
    return _described(entry.name, (*first, *arguments, *answers, *limits, *older, ("source", entry.source)))


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
