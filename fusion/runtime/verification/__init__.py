"""Verification of numbers: the first call of a fused graph is compared with the plain graph, judged by float64.

    fused, plain       both graphs, in their own dtypes
    exact, wide        the plain and the fused graph in float64, with equal choices among equal numbers

1.  Results and written inputs of `fused` and `plain` are equal, or half a unit in the last place apart: verified.
2.  `fused` is no further from `exact` than `plain` is: verified, the difference is rounding.
3.  `wide` is not `exact`, and `fused` differs from `plain` there: the fused graph computes something else.
4.  `fused` is as far from `exact` as no rounding explains, although `wide` is `exact`: so it rounds or overflows where
    the plain graph does not. Unless it has made other choices, each between numbers as close as the dtype resolves, and
    is near to float64 with the same choices.

Then the wrong rewrite is searched for by bisection, and a script is written that reproduces the difference.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.fx as fx

from fusion._torch.tracing import Boxed, boxed, outside_modes
from fusion.errors import Failure, FusionError, VerificationError
from fusion.graph.origin import look, place_of
from fusion.records import Prepared
from fusion.report.failures import place_in_report, worded
from fusion.runtime.verification.culprit import Again, Culprit, culprit
from fusion.runtime.verification.difference import difference
from fusion.runtime.verification.judge import Fault, Judge
from fusion.runtime.verification.numbers import relative_error
from fusion.runtime.verification.runs import Call, standalone
from fusion.runtime.verification.script import write

log = logging.getLogger("fusion")

__all__ = ["Subject", "relative_error", "verified"]


@dataclass(frozen=True)
class Subject:
    """A graph to verify.

    Attributes:
        original: the plain graph, as captured.
        fused: the rewritten graph, before compilation; its further inputs are `prepared`.
        prepared: the further inputs of the rewritten graph.
        names: names of the inputs and the results in the model.
        is_compiled: True if the fused graph is compiled rather than interpreted.
        again: rewrites a copy of the plain graph with a given number of rewrites at most.
        folder: folder for the script that reproduces a difference; "" for a temporary folder.
    """

    original: fx.GraphModule
    fused: fx.GraphModule
    prepared: Sequence[Prepared]
    names: tuple[Sequence[str], Sequence[str]]
    is_compiled: bool
    again: Again
    folder: str


def verified(subject: Subject, run: Boxed) -> Boxed:
    """Wrap `run`, the compiled form of a fused graph, so that its first call is compared with the plain graph.

    Only `run` writes to the caller's inputs; they are restored after a call that raises. Calls are compared until one
    was right.

    Raises (when called):
        VerificationError: the graph is wrong; names the results, the wrong rewrite, and a script that reproduces it.
    """
    waiting = [(subject, standalone(subject.fused, subject.prepared))]

    def call(*inputs: Any) -> Any:
        if not waiting:
            return run(list(inputs))
        results = _first_call(*waiting[0], run, inputs)
        waiting.clear()
        return results

    return boxed(call)


def _first_call(subject: Subject, alone: fx.GraphModule, run: Boxed, inputs: Sequence[Any]) -> Any:
    """Run a compiled graph and judge its results; `alone` is the graph to interpret on the same inputs."""
    call = Call.copying([subject.original.graph, alone.graph], inputs)
    judge = Judge(subject.original, call, call.run(subject.original), _names(subject, call), subject.is_compiled)
    results, raised = None, None
    try:
        results = run(list(inputs))
    except Exception as error:
        raised = error
    with outside_modes(), torch.inference_mode(False), torch.no_grad():
        if raised is not None:
            fault = judge.raised(raised)
        elif call.states:  # a compiled graph draws other random numbers
            fault = judge.judged(alone)
        else:
            fault = judge.fault(call.observed(results, inputs), alone)
        failed = None if fault is None else _error(subject, call, fault)
    if failed is not None:
        call.put_back()
        raise failed from raised
    return results


def _names(subject: Subject, call: Call) -> list[str]:
    inputs, results = subject.names
    return [*results, *(inputs[place] for place in call.written)]


def _error(subject: Subject, call: Call, fault: Fault) -> VerificationError:
    """Describe the `fault` of the fused graph in the first `call`: which rewrite is wrong, and a script that reproduces
    it.

    The rewrite is searched for by bisection, and the script is written.
    """
    try:
        wrong = culprit(subject.again, fault.is_of)
    except FusionError as error:
        log.debug("searching for the guilty rewrite failed", exc_info=error)
        wrong = None
    guilty = None if wrong is None else _failure(wrong, fault)
    try:
        path = str(_script(subject, call, wrong))
        report = f"please report it with {path}, which `python {path}` runs to print the difference"
    except Exception as error:
        path, report = "", f"please report it (a script that reproduces it could not be written: {worded(error)})"
    return VerificationError(
        f"verifying a fused graph on its first call, with {_given(subject, call)}: {fault.message}. "
        f"{_cause(wrong)}; {report}",
        guilty,
        path,
    )


def _given(subject: Subject, call: Call) -> str:
    """Name the first argument of `call`, and count its other inputs, for a message."""
    inputs = list(zip(subject.names[0], call.inputs, strict=True))
    tensors = [(name, x) for name, x in inputs if isinstance(x, torch.Tensor)]
    arguments = [(name, x) for name, x in tensors if not isinstance(x, torch.nn.Parameter)]
    name, value = (arguments or inputs)[0]
    others = "" if len(inputs) == 1 else f" and {len(inputs) - 1} other input{'s' if len(inputs) > 2 else ''}"
    return f"{name} ({look(value)}){others}"


def _failure(wrong: Culprit, fault: Fault) -> Failure:
    match = wrong.candidate.match
    return Failure("verify", fault.message, match.rule.name, drops_graph=False, **place_in_report(match.node))


def _cause(wrong: Culprit | None) -> str:
    if wrong is None:
        return (
            "No rewrite causes it where the graph is searched anew and run node by node: the graph that was kept of an "
            "earlier compilation may be wrong (options={'plan_cache': 'off'} searches), or the compiler "
            "(options={'lower': 'eager'} uses none)"
        )
    match, lowering = wrong.candidate.match, wrong.candidate.lowering
    return (
        f"Rewrite {wrong.number} of {wrong.count} causes it: rule {match.rule.name!r}, form {match.form!r}, lowering "
        f"{lowering!r}, {place_of(match.node)}; options={{'disable': {{{match.rule.name!r}}}}} leaves that rule out"
    )


def _script(subject: Subject, call: Call, wrong: Culprit | None) -> Path:
    """Write a script that runs both graphs on the inputs of `call`, and return its path.

    With a `wrong` rewrite they are the graphs with and without it: only the calls that differ, if these show the
    difference. Without one they are the plain and the fused graph.
    """
    if wrong is None:
        graphs = {"plain": subject.original, "fused": standalone(subject.fused, subject.prepared)}
        return write(subject.folder, "A graph before and after the pass.", graphs, call, _names(subject, call))
    title = f"The rule {wrong.candidate.match.rule.name!r} changes what a model computes."
    alone = difference(wrong.without, wrong.guilty, call)
    if alone is None or not alone.is_wrong:
        graphs = {"plain": wrong.without, "fused": wrong.guilty}
        return write(subject.folder, title, graphs, call, _names(subject, call))
    return write(subject.folder, title, {"plain": alone.plain, "fused": alone.fused}, alone.call, alone.names)
