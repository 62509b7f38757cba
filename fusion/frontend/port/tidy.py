"""Simplifications of a fused graph that change no number: what a person would not write.

view(view(x)) = view(x); transpose(transpose(x)) = x; view(mm(view(x), t(w))) = linear(x, w); x · 1.0 = x;
y = f(x), z = f(x): z = y
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from fusion._torch.nested import leaves
from fusion._torch.operators import is_random, short_name
from fusion.frontend.port.expressions import is_fused
from fusion.graph.aliasing import is_returned, is_write, is_written, memory_of, reserves, shown, written_by
from fusion.graph.origin import module_path

aten = torch.ops.aten
RESHAPES = {"view", "_unsafe_view", "unsqueeze", "squeeze"}
"""Views that keep the elements in their order."""
_KEEPING = RESHAPES | {"transpose", "permute"}
"""Views that may be undone by others of them."""
_SAME_IF_SHAPE = RESHAPES | {"expand", "reshape", "slice"}


def tidy(graph: fx.Graph) -> None:
    """Simplify `graph` in place until nothing changes."""
    changed = True
    while changed:
        changed = False
        for node in list(graph.nodes):
            if node.op != "call_function" or "val" not in node.meta:
                continue
            simpler = next(filter(None, (rule(node) for rule in _RULES)), None)
            if simpler is not None and simpler is not node:
                node.replace_all_uses_with(simpler)
                graph.erase_node(node)
                changed = True
        changed |= _merge_equal_calls(graph)
        changed |= graph.eliminate_dead_code()


def _merge_equal_calls(graph: fx.Graph) -> bool:
    """Replace calls that repeat an earlier one by its result, in place; return True if there are any.

    Views are repeated in each module: a forward that is given x.view(..) beside x is harder to read.
    """
    writes: dict[fx.Node, int] = {}
    first: dict[Any, fx.Node] = {}
    merged = False
    for node in list(graph.nodes):
        writes |= {memory_of(each): writes.get(memory_of(each), 0) + 1 for each in written_by(node)}
        if not _may_be_merged(node):
            continue
        is_view = shown(node) is not None
        read = () if is_view else tuple(writes.get(memory_of(each), 0) for each in node.all_input_nodes)
        place = module_path(node) if is_view else ""
        operands = [each if isinstance(each, fx.Node) else repr(each) for each in leaves(node.args)]
        key = node.target, repr(node.args), repr(node.kwargs), tuple(operands), read, place
        earlier = first.setdefault(key, node)
        if earlier is not node:
            node.replace_all_uses_with(earlier)
            graph.erase_node(node)
            merged = True
    return merged


def _may_be_merged(node: fx.Node) -> bool:
    """Return True if `node` calls an operator of aten without effects, and nothing changes or returns its result."""
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor) or is_fused(node):
        return False
    if is_write(node) or reserves(node.target) or not short_name(node.target) or is_random(node.target):
        return False
    return _is_private(node)


def _without_effect(node: fx.Node) -> Any:
    """Return the input of a view that changes nothing; None for any other node."""
    name = short_name(node.target)
    if name in ("alias", "detach", "lift_fresh_copy"):
        return None if name == "lift_fresh_copy" and is_written(node) else node.args[0]
    source = node.args[0] if node.args else None
    if name == "permute" and list(node.args[1]) == sorted(node.args[1]):  # pyright: ignore
        return source
    if name not in _SAME_IF_SHAPE or not isinstance(source, fx.Node):
        return None
    return source if source.meta["val"].shape == node.meta["val"].shape else None


def _neutral(node: fx.Node) -> Any:
    """Return x of a product x · 1.0, or of an integer sum x + 0, that has the dtype of x; None for any other node."""
    number = {aten.mul.Tensor: 1.0, aten.add.Tensor: 0}.get(node.target)  # pyright: ignore
    if number is None or node.args[1] != number or node.kwargs or not isinstance(node.args[0], fx.Node):
        return None
    if number == 0 and node.meta["val"].dtype.is_floating_point:  # -0.0 + 0 is 0.0
        return None
    source = node.args[0]
    same = source.meta["val"].dtype == node.meta["val"].dtype and source.meta["val"].shape == node.meta["val"].shape
    return source if same and _is_private(node) and _is_private(source) else None


def _cast_back(node: fx.Node) -> Any:
    """Return x of a cast of x to a wider dtype and back; None for any other node."""
    if not _is_cast(node):
        return None
    inner: Any = node.args[0]
    if not _is_cast(inner):
        return None
    source: Any = inner.args[0]
    narrow, wide = source.meta["val"].dtype, inner.meta["val"].dtype
    exact = node.meta["val"].dtype == narrow and torch.promote_types(narrow, wide) == wide
    return source if exact and _is_private(node) and _is_private(source) else None


def _cast_of_views(node: fx.Node) -> Any:
    """Return a cast of x in place of a view of a cast of a view of x that has the shape of x; None for others."""
    cast: Any = node.args[0] if node.args and short_name(node.target) in RESHAPES else None
    if not _is_cast(cast) or len(cast.users) > 1 or short_name(cast.args[0].target) not in RESHAPES:
        return None
    source: Any = cast.args[0].args[0]
    if source.meta["val"].shape != node.meta["val"].shape or not source.meta["val"].is_contiguous():
        return None
    return _inserted(node, cast.target, (source,), cast.kwargs)


def _copied(node: fx.Node) -> Any:
    """Return x.clone() if `node` is copy(y, x) with y of the shape and dtype of x, so that y is not read; else None."""
    if node.target is not aten.copy.default:
        return None
    source: Any = node.args[1]
    val, made = source.meta["val"], node.meta["val"]
    if val.shape != made.shape or val.dtype != made.dtype or not made.is_contiguous():
        return None
    dense = {} if val.is_contiguous() else {"memory_format": torch.contiguous_format}
    return _inserted(node, aten.clone.default, (source,), dense)


def _copied_on(node: fx.Node) -> Any:
    """Return x if `node` is a clone of x that is only read by copies over other tensors, and nothing writes to x; else
    None.
    """
    if node.target is not aten.clone.default or not node.users:
        return None
    source: Any = node.args[0]
    is_moved_on = all(each.target is aten.copy_.default and each.args[0] is not node for each in node.users)
    return source if is_moved_on and not is_written(memory_of(source)) else None


def _twice_permuted(node: fx.Node) -> Any:
    """Return one permute in place of a permute of a permute, or x where the order is that of x; None for others."""
    inner = node.args[0] if node.args else None
    if node.target is not aten.permute.default or not isinstance(inner, fx.Node) or inner.target is not node.target:
        return None
    rank = node.meta["val"].dim()
    source, first = inner.args
    order = [first[each % rank] % rank for each in node.args[1]]  # pyright: ignore
    return source if order == [*range(rank)] else _inserted(node, node.target, (source, order))


def _twice_transposed(node: fx.Node) -> Any:
    """Return x of a transpose of the same transpose of x; None for any other node."""
    inner = node.args[0] if node.args else None
    if node.target is not aten.transpose.int or not isinstance(inner, fx.Node) or inner.target is not node.target:
        return None
    rank = node.meta["val"].dim()
    same = {axis % rank for axis in node.args[1:]} == {axis % rank for axis in inner.args[1:]}  # pyright: ignore
    return inner.args[0] if same else None


def _shorter_chain(node: fx.Node) -> Any:
    """Return one view in place of three or more views that leave the elements in their order; None for others."""
    source, length = node, 0
    while short_name(source.target) in _KEEPING and (source is node or len(source.users) == 1):
        source, length = source.all_input_nodes[0], length + 1
    if length < 3:
        return None
    val, made = source.meta["val"], node.meta["val"]
    try:
        strides = torch.empty_strided(val.shape, val.stride(), device="meta").view(made.shape).stride()
    except RuntimeError:
        return None
    same = all(a == b for a, b, size in zip(strides, made.stride(), made.shape, strict=True) if size > 1)
    return _inserted(node, aten.view.default, (source, list(made.shape))) if same else None


def _joined_reshapes(node: fx.Node) -> Any:
    """Return one view in place of a reshape of a reshape; None for any other node."""
    inner = node.args[0] if node.args else None
    if short_name(node.target) not in RESHAPES or not isinstance(inner, fx.Node):
        return None
    if short_name(inner.target) not in RESHAPES or len(inner.users) > 1:
        return None
    source: Any = inner.args[0]
    val, shape = source.meta["val"], list(node.meta["val"].shape)
    try:
        torch.empty_strided(val.shape, val.stride(), device="meta").view(shape)
    except RuntimeError:
        return None
    return _inserted(node, aten.view.default, (source, shape))


def _linear(node: fx.Node) -> Any:
    """Return a linear layer in place of mm(x, t(w)) or addmm(b, x, t(w)); None for any other node."""
    if node.target is aten.mm.default:
        bias, (rows, weight) = (), node.args
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, rows, weight = node.args[:1], *node.args[1:]
        if bias[0].meta["val"].dim() != 1:  # pyright: ignore
            return None
    else:
        return None
    if not isinstance(weight, fx.Node) or weight.target is not aten.t.default:
        return None
    return _inserted(node, aten.linear.default, (rows, weight.args[0], *bias))


def _linear_of_rows(node: fx.Node) -> Any:
    """Return linear(x, w) in place of view(linear(view(x), w)), with rows of x as they lie; None for any other node."""
    inner = node.args[0] if node.args else None
    if short_name(node.target) not in ("view", "_unsafe_view") or not isinstance(inner, fx.Node):
        return None
    if inner.target is not aten.linear.default or len(inner.users) > 1:
        return None
    rows: Any = inner.args[0]
    if short_name(rows.target) != "view":
        return None
    source = rows.args[0]
    before, after = source.meta["val"].shape, node.meta["val"].shape
    if before[:-1] != after[:-1] or before[-1] != rows.meta["val"].shape[-1]:
        return None
    return _inserted(node, aten.linear.default, (source, *inner.args[1:]))


_RULES = (
    _without_effect, _neutral, _cast_back, _cast_of_views, _copied, _copied_on, _twice_transposed, _twice_permuted,
    _shorter_chain, _joined_reshapes, _linear, _linear_of_rows,
)  # fmt: skip


def _inserted(node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
    """Insert the call `target(*args, **kwargs)` in front of `node`, with its metadata."""
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args, kwargs)
    made.meta = dict(node.meta)
    return made


def _is_cast(node: Any) -> bool:
    is_call = isinstance(node, fx.Node) and node.target is aten._to_copy.default
    return is_call and set(node.kwargs) == {"dtype"}


def _is_private(node: fx.Node) -> bool:
    """Return True if nothing writes to the memory of `node`, and no caller gets it: a copy of it is not seen."""
    return not (is_written(memory_of(node)) or is_returned(node))
