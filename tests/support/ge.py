"""torchair behind the stubs, for a child process: convert to GE IR, run eagerly, and say what was converted."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Converted:
    """One GE graph.

    Attributes:
        before: operator types as converted.
        after: the same after torchair's own passes.
        written: numbers of the inputs that the graph writes to.
        copied: the inputs that it copies, or assigns to, each as "operator of input shape".
        scoped: for each attribute that a scope sets, the number of operators in it by type.
    """

    before: Counter[str]
    after: Counter[str]
    written: tuple[int, ...]
    copied: tuple[str, ...]
    scoped: dict[str, Counter[str]]


_PASSED_THROUGH = ("TensorMove", "Assign", "Reshape", "Identity", "Bitcast", "Squeeze", "Unsqueeze")
_converted: list[Converted] = []
_kernels: list[Any] = []


def install() -> None:
    """Let torchair convert without an engine, and run the FX graph eagerly on CPU kernels registered beforehand."""
    import torch_npu  # noqa: F401  (makes torchair importable)
    import torchair
    from torchair._ge_concrete_graph import compat_ir, fx2ge_converter
    from torchair.ge import ge_custom

    fx2ge_converter.initialize_graph_engine = lambda *_, **__: None
    compat_ir.is_cann_compat = lambda *_, **__: ""
    ge_custom._torchair = _Registry(ge_custom._torchair)
    _run_eagerly(torchair.CompilerConfig)
    _compute_what_only_ge_computes()
    _record(fx2ge_converter.GeConcreteGraph)


def converted() -> list[Converted]:
    """Every graph converted since `install`, in order."""
    return list(_converted)


def operators() -> Counter[str]:
    """GE operator types of the last converted graph, after torchair's own passes."""
    return _converted[-1].after


def _compute_what_only_ge_computes() -> None:
    """CPU kernels for torchair's operators with lengths in tensors, whose own kernels only say what to do instead."""
    import torch

    from fusion.operators import OPERATORS

    for name in ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2"):
        importlib.import_module(f"torchair.ops._{name}")  # the last registration wins
        library = torch.library.Library("air", "IMPL")
        library.impl(name, OPERATORS[f"npu::{name}.tensor_lengths"].fallback, "CPU", allow_override=True)
        _kernels.append(library)


class _Registry:
    """torchair's C++ module, saying that every operator type is registered: the real registry is in CANN."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def get_registered_ir_def(self, op_type: str) -> tuple[str, list[Any], list[Any], list[Any]]:
        return "SUCCESS", [], [], []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _run_eagerly(config: Any) -> None:
    create = config.__init__

    @functools.wraps(create)
    def eager(self: Any, *args: Any, **kwargs: Any) -> None:
        create(self, *args, **kwargs)
        self.debug.run_eagerly = True

    config.__init__ = eager


def _record(graph: Any) -> None:
    optimize = graph.optimize_graph_without_runtime

    @functools.wraps(optimize)
    def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = Counter(op.type for op in self.graph.op)
        result = optimize(self, *args, **kwargs)
        after = Counter(op.type for op in self.graph.op)
        copied = tuple(_copied_inputs(self.graph))
        _converted.append(Converted(before, after, tuple(self._ref_data_idx), copied, _scoped(self.graph)))
        return result

    graph.optimize_graph_without_runtime = recorded


def _scoped(graph: Any) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for op in graph.op:
        for name in set(op.attr) & {"_super_kernel_scope", "_op_aicore_num"}:
            found.setdefault(name, Counter())[op.type] += 1
    return found


def _copied_inputs(graph: Any) -> Iterator[str]:
    """Yield the copies of inputs in the GE graph `graph`, and the assignments to them."""
    ops = {op.name: op for op in graph.op}
    for op in graph.op:
        if op.type not in ("TensorMove", "Assign"):
            continue
        source = op
        while source.type in _PASSED_THROUGH:
            source = ops[source.input[0].partition(":")[0]]
        if source.type == "Data":
            yield f"{op.type} of {source.name} {list(source.output_desc[0].shape.dim)}"
