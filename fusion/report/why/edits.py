"""Edits of one call of a captured graph: another constant, a number under a root, an operand that is cast, rounded,
expanded or allocated otherwise, results in the other order, or the call left out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, cast

import torch
import torch.fx as fx

from fusion._torch.fakes import FakeTensor, FakeTensorMode, fake_mode_of, run_on_fakes, unlogged
from fusion._torch.nested import map_only
from fusion._torch.operators import given, schema_of, short_name
from fusion._torch.tracing import copied
from fusion.graph.origin import location

aten = torch.ops.aten
EPS = 1e-6
"""Number that is added under a root."""


@dataclass(frozen=True)
class Step:
    """A call that an operand goes through: `text` is the call of a method, ".round()"."""

    text: str
    target: Any
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Edit:
    """Edit of a call.

    Attributes:
        node: name of the node.
        operator: name of its operator.
        kind: "constant", "eps", "step", "allocate", "swap" or "omit".
        argument: name of the argument that is edited; of an omitted call, the operand that stays.
        old: the constant; of an omitted call, the only number among its arguments, if there is one.
        new: the constant in its place, or the `Step` that an operand goes through.
        position: place of the argument in the schema of the operator; of an input, among the inputs of the call.
    """

    node: str
    operator: str
    kind: str
    argument: str
    old: Any = None
    new: Any = None
    position: int = 0

    def __str__(self) -> str:
        match self.kind:
            case "omit":
                return f"leave {self.operator} out"
            case "eps":
                return f"add {EPS} under {self.operator}"
            case "step":
                return f"write {self.new} behind the argument {self.argument} of {self.operator}"
            case "swap":
                return f"exchange the two results of {self.operator}"
            case "allocate":
                return f"allocate the tensor that {self.operator} reads contiguous"
            case _:
                return f"{self.operator}: set {self.argument} to {self.new} in place of {self.old}"


_Test = Callable[[Any, torch.Tensor], bool]
"""Condition on a constant of a call, and on the first operand."""


def _is_other_dim(dim: Any, x: torch.Tensor) -> bool:
    return isinstance(dim, int) and dim not in (-1, x.dim() - 1)


def _is_list_of_other_dim(dims: Any, x: torch.Tensor) -> bool:
    return isinstance(dims, (list, tuple)) and len(cast(list[Any], dims)) == 1 and _is_other_dim(dims[0], x)


def _is_finite_fill(value: Any, x: torch.Tensor) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value) and value <= 0


def _is_other_eps(value: Any, x: torch.Tensor) -> bool:
    return isinstance(value, (int, float)) and value not in (1, EPS)


def _differs(new: Any) -> _Test:
    return lambda value, x: value is not None and value != new


_LAST, _EACH_LAST = ("dim", -1, _is_other_dim), ("dim", [-1], _is_list_of_other_dim)
_POPULATION = ("correction", 0, _differs(0))
_CONSTANTS: Mapping[str, tuple[tuple[str, Any, _Test], ...]] = {
    "softmax": (_LAST,),
    "_softmax": (_LAST,),
    "mean": (_EACH_LAST,),
    "sum": (_EACH_LAST,),
    "var": (_POPULATION, _EACH_LAST),
    "var_mean": (_POPULATION, _EACH_LAST),
    "std": (_POPULATION,),
    "masked_fill": (("value", -inf, _is_finite_fill),),
    "full": (("fill_value", -inf, _is_finite_fill),),
    "full_like": (("fill_value", -inf, _is_finite_fill),),
    "scalar_tensor": (("s", -inf, _is_finite_fill),),
    "add": (("other", EPS, _is_other_eps),),
    "mul": (
        ("other", 1.0, lambda value, x: isinstance(value, (int, float)) and value < 0),
        ("other", -1e4, lambda value, x: isinstance(value, (int, float)) and -1e4 < value < -1),
    ),
    "clamp": (("min", -128, _differs(-128)), ("max", 127, _differs(127))),
    "topk": (("dim", -1, _is_other_dim), ("largest", True, _differs(True))),
    "index_put": (("accumulate", False, _differs(False)),),
    "native_layer_norm": (("eps", 1e-5, lambda value, x: value <= 0),),
    "layer_norm": (("eps", 1e-5, lambda value, x: value is not None and value <= 0),),
    "rms_norm": (("eps", EPS, lambda value, x: value is None or value <= 0),),
}  # fmt: skip
"""Operator -> the argument, the constant that fused operators have there, and when a constant differs from it."""
_OMITTED = frozenset(
    {
        "add", "sub", "mul", "div", "neg", "abs", "tanh", "sigmoid", "relu", "softplus", "exp", "log", "sqrt", "clamp",
        "clamp_min", "clamp_max", "round", "_to_copy", "masked_fill", "softmax", "dropout",
    }
)  # fmt: skip
"""Operators whose result may be one of their operands instead."""
_OF_ONE_DTYPE = frozenset({"add", "sub", "scaled_dot_product_attention"})
"""Operators whose fused forms have operands of one dtype."""


def edits(node: fx.Node) -> Iterator[Edit]:
    """Yield the edits of the call `node`, the smallest first."""
    name, val = short_name(node.target), node.meta.get("val")
    if name and isinstance(val, (list, tuple)):
        yield from _swapped(node, name, cast(Sequence[Any], val))
    if not name or not isinstance(val, torch.Tensor):
        return
    arguments = given(node.target, node.args, node.kwargs)
    first = next((each.meta["val"] for each in node.all_input_nodes if _is_tensor(each)), val)
    for argument, new, differs in _CONSTANTS.get(name, ()):
        old = arguments.get(argument, 1 if argument == "correction" else None)
        if not isinstance(old, fx.Node) and differs(old, first):
            yield Edit(node.name, name, "constant", argument, old, new, _position(node, argument))
    if name == "clamp":
        yield from _bounded(node, arguments)
    if name in ("rsqrt", "sqrt"):
        yield Edit(node.name, name, "eps", "self")
    for argument, step in _steps(name, arguments, val):
        yield Edit(node.name, name, "step", argument, None, step, _position(node, argument))
    for number, each in enumerate(node.all_input_nodes):
        if each.op == "placeholder" and _is_tensor(each) and not each.meta["val"].is_contiguous():
            yield Edit(node.name, name, "allocate", each.name, position=number)
    for argument, each in arguments.items() if name in _OMITTED else ():
        if isinstance(each, fx.Node) and _may_replace(each, node) and _needs_no_other(node, each):
            yield Edit(node.name, name, "omit", argument, _number(arguments))


def _position(node: fx.Node, argument: str) -> int:
    """Return the place of `argument` in the schema of the operator that `node` calls."""
    return [each.name for each in schema_of(cast(Any, node.target)).arguments].index(argument)


def _bounded(node: fx.Node, arguments: Mapping[str, Any]) -> Iterator[Edit]:
    """Yield the edits of a clamp with two bounds to bounds of one size, and to the upper bound alone."""
    least, most = arguments.get("min"), arguments.get("max")
    if not isinstance(least, (int, float)) or not isinstance(most, (int, float)):
        return
    changed = ("min", least, -most), ("max", most, -least), ("min", least, None)
    for argument, old, new in changed if least != -most else changed[2:]:
        yield Edit(node.name, "clamp", "constant", argument, old, new, _position(node, argument))


def _swapped(node: fx.Node, name: str, results: Sequence[Any]) -> Iterator[Edit]:
    """Yield the edit that exchanges two `results` of one shape, if all of them are read."""
    read = sorted(cast(int, user.args[1]) for user in node.users if user.target is operator.getitem)
    if len(results) == 2 and {*read} == {0, 1} and results[0].shape == results[1].shape:
        yield Edit(node.name, name, "swap", "")


def _steps(name: str, arguments: Mapping[str, Any], val: torch.Tensor) -> Iterator[tuple[str, Step]]:
    """Yield arguments of a call of the operator `name`, each with a step that it may go through.

    Numbers are rounded before they become integers; addends have the dtype of the others, and their shape.
    """
    tensors = {key: each for key, each in arguments.items() if isinstance(each, fx.Node) and _is_tensor(each)}
    vals = [each.meta["val"] for each in tensors.values()]
    if name == "_to_copy" and vals[0].is_floating_point() and not val.is_floating_point() and val.dtype != torch.bool:
        yield "self", Step(".round()", aten.round.default)
    if name not in _OF_ONE_DTYPE or not vals[0].is_floating_point():
        return
    for argument, each in tensors.items():
        x = each.meta["val"]
        if x.dtype not in (vals[0].dtype, torch.bool):
            kwargs = (("dtype", vals[0].dtype),)
            yield argument, Step(f".to({vals[0].dtype})", aten._to_copy.default, kwargs=kwargs)
        if name == "add" and x.shape != val.shape:
            sizes = tuple(val.shape)
            yield argument, Step(f".expand({', '.join(map(str, sizes))})", aten.expand.default, (list(sizes),))


def _number(arguments: Mapping[str, Any]) -> Any:
    """Return the only number among the `arguments` of a call, None if there is none or several."""
    numbers = [each for each in arguments.values() if type(each) in (int, float)]
    return numbers[0] if len(numbers) == 1 else None


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _may_replace(operand: fx.Node, node: fx.Node) -> bool:
    """Return True if `operand` has the shape of the result of `node`, and floats where that has floats."""
    val, result = operand.meta.get("val"), node.meta["val"]
    if not isinstance(val, torch.Tensor) or val.is_floating_point() != result.is_floating_point():
        return False
    return val.shape == result.shape


def _needs_no_other(node: fx.Node, operand: fx.Node) -> bool:
    """Return True if only calls that read inputs alone become dead when `operand` replaces `node`: a small edit."""
    others = [each for each in node.all_input_nodes if each is not operand and len(each.users) == 1]
    calls = [each for each in others if each.op == "call_function"]
    return all(source.op != "call_function" for each in calls for source in each.all_input_nodes)


def edited(captured: fx.GraphModule, edit: Edit) -> fx.GraphModule:
    """Return a copy of `captured` in which every call that the same text of the model makes has `edit`.

    Raises:
        Exception: an operator does not accept the edited tensors; its Meta kernel decides which error that is.
    """
    gm = fx.GraphModule(captured, copied(captured.graph))
    names = {each.name: each for each in gm.graph.nodes}
    changed = {each for node in names.values() if _is_alike(node, names[edit.node]) for each in _apply(node, edit)}
    gm.graph.eliminate_dead_code()
    mode = fake_mode_of(gm)
    with unlogged(), mode or nullcontext():  # attention of torch makes tensors of its own for a boolean mask
        _propagate(gm, changed, mode)
    return gm


def _is_alike(node: fx.Node, other: fx.Node) -> bool:
    """Return True if the same line of the model made the calls `node` and `other`, with equal constants."""
    if node.target is not other.target or location(node) != location(other):
        return False
    return repr(_constants(node)) == repr(_constants(other))


def _constants(node: fx.Node) -> Any:
    return map_only(fx.Node, lambda _: "", (node.args, dict(node.kwargs)))


def _apply(node: fx.Node, edit: Edit) -> list[fx.Node]:
    """Apply `edit` to `node`, and return the calls whose results change by it."""
    arguments = given(node.target, node.args, node.kwargs)
    if edit.kind == "omit":
        readers = list(node.users)
        node.replace_all_uses_with(arguments[edit.argument])
        return readers
    if edit.kind == "swap":
        return [_exchanged(each) for each in list(node.users)]
    changed = [node]
    match edit.kind:
        case "constant":
            arguments[edit.argument] = edit.new
        case "allocate":
            allocated = node.all_input_nodes[edit.position]
            allocated.meta["val"] = allocated.meta["val"].new_empty(allocated.meta["val"].shape)
            return list(allocated.users)
        case _:
            step = Step("", aten.add.Tensor, (EPS,)) if edit.kind == "eps" else edit.new
            with node.graph.inserting_before(node):
                operand = arguments[edit.argument]
                made = node.graph.call_function(step.target, (operand, *step.args), dict(step.kwargs))
            arguments[edit.argument] = made
            changed.append(made)
    positional = len(node.args)
    node.args = tuple(list(arguments.values())[:positional])
    node.kwargs = dict(list(arguments.items())[positional:])
    return changed


def _exchanged(item: fx.Node) -> fx.Node:
    """Make `item`, which takes one of two results of a call, take the other one, in place; return it."""
    source, number = cast(tuple[Any, int], item.args)
    item.args = (source, 1 - number)
    return item


def _propagate(gm: fx.GraphModule, changed: set[fx.Node], mode: FakeTensorMode | None) -> None:
    """Compute the fake results of the `changed` calls anew, and of all calls that read them."""
    for node in gm.graph.nodes:
        if node.op != "call_function" or changed.isdisjoint((node, *node.all_input_nodes)):
            continue
        changed.add(node)
        args, kwargs = map_only(fx.Node, lambda each: _fake(each.meta["val"], mode), (node.args, dict(node.kwargs)))
        is_operator = bool(short_name(node.target))
        node.meta["val"] = run_on_fakes(node.target, args, kwargs) if is_operator else node.target(*args, **kwargs)


def _fake(val: Any, mode: FakeTensorMode | None) -> Any:
    """Return `val`, or a fake tensor of `mode` for a tensor that is a constant of the graph."""
    is_real = isinstance(val, torch.Tensor) and not isinstance(val, FakeTensor)
    return mode.from_tensor(val) if is_real and mode is not None else val


def around(seeds: Iterable[fx.Node], reach: int) -> Iterator[fx.Node]:
    """Yield the calls around `seeds`, the nearest first, up to `reach` steps away."""
    waiting = dict.fromkeys(seeds, 0)
    seen = dict(waiting)
    while waiting:
        node = next(iter(waiting))
        steps = waiting.pop(node)
        if node.op == "call_function":
            yield node
        for each in (*node.all_input_nodes, *node.users) if steps < reach else ():
            if each not in seen and each.op == "call_function":
                seen[each] = waiting[each] = steps + 1
