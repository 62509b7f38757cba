"""The file of a port: header, classes, and the functions that load tensors of the model."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

from torch import nn

from fusion.errors import FusionError
from fusion.frontend.port.classes import Classes
from fusion.frontend.port.frames import frames_of
from fusion.frontend.port.lines import Replaced
from fusion.frontend.port.tidy import tidy
from fusion.frontend.port.traced import Traced, Weight, class_name
from fusion.frontend.port.weights import (
    Tensors,
    fold_single_numbers,
    inline_prepared,
    made_text,
    subscripted,
    tensors_of,
)
from fusion.report.trace import displayed

WIDTH = 100


def source_of(traced: Traced) -> str:
    """Return the source of the port of `traced`."""
    traced = inline_prepared(traced)
    tidy(traced.graph)
    fold_single_numbers(traced)
    tidy(traced.graph)
    root = frames_of(traced)
    tensors = tensors_of(traced, root)
    replaced = Replaced(traced.chosen)
    classes = Classes(root, tensors, replaced)
    texts = [classes.text(each) for each in classes.all]
    if any("Weights(" in each for each in texts):
        texts.insert(0, _WEIGHTS)
    load = _load(tensors, class_name(traced.name))
    used = "\n".join([*texts, load])
    imports = ["import torch", *["import torch.nn.functional as F"] * ("F." in used), "from torch import nn"]
    parts = [
        _header(traced, sorted(map(displayed, replaced.files))),
        "\n".join(imports),
        "from fusion import operators\n\noperators.ensure()",
        *texts,
        load,
    ]
    return formatted("\n\n\n".join(filter(None, parts)) + "\n")


_WEIGHTS = '''class Weights(nn.Module):
    """Parameters of a module of the model whose code is a part of a fused call."""

    def __init__(self, **tensors):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))'''


def _header(traced: Traced, origins: Sequence[str]) -> str:
    """Return the docstring of the file: origin, use, and what the port relies on."""
    make = "from_plain(model)" if isinstance(traced.model, nn.Module) else f"{class_name(traced.name)}()"
    sections = [
        f"{traced.name} with fused CANN operators, for {traced.target}.",
        f"Written by cann-fusion {version('cann-fusion')} from one call of the model, whose sizes and dtypes it has:",
        f"    ported = {make}\n    ported({', '.join(traced.parameters)})",
        _OPERATORS,
        *_listed(_COUNTED, traced.counted),
        *_listed(_ASSUMED, [f"{name}: {kind}" for name, kind in traced.assumptions.items()]),
        *_listed("Comments above a fused call name the lines of the model that it replaces, in:", origins),
    ]
    return '"""' + "\n\n".join(sections) + '\n"""'


def _listed(title: str, items: Sequence[str]) -> list[str]:
    return [title, "\n".join(f"    {each}" for each in items)] if items else []


_OPERATORS = """\
The operators are those of torch_npu where it can be imported. Anywhere else `operators.ensure()` of
cann-fusion registers exact decompositions, so that this file runs on any machine."""
_COUNTED = "VALID FOR ONE STEP ONLY: the model counts in Python, and the numbers of the call are constants here:"
_ASSUMED = "RELIES ON, without a check at each call:"


def _load(tensors: Tensors, name: str) -> str:
    """Return the functions `prepare` and `from_plain`; "" for a function, which has no tensors of its own."""
    if not isinstance(tensors.traced.model, nn.Module) or not tensors.paths:
        return ""
    lines = ["    state = dict(plain)", *_formulas(tensors)]
    if any("device=device" in each for each in lines):
        lines.insert(1, "    device = next((each.device for each in plain.values()), None)")
    lines += _copies([*tensors.written()])
    lines = [*lines, "    return state"] if len(lines) > 1 else ["    return dict(plain)"]
    known = {name for name, _ in [*tensors.traced.model.named_parameters(), *tensors.traced.model.named_buffers()]}
    known |= {each for each, _ in tensors.traced.model.named_parameters(remove_duplicate=False)}
    read = [each.path for each in tensors.traced.sources.values() if isinstance(each, Weight)]
    others = [f'    tensors["{path}"] = model.{subscripted(path)}' for path in read if path not in known]
    return _LOAD.format(name=name, formulas="\n".join(lines), others="".join(f"\n{each}" for each in others))


_LOAD = '''def prepare(plain):
    """Return the tensors of the port from `plain`, those of the model, by their names."""
{formulas}


def from_plain(model):
    """Return the port with the tensors of `model`; what is not prepared shares their memory."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False)){others}
    with torch.device("meta"):
        ported = {name}()
    with torch.no_grad():
        state = prepare(tensors)
    ported.load_state_dict({{name: state[name] for name in ported.state_dict()}}, assign=True)
    return ported.eval()'''


def _formulas(tensors: Tensors) -> list[str]:
    """Write the formula of each prepared tensor; one loop for all modules that have the same."""
    inputs = {node.name: node for node in tensors.traced.sources}
    same: dict[tuple[str, str], list[str]] = {}
    for node, frame in tensors.homes.items():
        prepared: Any = tensors.traced.sources[node]
        read = [inputs[each] for each in prepared.sources]
        texts: list[str] = []
        for each in read:
            source: Any = tensors.traced.sources[each]
            assert isinstance(source, Weight)
            inside = frame.has(source.path) and frame.path
            texts.append(f'plain[{_AT}{frame.local(source.path)}"]' if inside else f'plain["{source.path}"]')
        text = made_text(prepared, node, [each.meta["val"] for each in read], texts, "device")
        key = frame.local(tensors.paths[node]), text
        same.setdefault(key, []).append(frame.path)
    return _loops(same)


def _copies(paths: Sequence[str]) -> list[str]:
    """Write the copies of the tensors at `paths`; one loop for the same tensor of several modules."""
    same: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        module, _, name = path.rpartition(".")
        same.setdefault((name, f'plain[{_AT}{name}"].clone()'), []).append(module)
    return ["    # the forward writes to copies", *_loops(same)] if paths else []


_AT = 'at + "'
"""Begin of the text of a path inside a module whose own path, with a point behind it, is the variable `at`."""


def _loops(same: Mapping[tuple[str, str], Sequence[str]]) -> list[str]:
    by_paths: dict[tuple[str, ...], list[tuple[str, str]]] = {}
    for (local, text), paths in same.items():
        by_paths.setdefault(tuple(paths), []).append((local, text))
    lines: list[str] = []
    for paths, formulas in by_paths.items():
        if len(paths) == 1:
            at = f"{paths[0]}." if paths[0] else ""
            lines += [f'    state["{at}{local}"] = {text.replace(_AT, chr(34) + at)}' for local, text in formulas]
            continue
        lines.append(f"    for at in {_places(paths)}:")
        lines += [f'        state[{_AT}{local}"] = {text}' for local, text in formulas]
    return lines


def _places(paths: Sequence[str]) -> str:
    """Return the expression of the list of `paths`, each with a point behind it."""
    steps = [each.split(".") for each in paths]
    at = [n for n, several in enumerate(zip(*steps, strict=False)) if len(set(several)) > 1]
    numbers = [each[at[0]] for each in steps] if len(at) == 1 and len({len(each) for each in steps}) == 1 else []
    if len(numbers) > 1 and all(each.isdigit() for each in numbers):
        first, last = int(numbers[0]), int(numbers[-1])
        pattern = ".".join([*steps[0][: at[0]], "{i}", *steps[0][at[0] + 1 :]])
        if [int(each) for each in numbers] == list(range(first, last + 1)):
            bounds = f"{first}, {last + 1}" if first else f"{last + 1}"
            return f'[f"{pattern}." for i in range({bounds})]'
        return f'[f"{pattern}." for i in ({", ".join(numbers)})]'
    return "[" + ", ".join(f'"{each}."' for each in paths) + "]"


def formatted(source: str) -> str:
    """Format `source` by ruff.

    Raises:
        FusionError: ruff is not installed.
    """
    if find_spec("ruff") is None:
        raise FusionError(
            "porting a model: ruff, which formats the source, is not installed; pip install cann-fusion[port]"
        )
    from ruff import find_ruff_bin

    common = ["--isolated", "--quiet", "--line-length", str(WIDTH), "-"]
    for command in (
        ["format", "--stdin-filename", "port.py"],
        ["check", "--fix-only", "--select", "F,I", "--stdin-filename", "port.py"],
        ["format"],
    ):
        done = subprocess.run(
            [find_ruff_bin(), *command, *common], input=source, text=True, capture_output=True, check=False
        )
        if done.returncode:
            raise FusionError(
                f"porting a model: the source that was written cannot be formatted: {done.stderr}\n{source}"
            )
        source = done.stdout
    return source
