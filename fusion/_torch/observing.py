"""Places where torch lists what a compilation did: its counters, the artifacts of a trace, the function compiled."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from types import CellType, CodeType
from typing import Any

from torch import fx, nn

COUNTERS = "cann_fusion"
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")


def add_counts(counts: Mapping[str, int]) -> None:
    """Add `counts` to `torch._dynamo.utils.counters["cann_fusion"]`; a count of 0 adds no entry.

    Private: `torch._dynamo.utils.counters`.
    """
    from torch._dynamo.utils import counters

    counters[COUNTERS].update({name: number for name, number in counts.items() if number})


def is_traced() -> bool:
    """Return True if torch writes a trace, as it does into the folder that TORCH_TRACE names.

    Private: `torch._logging._internal.trace_log` and its `LazyTraceHandler`, which without a folder writes nothing.
    """
    from torch._logging._internal import LazyTraceHandler, trace_log

    return any(isinstance(each, LazyTraceHandler) and each.root_dir is not None for each in trace_log.handlers)


def add_artifact(name: str, text: Callable[[], str]) -> None:
    """Add an artifact to the trace of the current compilation, which tlparse lists by `name`.

    `text` is called only where torch writes a trace.
    Private: `torch._logging._internal.trace_structured_artifact`.
    """
    from torch._logging._internal import trace_structured_artifact

    if is_traced():
        trace_structured_artifact(name, "string", text)


@dataclass(frozen=True)
class Frame:
    """The function that Dynamo compiles; nothing in it where Dynamo does not.

    Attributes:
        code: its code.
        module: the module whose method, or wrapper of a method, it is.
        begun: the code of the function of which it is a part behind a graph break; `code` where it is none.
        cells: the identities of the variables of outer functions that it reads, by which closures of one code differ.
    """

    code: CodeType | None = None
    module: nn.Module | None = None
    begun: CodeType | None = None
    cells: frozenset[int] = frozenset()

    @staticmethod
    def current() -> Frame:
        """Return the frame that is being compiled.

        Private: `torch._dynamo.symbolic_convert.InstructionTranslator.current_tx`, its `closure`, and the code that
        `torch._dynamo.resume_execution.ContinueExecutionCache` keeps for the parts of a function.
        """
        from torch._dynamo.resume_execution import ContinueExecutionCache
        from torch._dynamo.symbolic_convert import InstructionTranslator

        try:
            traced: Any = InstructionTranslator.current_tx().output.root_tx
        except AttributeError:  # the caller is not Dynamo
            return Frame()
        owner = traced.f_locals.get("self", traced.f_locals.get("fn"))
        part = ContinueExecutionCache.generated_code_metadata.get(traced.f_code)
        begun = traced.f_code if part is None else part.code
        module = owner if isinstance(owner, nn.Module) else None
        return Frame(traced.f_code, module, begun, _identities(traced.closure))

    @staticmethod
    def called_by(compiled: Any) -> Frame:
        """Return the frame that a call of `compiled` begins with: a module, a function, or either as `torch.compile`
        returns it.

        Private: the attributes `_orig_mod` and `_torchdynamo_orig_callable` of what `torch.compile` returns.
        """
        plain = getattr(compiled, "_orig_mod", getattr(compiled, "_torchdynamo_orig_callable", compiled))
        module = plain if isinstance(plain, nn.Module) else getattr(plain, "__self__", None)
        function = plain.forward if isinstance(plain, nn.Module) else plain
        function = getattr(function, "_torchdynamo_orig_callable", function)
        return Frame(
            getattr(function, "__code__", None),
            module if isinstance(module, nn.Module) else None,
            cells=_identities(getattr(function, "__closure__", None)),
        )

    def name(self, source: fx.Graph) -> str:
        """Name the function, of which `source` is a graph, as "Llama.forward".

        The part of a function behind a graph break at line n is named "Llama.forward, from line n". The wrapper that a
        decorator, or `torch.compile`, makes around the forward of a module gives the class of the module instead, as
        does a graph that Dynamo does not compile; "" where there is no module.
        Private: the names that `torch._dynamo.resume_execution` gives functions.
        """
        if self.code is None:
            return outermost_class(source)
        if "<locals>" in self.code.co_qualname and self.module is not None:
            return type(self.module).__qualname__
        return _RESUMED.sub(r"\1, from line \2", self.code.co_qualname)


def _identities(closure: tuple[CellType, ...] | None) -> frozenset[int]:
    return frozenset(map(id, closure or ()))


def outermost_class(source: fx.Graph) -> str:
    """Name the class of the outermost module whose code made a node of `source`; "" where no node is of a module."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in source.nodes)
    kinds = chain.from_iterable(each.values() for each in stacks)
    _, kind = next(iter(kinds), ("", ""))
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
