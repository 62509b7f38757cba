"""Dumps of graphs as text, for the option `dump_dir`."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch.fx as fx

from fusion.graph.origin import render
from fusion.report.failures import worded


def dump(folder: str, name: str, source: fx.Graph) -> bool:
    """Write a graph as text into a folder, if one is named; True if it was written.

    Where it cannot be written, a warning names the error, and the graph is fused all the same.
    """
    if not folder:
        return False
    try:
        text = render(source)
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / name).write_text(text, encoding="utf-8")
    except Exception as error:
        warnings.warn(
            f"cann-fusion could not write {name} into the folder {folder!r} ({worded(error)}): the graph is fused "
            "without a dump. Name a folder in option dump_dir that can be written to.",
            stacklevel=2,
        )
        return False
    return True
