"""Text and errors of the command on the terminal, and its exit codes."""

from __future__ import annotations

import sys
import textwrap
import traceback
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from fusion.errors import FusionError
from fusion.report.failures import worded
from fusion.report.text import WIDTH

MODEL_FAILED, BAD_INPUT = 1, 2
"""Exit codes of the command, beside 0."""
_WIDTH = 130


@contextmanager
def reported(doing: str, full: bool = False) -> Generator[None, None, None]:
    """Print errors raised inside the context on stderr and exit: with 2 for wrong input of the user, with 1 for a model
    that fails.

    `doing` begins the message for a model; `full` adds the traceback.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torch")
            yield
    except FusionError as error:
        complain(str(error))
        raise typer.Exit(BAD_INPUT) from None
    except typer.Exit:
        raise
    except Exception as error:
        fail(doing, worded(error), traceback.format_exc() if full else "")


def fail(doing: str, error: str, shown: str) -> NoReturn:
    """Report that the model failed in `doing` with `error`, after the traceback `shown` if not "", and exit."""
    if shown:
        typer.echo(shown, err=True)
    complain(
        f"{doing}: the model cannot be traced to the end: {error}" + ("" if shown else "; --traceback shows where")
    )
    raise typer.Exit(MODEL_FAILED) from None


def complain(text: str) -> None:
    """Print an error on stderr."""
    tell(f"[red]error:[/red] {escape(text)}")


def tell(text: str) -> None:
    """Print `text`, with markup of rich, on stderr."""
    Console(stderr=True, soft_wrap=True, emoji=False, highlight=False).print(text)


def wrapped(text: str) -> str:
    """Wrap the lines of `text` at `WIDTH` columns, further lines indented below the begin of the first."""
    return "\n".join(map(_wrapped_line, text.splitlines()))


def _wrapped_line(line: str) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    return textwrap.fill(
        line.strip(),
        WIDTH,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def console(width: int = _WIDTH) -> Console:
    """Return a console of the width of the terminal, or of `width` columns for a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else width, emoji=False)
