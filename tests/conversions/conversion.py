"""Conversion of one fused graph by torchair and by npugraph_ex, in a process behind the stubs."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only

from fusion._torch.fakes import fake_mode_of
from fusion._torch.operators import OpOverload
from fusion.frontend.library import installed
from fusion.graph.aliasing import memory_of, written_by
from fusion.operators import operator_of
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.routes import vendor
from fusion.testing import Captured
from tests.goldens.cases import Case
from tests.support import acl, ge

from .cases import COMPILERS

OWN_OVERLOADS = ("tensor_lengths", "functional", "in_place")
"""Overloads that this package adds to operators of torch_npu, whose Meta kernels are its own."""
_FAILS = "fails: "
COPIES = (torch.ops.aten.copy_.default, torch.ops.aten.clone.default)


def converted(case: Case) -> tuple[str, list[str]]:
    """Return the text of what both compilers make of `case`, and the laws that it breaks."""
    captured = case.captured()
    texts: list[str] = []
    broken: list[str] = []
    for compiler in COMPILERS:
        fused = _fused(captured, compiler, case.opt_in)
        lines = _lines(fused, compiler)
        if lines[0].startswith(_FAILS) and not _is_of_the_model(lines[0], fused):
            unfused = _lines(_copy(captured), compiler)
            broken += [f"{compiler} {lines[0]}"] * (lines != unfused)
        broken += [f"{compiler}: {each}" for each in (*_disagreements(fused), *_vendor_copies(fused, lines))]
        texts.append("\n  ".join((f"{compiler}:", *lines)))
    return "\n".join(texts), broken


def _lines(gm: fx.GraphModule, compiler: str) -> list[str]:
    """Return what `compiler` makes of `gm`, or its error, in lines."""
    try:
        return _CONVERSIONS[compiler](gm)
    except Exception as error:  # the message is what a reader needs; the vendor raises anything
        return [f"{_FAILS}{_first_line(error)}"]


def _is_of_the_model(failure: str, fused: fx.GraphModule) -> bool:
    """Return True if `failure` names an operator that the model itself calls, and that the pass left alone."""
    own = {str(node.target) for node in fused.graph.nodes if node.op == "call_function" and "fusion" not in node.meta}
    return any(name in failure for name in own)


def _copy(captured: Captured) -> fx.GraphModule:
    return fx.GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))


def _fused(captured: Captured, compiler: str, opt_in: frozenset[str]) -> fx.GraphModule:
    gm = _copy(captured)
    options = Options(target="ascend910_93", lower=compiler, plan_lower=compiler, plan_cache="off", opt_in=opt_in)
    fuse_graph(gm.graph, installed(), options, captured.facts, with_refusals=False)
    gm.recompile()
    return gm


def _inputs(gm: fx.GraphModule) -> list[Any]:
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


def _by_torchair(gm: fx.GraphModule) -> list[str]:
    vendor.torchair(gm, _inputs(gm))
    graph = ge.converted()[-1]
    operators = graph.after - Counter({name: graph.after[name] for name in ("Data", "Const", "NetOutput")})
    return [*_counted(operators), f"writes {len(graph.written)} inputs in place", *_counted(graph.copied)]


def _by_npugraph_ex(gm: fx.GraphModule) -> list[str]:
    with fake_mode_of(gm) or torch.no_grad():
        vendor.npugraph_ex(gm, _inputs(gm), options={"force_eager": True})
    captured = acl.optimized()[-1].graph
    calls = (node for node in captured.nodes if isinstance(node.target, OpOverload))
    return [*_counted(map(_name, calls)), *_counted(_copied_inputs(captured))]


_CONVERSIONS: dict[str, Callable[[fx.GraphModule], list[str]]] = {
    "torchair": _by_torchair,
    "npugraph_ex": _by_npugraph_ex,
}


def _name(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")


def _copied_inputs(graph: fx.Graph) -> Iterator[str]:
    for node in graph.nodes:
        if node.target not in COPIES:
            continue
        place = memory_of(node.args[0])
        if place.op == "placeholder":
            yield f"{_name(node)} of {place.name} {list(place.meta['val'].shape)}"


def _counted(names: Any) -> list[str]:
    return [f"{name}{f' x{count}' if count > 1 else ''}" for name, count in sorted(Counter(names).items())]


def _first_line(error: Exception) -> str:
    """Return type and message of `error`, without the lines about the node that the vendor appends."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


# laws ----------------------------------------------------------------------------------------------------------------


def _disagreements(gm: fx.GraphModule) -> Iterator[str]:
    """Yield the emitted calls whose results, by the Meta kernels of torch_npu, are not those that were planned."""
    for node in gm.graph.nodes:
        if not _is_the_vendors(node):
            continue
        planned, theirs = (_looks(each) for each in (node.meta["val"], _by_meta_kernel(node)))
        if planned != theirs:
            yield f"{_name(node)} gives {theirs}, planned {planned}"


def _is_the_vendors(node: fx.Node) -> bool:
    emitted = "fusion" in node.meta and isinstance(node.target, OpOverload) and operator_of(node.target) is not None
    own = emitted and node.target._overloadname in OWN_OVERLOADS
    return emitted and not own and node.target.namespace == "npu"


def _by_meta_kernel(node: fx.Node) -> Any:
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    args, kwargs = tree_map_only(Tensor, _on_meta, (args, kwargs))
    try:
        return node.target(*args, **kwargs)
    except Exception as error:
        return _first_line(error)


def _on_meta(x: Tensor) -> Tensor:
    return torch.empty_strided(tuple(map(int, x.shape)), tuple(map(int, x.stride())), dtype=x.dtype, device="meta")


def _looks(result: Any) -> list[str]:
    return [f"{each.dtype} {list(map(int, each.shape))}" if isinstance(each, Tensor) else str(each)
            for each in tree_leaves(result)]  # fmt: skip


def _vendor_copies(gm: fx.GraphModule, lines: Sequence[str]) -> Iterator[str]:
    """Yield the copies in `lines` of inputs that `gm` writes in place: the compiler has added them."""
    written = {memory_of(place).name for node in gm.graph.nodes for place in written_by(node)}
    own = {name.partition(" of ")[2].partition(" ")[0] for name in _copied_inputs(gm.graph)}
    for line in lines:
        _, copies, place = line.partition(" of ")
        if copies and not line.startswith(_FAILS) and place.partition(" ")[0] in written - own:
            yield line
