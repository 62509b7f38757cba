"""Pieces of Markdown that all generators write."""

from __future__ import annotations

import posixpath
import re
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
WIDTH = 118
"""Columns of a line of prose; a table row or a link may be longer."""
_MARKER = re.compile(r" ([-+*>=#]|\d+[.)]) ")
DOMAINS = {
    "norm": "Norms",
    "linear": "Linear layers and gates",
    "quant": "Quantisation",
    "rotary": "Rotary embeddings",
    "cache": "Caches",
    "attention": "Attention",
    "latent": "Latent attention (MLA)",
    "sparse": "Sparse attention",
    "moe": "Experts",
    "recurrent": "Recurrent states and delta rules",
    "streams": "Residual streams",
    "extras": "Other packages and older operators",
}
"""Folders of `fusion/operators` and `patterns` -> titles, in the order in which pages list them."""


def code(text: str) -> str:
    """Return `text` in backticks, for a cell of a table as well."""
    return "`" + text.replace("|", "\\|") + "`"


def escaped(text: str) -> str:
    """Return `text` with the characters escaped that Markdown reads as emphasis, as a border of a cell, or as HTML."""
    return re.sub(r"([|*_<\[])", r"\\\1", text)


def prose(text: str) -> str:
    """Return `text` escaped, with names of operators and options that have an underscore as code."""
    parts = re.split(r"(?<![\w`])([\w.]*[A-Za-z0-9]_[\w.]*\w_?)(?![\w(])", text)
    return "".join(code(part) if at % 2 else escaped(part) for at, part in enumerate(parts))


def wrapped(text: str, indent: str = "", first: str = "") -> str:
    """Return `text` in lines of at most `WIDTH` columns: the first begins with `first`, the others with `indent`."""
    bound = _MARKER.sub("\u00a0\\1 ", text)  # no line begins with what Markdown reads as an entry of a list
    lines = textwrap.fill(
        bound, WIDTH, initial_indent=first, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return lines.replace("\u00a0", " ")


def item(text: str) -> str:
    """Return an entry of a list."""
    return wrapped(text, indent="  ", first="* ")


def slug(heading: str) -> str:
    """Return the anchor of `heading`, as GitHub and the site make it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table, or "" for one without rows."""
    lines = ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    head = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join([*head, *lines]) + "\n" if lines else ""


def link(text: str, path: str, page: str) -> str:
    """Return a link with `text` to the file `path` of the repository, from the page docs/`page`."""
    return f"[{text}]({posixpath.relpath(path, posixpath.dirname('docs/' + page))})"


def source(module: str, page: str) -> str:
    """Return a link from docs/`page` to the source of `module`, named by its path."""
    path = module.replace(".", "/")
    path = f"{path}/__init__.py" if (ROOT / path).is_dir() else f"{path}.py"
    return link(code(path), path, page)
