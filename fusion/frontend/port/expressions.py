"""Expressions: calls of aten and of fused operators as the Python that a person writes."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
import torch.nn.functional as F

from fusion._torch.operators import OpOverload, schema_of, short_name

Write = Callable[[Any], str]
"""Text of an operand: of a node its name or expression, of anything else its literal."""

_INFIX = {
    "add.Tensor": "+", "sub.Tensor": "-", "mul.Tensor": "*", "div.Tensor": "/", "pow.Tensor_Scalar": "**",
    "add.Scalar": "+", "sub.Scalar": "-", "mul.Scalar": "*", "div.Scalar": "/", "pow.Scalar": "**",
    "pow.Tensor_Tensor": "**",
    "mm.default": "@", "bmm.default": "@", "matmul.default": "@", "lt.Scalar": "<", "lt.Tensor": "<",
    "le.Scalar": "<=", "le.Tensor": "<=", "gt.Scalar": ">", "gt.Tensor": ">", "ge.Scalar": ">=", "ge.Tensor": ">=",
    "eq.Scalar": "==", "eq.Tensor": "==", "ne.Scalar": "!=", "ne.Tensor": "!=", "bitwise_and.Tensor": "&",
    "bitwise_or.Tensor": "|", "bitwise_xor.Tensor": "^", "remainder.Scalar": "%", "remainder.Tensor": "%",
    "floor_divide.default": "//", "logical_and.default": "&", "logical_or.default": "|",
}  # fmt: skip
_PREFIX = {"neg.default": "-", "bitwise_not.default": "~", "logical_not.default": "~"}
_ON_BOOLS = {"logical_and.default", "logical_or.default", "logical_not.default"}
_RENAMED = {"_unsafe_view": "view", "_grouped_mm": "grouped_mm", "constant_pad_nd": "pad"}
_FUNCTIONS = {"cat", "stack", "where", "embedding", "linear", "silu", "gelu", "layer_norm", "rms_norm", "einsum"}
"""Operators that are written as functions although Tensor has a method, or no method has them."""
_FACTORIES = {"arange", "full", "zeros", "ones", "empty", "scalar_tensor", "eye", "linspace", "tril_indices"}
_UNWRITTEN = {"pin_memory": (None, False), "layout": (None, torch.strided), "cudnn_enable": (True, False)}


def writer(text_of: Callable[[fx.Node], str]) -> Write:
    """Return a function that writes an operand, with nodes by `text_of`."""

    def write(value: Any) -> str:
        if isinstance(value, fx.Node):
            return text_of(value)
        if isinstance(value, (list, tuple)) and any(isinstance(each, fx.Node) for each in value):
            return f"[{', '.join(map(write, value))}]"
        return literal(value)

    return write


def call_text(node: fx.Node, write: Write, device: Callable[[], str]) -> str:
    """Return the expression of the call `node`, with operands by `write`.

    `device` returns the expression of the device on which tensors are made.
    """
    target: Any = node.target
    if target is operator.getitem:
        return f"{closed(write(node.args[0]))}[{node.args[1]}]"
    if not isinstance(target, OpOverload):
        return f"{target.__module__}.{target.__name__}({_joined(node.args, node.kwargs, write)})"
    namespace = schema_of(target).name.split("::")[0]
    if namespace != "aten":
        return _operator(node, write)
    return _idiom(node, write) or _function(node, write, device)


def is_fused(node: fx.Node) -> bool:
    """Return True if `node` calls an operator of another library than aten."""
    return isinstance(node.target, OpOverload) and not schema_of(node.target).name.startswith("aten::")


def literal(value: Any) -> str:
    """Return the text of a constant."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, (list, tuple)):
        inner = ", ".join(map(literal, value))
        return f"[{inner}]"
    if isinstance(value, str):
        return f'"{value}"'
    return str(value) if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)) else repr(value)


def operands(node: fx.Node, with_defaults: bool = False) -> list[tuple[str, Any]]:
    """List the arguments of the call `node` by name; those with their default value only `with_defaults`."""
    target: Any = node.target
    declared = schema_of(target).arguments
    values = {**{each.name: given for each, given in zip(declared, node.args, strict=False)}, **node.kwargs}
    return [
        (each.name, values[each.name])
        for each in declared
        if each.name in values and (with_defaults or not _is_default(each, values[each.name]))
    ]


def _is_default(argument: Any, value: Any) -> bool:
    if not argument.has_default_value() or isinstance(value, fx.Node):
        return False
    if isinstance(value, (list, tuple)) and any(isinstance(each, fx.Node) for each in value):
        return False
    same = argument.default_value == value and type(argument.default_value) is type(value)
    return bool(same) or value in _UNWRITTEN.get(argument.name, ())


def _operator(node: fx.Node, write: Write) -> str:
    """Return the call of a fused operator, with its first tensor by position and everything else by name."""
    target: Any = node.target
    namespace, name = schema_of(target).name.split("::")
    overload = "." * bool(schema_of(target).overload_name) + schema_of(target).overload_name
    given = operands(node, with_defaults=True)
    first = [write(value) for _, value in given[:1]]
    rest = [f"{name}={write(value)}" for name, value in given[1:]]
    return f"torch.ops.{namespace}.{name}{overload}({', '.join([*first, *rest])})"


def _idiom(node: fx.Node, write: Write) -> str:
    """Return the call `node` as an operator, an index or a well-known method; "" where it has no such form."""
    target: Any = node.target
    name = short_name(target)
    args: Any = node.args
    key = f"{name}.{schema_of(target).overload_name or 'default'}"
    if key in _ON_BOOLS and any(each.meta["val"].dtype != torch.bool for each in node.all_input_nodes):
        return ""
    if key in _INFIX and not node.kwargs and len(args) == 2:
        return f"{closed(write(args[0]))} {_INFIX[key]} {closed(write(args[1]))}"
    if key in _PREFIX:
        return f"{_PREFIX[key]}{closed(write(args[0]))}"
    if name == "_to_copy":
        return _cast(node, write)
    if name in ("view", "_unsafe_view", "reshape", "expand", "permute") and not node.kwargs:
        shape: Any = node.meta["val"].shape if name in ("view", "_unsafe_view") else args[1]
        method = _RENAMED.get(name, name)
        return f"{closed(write(args[0]))}.{method}({', '.join(map(write, shape)) or '()'})"
    if name == "lift_fresh_copy":
        return f"{closed(write(args[0]))}.clone()"
    if name == "clone" and node.kwargs.get("memory_format") is torch.contiguous_format:
        is_copied = args[0].meta["val"].is_contiguous()  # contiguous() returns such a tensor itself
        return f"{closed(write(args[0]))}.{'clone' if is_copied else 'contiguous'}()"
    if name in ("select", "slice", "index") and not node.kwargs:
        return _index(node, write)
    if name == "embedding":  # torch has indices first
        return f"F.embedding({write(args[1])}, {write(args[0])})"
    if name == "convolution":
        return _convolution(node, write)
    if name == "split_with_sizes":
        dim = f", dim={args[2]}" if len(args) > 2 else ""
        return f"{closed(write(args[0]))}.split({write(args[1])}{dim})"
    return ""


def _convolution(node: fx.Node, write: Write) -> str:
    """Return a convolution as a function of its number of dims; "" for a transposed one."""
    x, weight, bias, stride, padding, dilation, transposed, _, groups = node.args
    rank = node.meta["val"].dim() - 2
    if transposed or rank not in (1, 2, 3):
        return ""
    options = {"stride": (stride, 1), "padding": (padding, 0), "dilation": (dilation, 1), "groups": ([groups], 1)}
    written = {
        key: value[0] if len({*value}) == 1 else tuple(value)  # pyright: ignore
        for key, (value, default) in options.items()
        if {*value} != {default}  # pyright: ignore
    }
    given = [write(x), write(weight), *([] if bias is None else [write(bias)])]
    return f"F.conv{rank}d({', '.join([*given, *(f'{key}={value}' for key, value in written.items())])})"


def _cast(node: fx.Node, write: Write) -> str:
    source: Any = node.args[0]
    dtype = node.meta["val"].dtype
    if set(node.kwargs) == {"device"} and torch.device(node.kwargs["device"]).type == "cpu":  # pyright: ignore
        return f"{closed(write(source))}.cpu()"
    memory_format = node.kwargs.get("memory_format")
    rest = "" if memory_format is None else f", memory_format={memory_format}"
    copies = ", copy=True" if source.meta["val"].dtype == dtype else ""
    return f"{closed(write(source))}.to({dtype}{copies}{rest})"


def _index(node: fx.Node, write: Write) -> str:
    """Return a select, a slice or an index by tensors as a subscript."""
    name, (source, *rest) = short_name(node.target), node.args
    val: Any = source.meta["val"]  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    if name == "index":
        steps: list[str] = [":" if each is None else write(each) for each in rest[0]]  # pyright: ignore
        return f"{closed(write(source))}[{', '.join(steps)}]"
    dim: Any = rest[0] if rest else 0
    dim %= val.dim()
    if name == "select":
        step = write(rest[1])
    else:
        start, stop, stride = (*rest[1:], *(None, None, 1)[len(rest) - 1 :])
        size: Any = val.shape[dim]
        begin = "" if start in (None, 0) else write(start)
        end = "" if stop is None or (isinstance(stop, int) and stop >= size) else write(stop)
        step = f"{begin}:{end}" + (f":{stride}" if stride != 1 else "")
    from_the_end = val.dim() - 1 - dim < dim
    around = ["...", step, *[":"] * (val.dim() - 1 - dim)] if from_the_end else [*[":"] * dim, step]
    return f"{closed(write(source))}[{', '.join(around)}]"


def _function(node: fx.Node, write: Write, device: Callable[[], str]) -> str:
    """Return the call `node` as a method of its first tensor, or as a function of torch."""
    target: Any = node.target
    name = _RENAMED.get(short_name(target), short_name(target))
    given = [(key, value) for key, value in operands(node) if value not in _UNWRITTEN.get(key, ())]
    written = {key: device() if key == "device" else write(value) for key, value in given}
    if name in _FACTORIES or name.startswith("new_"):
        written.pop("device", None) if name.startswith("new_") else written.update(device=device())
    is_method = given[:1] and given[0][0] == "self" and hasattr(torch.Tensor, name) and name not in _FUNCTIONS
    if is_method:
        receiver, *rest = written.items()
        return f"{closed(receiver[1])}.{name}({_arguments(rest, target)})"
    module = next((text for text, each in _MODULES.items() if hasattr(each, name)), "")
    if name.startswith("linalg_"):
        return f"torch.linalg.{name.removeprefix('linalg_')}({_arguments(list(written.items()), target)})"
    if not module:
        overload = schema_of(target).overload_name or "default"
        return f"torch.ops.aten.{name}.{overload}({_arguments(list(written.items()), target)})"
    return f"{module}.{name}({_arguments(list(written.items()), target)})"


_MODULES: Mapping[str, Any] = {"F": F, "torch": torch}


def _arguments(written: Sequence[tuple[str, str]], target: Any) -> str:
    """Join arguments: those in front by position, from the first that is left out or is keyword-only on by name."""
    declared = [each.name for each in schema_of(target).arguments if not each.kwarg_only]
    first = declared.index(written[0][0]) if written and written[0][0] in declared else 0
    texts: list[str] = []
    in_place = True
    for number, (name, text) in enumerate(written):
        in_place &= declared[first + number : first + number + 1] == [name] and name not in _BY_NAME
        texts.append(text if in_place else f"{name}={text}")
    return ", ".join(texts)


_BY_NAME = {
    "dim",
    "keepdim",
    "dtype",
    "device",
    "descending",
    "largest",
    "sorted",
    "min",
    "max",
    "approximate",
    "offs",
    "value",
}
"""Arguments that are written by name in any case."""


def _joined(args: Sequence[Any], kwargs: Mapping[str, Any], write: Write) -> str:
    return ", ".join([*map(write, args), *(f"{name}={write(value)}" for name, value in kwargs.items())])


def closed(text: str) -> str:
    """Return `text` as an operand that binds tighter than any operator: in brackets unless a name, call or literal."""
    depth = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and character == " ":
            return f"({text})"
    return f"({text})" if text[:1] in "-~" else text
