"""torchair behind the stubs, to be used in a child process: convert to GE IR, run eagerly, and say what was converted."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Converted:
    """One GE graph: operator types as converted, the same after torchair's own passes, and the inputs written to."""

    before: Counter[str]
    after: Counter[str]
    written: tuple[int, ...]


_converted: list[Converted] = []


def install() -> None:
    """Let torchair convert without an engine, and run the FX graph eagerly on CPU kernels registered beforehand."""
    import torch_npu  # noqa: F401  (makes torchair importable)
    import torchair
    from torchair._ge_concrete_graph import fx2ge_converter

    fx2ge_converter.initialize_graph_engine = lambda *_, **__: None
    _run_eagerly(torchair.CompilerConfig)
    _record(fx2ge_converter.GeConcreteGraph)


def converted() -> list[Converted]:
    """Every graph converted since `install`, in order."""
    return list(_converted)


def operators() -> Counter[str]:
    """GE operator types of the last converted graph, after torchair's own passes."""
    return _converted[-1].after


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
        _converted.append(Converted(before, after, tuple(self._ref_data_idx)))
        return result

    graph.optimize_graph_without_runtime = recorded
