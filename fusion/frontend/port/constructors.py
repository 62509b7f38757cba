"""Constructors: the statements that declare the modules and tensors of a class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import nn

from fusion.frontend.port.frames import Frame
from fusion.frontend.port.traced import Constant
from fusion.frontend.port.weights import Tensors, made_text
from fusion.records import Prepared

_BUFFER = "buffer "
"""Begin of the text of a tensor that is registered as a buffer."""


def declared(frame: Frame, tensors: Tensors) -> dict[str, str]:
    """Map the paths of layers and tensors that the class of `frame` declares to the texts that make them."""
    owned: dict[str, dict[str, torch.Tensor]] = {}
    for node, path in tensors.paths.items():
        if frame.has(path) and not any(each.has(path) for each in frame.children):
            owner, _, name = frame.local(path).rpartition(".")
            owned.setdefault(owner, {})[name] = node.meta["val"]
    at = f"{frame.path}." if frame.path else ""
    made: dict[str, str] = {}
    for owner, vals in owned.items():
        if owner:
            made[owner] = _layer(tensors.layer_kind(f"{at}{owner}.weight"), vals)
        else:
            made |= {name: _own(val, at + name, tensors) for name, val in vals.items()}
    return made if isinstance(tensors.traced.model, nn.Module) else _constants(tensors)


def _constants(tensors: Tensors) -> dict[str, str]:
    """Return the texts that make the tensors of a function, which are computed from nothing."""
    made: dict[str, str] = {}
    for node, path in tensors.paths.items():
        source = tensors.traced.sources[node]
        if isinstance(source, Prepared | Constant):
            made[path] = _BUFFER + made_text(source, node, (), (), "None").replace(", device=None", "")
    return made


def _layer(kind: str, vals: Mapping[str, torch.Tensor]) -> str:
    """Return the text of a layer of torch, or of a holder of tensors."""
    weight = vals.get("weight")
    if kind == "Linear" and weight is not None:
        bias = "" if "bias" in vals else "bias=False, "
        return f"nn.Linear({weight.shape[1]}, {weight.shape[0]}, {bias}dtype={weight.dtype})"
    if kind and weight is not None:
        return f"nn.Embedding({weight.shape[0]}, {weight.shape[1]}, dtype={weight.dtype})"
    return f"Weights({', '.join(f'{name}={_empty(val)}' for name, val in vals.items())})"


def _own(val: torch.Tensor, path: str, tensors: Tensors) -> str:
    model = tensors.traced.model
    is_parameter = isinstance(model, nn.Module) and path in dict(model.named_parameters(remove_duplicate=False))
    return f"nn.Parameter({_empty(val)}, requires_grad=False)" if is_parameter else _BUFFER + _empty(val)


def _empty(val: torch.Tensor) -> str:
    return f"torch.empty({', '.join(map(str, val.shape)) or '()'}, dtype={val.dtype})"


def constructor(made: Mapping[str, str]) -> list[str]:
    """Return the statements that make attributes by their dotted paths; numbers become lists of modules."""
    lines: list[str] = []
    for name, inner in _by_first(made).items():
        text = inner[""] if set(inner) == {""} else _container(inner)
        buffer = text.removeprefix(_BUFFER)
        lines.append(f"self.{name} = {text}" if buffer == text else f'self.register_buffer("{name}", {buffer})')
    return lines


def _container(made: Mapping[str, str]) -> str:
    """Return the expression of a list of modules, or of a dict of modules, by the paths inside."""
    texts = {name: inner[""] if set(inner) == {""} else _container(inner) for name, inner in _by_first(made).items()}
    if not all(name.isdigit() for name in texts):
        return f"nn.ModuleDict({{{', '.join(f'{name!r}: {text}' for name, text in texts.items())}}})"
    listed = [texts.get(str(number), "nn.Identity()") for number in range(max(map(int, texts)) + 1)]
    return f"nn.ModuleList({_repeated(listed)})"


def _repeated(texts: Sequence[str]) -> str:
    """Return the expression of a list of `texts`, with equal neighbours as a comprehension."""
    runs = [(text, len(list(same))) for text, same in groupby(texts)]
    parts = [f"*({text} for _ in range({count}))" if count > 1 else text for text, count in runs]
    return parts[0][2:-1] if len(runs) == 1 and runs[0][1] > 1 else f"[{', '.join(parts)}]"


def _by_first(made: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Group texts by the first step of their paths; the key inside is the rest of the path."""
    groups: dict[str, dict[str, str]] = {}
    for path, text in made.items():
        first, _, rest = path.partition(".")
        groups.setdefault(first, {})[rest] = text
    return groups
