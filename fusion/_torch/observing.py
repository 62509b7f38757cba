"""Places where torch lists what a compilation did: its counters, the artifacts of a trace, the function compiled."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import fx

COUNTERS = "cann_fusion"
_RESUMED = re.compile(r"torch_dynamo_resume_in_(.+)_at_(\d+)")
_TORCH = Path(torch.__file__).parent


def add_counts(counts: Mapping[str, int]) -> None:
    """Add `counts` to `torch._dynamo.utils.counters["cann_fusion"]`; a count of 0 adds no entry.

    Private: `torch._dynamo.utils.counters`.
    """
    from torch._dynamo.utils import counters

    counters[COUNTERS].update({name: number for name, number in counts.items() if number})


def is_traced() -> bool:
    """Return True if torch writes a trace, as it does into the folder that TORCH_TRACE names.

    Private: `torch._logging._internal.trace_log` and its handlers, of which one without a folder writes nothing.
    """
    from torch._logging._internal import trace_log

    return any(getattr(each, "root_dir", None) is not None for each in trace_log.handlers)


def add_artifact(name: str, text: Callable[[], str]) -> None:
    """Add an artifact to the trace of the current compilation, which tlparse lists by `name`.

    `text` is called only where torch writes a trace.
    Private: `torch._logging._internal.trace_structured_artifact`.
    """
    from torch._logging._internal import trace_structured_artifact

    if is_traced():
        trace_structured_artifact(name, "string", text)


def compiled_function(source: fx.Graph) -> str:
    """Name the function that Dynamo compiles, of which `source` is a graph, as "Llama.forward".

    The part of a function behind a graph break at line n is named "Llama.forward, from line n". A function of torch
    itself, as the one in which `torch.compile` wraps a module, gives the class of the outermost module instead; ""
    where Dynamo does not compile.
    Private: `torch._dynamo.symbolic_convert.InstructionTranslator.current_tx`, and the names that
    `torch._dynamo.resume_execution` gives functions.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        traced: Any = InstructionTranslator.current_tx().output.root_tx
    except AttributeError:  # the caller is not Dynamo
        return outermost_class(source)
    code = traced.f_code
    if _TORCH in Path(code.co_filename).parents:
        return outermost_class(source) or code.co_qualname
    return _RESUMED.sub(r"\1, from line \2", code.co_qualname)


def outermost_class(source: fx.Graph) -> str:
    """Name the class of the outermost module whose code made a node of `source`; "" where no node is of a module."""
    stacks = (node.meta.get("nn_module_stack") or {} for node in source.nodes)
    kinds = chain.from_iterable(each.values() for each in stacks)
    _, kind = next(iter(kinds), ("", ""))
    return kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
