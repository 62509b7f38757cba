"""Dumps: a graph as readable text, each node with its result, its rule and the model's own line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

from fusion.origin import location, module_path


def render(source: fx.Graph) -> str:
    """One line per node, a heading per module."""
    lines: list[str] = []
    module = None
    for node in source.nodes:
        path = module_path(node)
        if node.op == "call_function" and path != module:
            module = path
            lines.append(f"# {path or '(no module)'}")
        lines.append(_line(node))
    return "\n".join(lines) + "\n"


def _line(node: fx.Node) -> str:
    made = node.meta.get("fusion")
    notes = [f"by {made['rule']}"] if made else []
    place = location(node)
    notes += [place] if place else []
    comment = f"  # {', '.join(notes)}" if notes else ""
    if node.op == "placeholder":
        return f"%{node.name}: {_shape(node.meta.get('val'))} = input{comment}"
    if node.op == "output":
        return f"return {node.args[0]}"
    args = ", ".join([*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())])
    return f"%{node.name}: {_shape(node.meta.get('val'))} = {node.target}({args}){comment}"


def _shape(val: Any) -> str:
    if isinstance(val, torch.Tensor):
        return f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)}"
    return f"({', '.join(_shape(each) for each in val)})" if isinstance(val, (tuple, list)) else type(val).__name__


def write_graph(path: Path, source: fx.Graph) -> None:
    """Write a graph to a file, with the folders on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(source))
