"""Provenance of nodes: file, line and module of the model, and the text of a graph that is annotated with them."""

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
    """Return the Python frames in which `node` was made, outermost first, without those of torch unless all are."""
    stack = list(_FRAME.finditer(node.meta.get("stack_trace") or ""))
    own = [frame for frame in stack if not any(part in frame["file"] for part in _LIBRARY)]
    return own or stack


def location(node: fx.Node) -> str:
    """Return `file:line` of the innermost frame of `node`, "" without a stack trace."""
    stack = frames(node)
    return f"{stack[-1]['file']}:{stack[-1]['line']}" if stack else ""


def source_text(node: fx.Node) -> str:
    """Return the source line of the innermost frame of `node`, "" without a stack trace."""
    stack = frames(node)
    return (stack[-1]["text"] or "").strip() if stack else ""


def module_path(node: fx.Node) -> str:
    """Return the dotted path of the module whose forward made `node`, "" for functional code."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    return _dotted(str(list(stack.values())[-1][0]))


def modules(node: fx.Node) -> list[tuple[str, list[str]]]:
    """Return path and qualified class names of the modules in whose forward `node` was made, outermost first.

    The names are those of the class and its bases; of a module that was exported, that of the class alone.
    """
    return [(path, _class_names(kind)) for _, path, kind in module_chain(node)]


@cache
def _class_names(kind: type | str) -> list[str]:
    if isinstance(kind, str):
        return [kind]
    return [f"{each.__module__}.{each.__qualname__}" for each in kind.__mro__]


def module_chain(node: fx.Node) -> list[tuple[str, str, Any]]:
    """List the modules in whose forwards `node` was made, outermost first: key of the call, dotted path and type."""
    stack: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    return [(key, _dotted(str(path)), kind) for key, (path, kind) in stack.items()]


def place_of(node: fx.Node) -> str:
    """Describe where `node` was made, as "in layers.1.attn at model.py:12", or by its name if nothing is recorded."""
    return described(module_path(node), location(node)) or f"at node {node.name}"


def described(module: str, where: str) -> str:
    """Describe a place by its module and `file:line`, each if not "", as "in layers.1.attn at model.py:12"."""
    parts = ("in", module), ("at", where)
    return " ".join(f"{word} {part}" for word, part in parts if part)


@cache
def _dotted(path: str) -> str:
    """Convert the `path` that Dynamo gives a module, an expression in Python, to its name among `named_modules` of the
    model; behind the name of the variable, where a function is compiled that reads the model from one.
    """
    path = re.sub(r"^L\['(self|fn|args|kwargs)'\]\.?", "", path)
    path = re.sub(r"^(G\['__import_\w+'\]\.|[LG](?=\[))", "", path)
    keys = r"\._modules\['([^']+)'\]|\['([^']+)'\]|\[(\d+)\]"
    path = re.sub(keys, lambda match: "." + next(filter(None, match.groups())), path)
    return path.strip(".")


def inherit(node: fx.Node, parent: fx.Node) -> None:
    """Copy the provenance of `parent` to `node`, keeping entries that `node` has."""
    for key in PROVENANCE:
        if key in parent.meta and key not in node.meta:
            node.meta[key] = parent.meta[key]


def render(source: fx.Graph) -> str:
    """Format a graph: one line per node with its result, rule and line of the model, and a heading per module."""
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
    """Format the dtype and shape of a tensor, of each item of a tuple or list, or the type of anything else."""
    if isinstance(val, torch.Tensor):
        return f"{str(val.dtype).removeprefix('torch.')}{list(val.shape)}"
    return f"({', '.join(look(each) for each in val)})" if isinstance(val, (tuple, list)) else type(val).__name__
