"""Records of graph breaks of Dynamo and of functions that it does not trace."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import logging
import re
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from traceback import FrameSummary, extract_tb
from typing import Any

from torch import fx

_SKIPPED = re.compile(r"(?P<name>[^()]*) \((?P<file>.*):(?P<line>\d+)\): (?P<reason>.*)", re.DOTALL)
UNRESUMED = "an error was suppressed during compilation"
_LOST = (UNRESUMED, "Dynamo decided to skip the frame while tracing", "tracing is non-recursively disabled")
"""Beginnings of the reasons to skip a function that depend on its code."""


@dataclass
class Departures:
    """Graph breaks and skipped functions of models that were traced.

    Attributes:
        breaks: for each graph break the stack of the model's code, innermost last, and the reason.
        skipped: for each function that was not traced its name, its file, its first line and the reason.
    """

    breaks: list[tuple[Sequence[FrameSummary], str]] = field(default_factory=list)
    skipped: list[tuple[str, str, int, str]] = field(default_factory=list)


def is_complete(gm: fx.GraphModule) -> bool:
    """Return True if a graph that is being compiled is all of its call: no graph break is at its end or before it.

    Private: `compile_subgraph_reason` of a graph, `torch._dynamo.symbolic_convert.InstructionTranslator.current_tx`,
    and the names that `torch._dynamo.resume_execution` gives functions.
    """
    from torch._dynamo.resume_execution import TORCH_DYNAMO_RESUME_IN_PREFIX
    from torch._dynamo.symbolic_convert import InstructionTranslator

    ends_early = getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False)
    try:
        traced: Any = InstructionTranslator.current_tx().output.root_tx
    except AttributeError:  # the caller is not Dynamo
        return True
    return not ends_early and not traced.f_code.co_name.startswith(TORCH_DYNAMO_RESUME_IN_PREFIX)


@contextmanager
def listening() -> Generator[Departures]:
    """Record graph breaks and skipped functions of all code that is traced inside the context.

    Private: `torch._dynamo.utils.graph_break_reasons`, `torch._dynamo.eval_frame.dynamo_tls.skip_reasons`,
    `torch._dynamo.convert_frame.input_codes`.
    """
    from torch._dynamo.eval_frame import dynamo_tls
    from torch._dynamo.utils import graph_break_reasons

    record, first, before = Departures(), len(graph_break_reasons), _traced_codes()
    outer, dynamo_tls.skip_reasons = dynamo_tls.skip_reasons, []
    loggers = list(map(logging.getLogger, _LOGGERS))
    for each in loggers:
        each.addFilter(_is_unlisted)
    try:
        yield record
    finally:
        record.breaks += [(each.user_stack, each.reason) for each in graph_break_reasons[first:]]
        record.skipped += _parsed(dynamo_tls.skip_reasons or ())
        dynamo_tls.skip_reasons = outer
        for each in loggers:
            each.removeFilter(_is_unlisted)
        _forget(before)


def stack_of(error: BaseException) -> Sequence[FrameSummary]:
    """List the frames at which `error` was raised, innermost last; Dynamo's trace of the model is appended.

    Private: `torch._dynamo.exc.TorchDynamoException.real_stack`.
    """
    traced: Any = getattr(error, "real_stack", None)
    return [*extract_tb(error.__traceback__), *(traced or ())]


_LOGGERS = ("torch._dynamo.variables.tensor", "torch._subclasses.fake_tensor")
"""Loggers of graph breaks and of errors of the model, both of which a report lists."""


def _is_unlisted(record: logging.LogRecord) -> bool:
    """Return True unless the message of a log `record` announces what `Departures` lists or the model raises.

    These are graph breaks, and meta kernels that fail; used as a filter, it silences Dynamo's own reports of both.
    """
    return not str(record.msg).lstrip().startswith(("Graph break from", "failed while attempting to run meta"))


def _parsed(skipped: Iterable[str]) -> list[tuple[str, str, int, str]]:
    matches = filter(None, map(_SKIPPED.fullmatch, skipped))
    parts = [(_NAME.sub(r"\1", each["name"]), each["file"], int(each["line"]), each["reason"]) for each in matches]
    return [each for each in parts if each[3].startswith(_LOST)]


_NAME = re.compile(r"torch_dynamo_resume_in_(.+)_at_\d+")
"""Name that Dynamo gives to the part of a function behind a graph break."""


def _traced_codes() -> frozenset[int]:
    from torch._dynamo.convert_frame import input_codes

    return frozenset(input_codes.seen_ids)


def _forget(before: frozenset[int]) -> None:
    """Reset Dynamo's cache for code objects that are not in `before`: Dynamo reports a skipped function only once."""
    from torch._C._dynamo.eval_frame import reset_code
    from torch._dynamo.convert_frame import input_codes

    seen = [(each, each()) for each in input_codes.seen]  # strong references, until all are reset
    fresh = [code for _, code in seen if code is not None and id(code) not in before]
    input_codes.seen[:] = [each for each, code in seen if code is None or id(code) in before]
    seen.clear()
    for code in fresh:
        input_codes.seen_ids.discard(id(code))
        reset_code(code)
