"""Where a node comes from: the user's own file and line, its module, and a graph as text that says so of each node."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import torch
import torch.fx as fx

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)(?:\n\s*(?P<text>[^\n]+))?')
_LIBRARY = ("/torch/nn/", "/torch/_", "/torch/utils/", "/torch/fx/")
PROVENANCE = ("stack_trace", "nn_module_stack", "source_fn_stack", "original_aten", "seq_nr", "from_node")


def frames(node: fx.Node) -> list[re.Match[str]]:
    """The Python frames of the model's code that made this node, outermost first."""
    found = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    own = [frame for frame in found if not any(part in frame["file"] for part in _LIBRARY)]
    return own or found


def location(node: fx.Node) -> str:
    """`file:line` of the innermost line of the model's code, "" where the graph does not tell."""
    found = frames(node)
    return f"{found[-1]['file']}:{found[-1]['line']}" if found else ""


def source_text(node: fx.Node) -> str:
    """The text of that line."""
    found = frames(node)
    return (found[-1]["text"] or "").strip() if found else ""


def module_path(node: fx.Node) -> str:
    """Dotted path of the module whose forward made this node, "" for functional code."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    return _dotted(str(list(stack.values())[-1][0]))


def place_of(node: fx.Node) -> str:
    """Say where a node was made: "in layers.1.attn at model.py:12", as far as that is known, else by its name."""
    parts = ("in", module_path(node)), ("at", location(node))
    return " ".join(f"{word} {part}" for word, part in parts if part) or f"at node {node.name}"


@cache
def _dotted(path: str) -> str:
    """What Dynamo calls a module, as the model's own `named_modules` does."""
    path = re.sub(r"^L\['(self|fn|args|kwargs)'\]\.?", "", path)
    keys = r"\._modules\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]"
    path = re.sub(keys, lambda found: "." + next(filter(None, found.groups())), path)
    return path.strip(".")


def inherit(node: fx.Node, parent: fx.Node) -> None:
    """Give a new node the provenance of the node that it replaces."""
    for key in PROVENANCE:
        if key in parent.meta and key not in node.meta:
            node.meta[key] = parent.meta[key]


def render(source: fx.Graph) -> str:
    """A graph as text: one line per node with its result, its rule and the model's own line, a heading per module."""
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
        return f"%{node.name}: {look(node.meta.get('val'))} = input{comment}"
    if node.op == "output":
        return f"return {node.args[0]}"
    args = ", ".join([*map(str, node.args), *(f"{name}={value}" for name, value in node.kwargs.items())])
    return f"%{node.name}: {look(node.meta.get('val'))} = {node.target}({args}){comment}"


def look(val: Any) -> str:
    """Show dtype and shape of tensors, the type of anything else."""
    if isinstance(val, torch.Tensor):
        return f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)}"
    return f"({', '.join(look(each) for each in val)})" if isinstance(val, (tuple, list)) else type(val).__name__
