"""explain: a report of what would fuse in a model, without running anything."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from traceback import format_exception, walk_tb
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from fusion._torch.exported import is_exported
from fusion._torch.fakes import OUTSIDE, CopyMode, fresh_fake_mode, real_causal_biases
from fusion._torch.graph_breaks import UNRESUMED, Departures, listening, stack_of
from fusion._torch.tracing import compile_apart, keep_marks, unwrapped
from fusion.errors import OptionError
from fusion.frontend.backend import FusionBackend
from fusion.frontend.expectations.compare import unmet, warn_unmet
from fusion.frontend.explainer import Explainer
from fusion.frontend.exported import explain_exported
from fusion.inputs.data_dependent import Guesses, innermost, is_of_model
from fusion.language import Library, Reader, Rule
from fusion.options import Options
from fusion.planning.target import Target
from fusion.report.document import Break, Interruption
from fusion.report.failures import shortened, worded
from fusion.report.outcome import GraphReport
from fusion.report.progress import watched
from fusion.report.report import Report

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def explain(
    fn_or_module: Callable[..., Any] | ExportedProgram,
    *args: Any,
    options: Options | Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    rules: Library | Iterable[Rule | Reader] | None = None,
    **kwargs: Any,
) -> Report:
    """Trace a function or module under fake tensors and report what fuses.

    Nothing is run and no input, parameter or cache is changed: the model and its inputs are copied as fake tensors,
    which have no memory. Where Python reads a number or a size that follows from the integers of the call alone, the
    number is computed; numbers that depend on other data come from a sample, and the report lists where. An
    ExportedProgram, which has its inputs, is passed alone: the report is that of `fuse_exported`.

    Where the model raises, the report is of the graphs before, with the error in `interruption`. Expectations of the
    option `expect` that are not met give an `ExpectationWarning`.

    Args:
        fn_or_module: the function, module or program.
        args: the arguments of the call.
        options: the options, as for the backend.
        dynamic: as in `torch.compile`.
        rules: the rules, as for the backend.
        kwargs: the keyword arguments of the call.

    Returns:
        The report over all graphs of the call.

    Raises:
        OptionError: an option is wrong, or `fn_or_module` cannot be called.
        RuleError: a rule is declared wrongly.
    """
    if is_exported(fn_or_module) and not (args or kwargs):
        return explain_exported(fn_or_module, options, rules)
    if is_exported(fn_or_module) or not callable(fn_or_module):
        raise OptionError(f"explaining: {_not_explained(fn_or_module)}")
    checked = Options.of(options)
    trace = _Trace(FusionBackend(checked, rules), dynamic)
    interruption: Interruption | None = None
    with listening() as departures:
        try:
            trace.run(fn_or_module, args, kwargs)
        except Exception as error:
            interruption = _interruption(unwrapped(error), trace.mode.places)
    target, places = Target.resolve(checked.target).name, dict(trace.mode.places)
    report = Report(target, tuple(trace.parts), places, _breaks(departures), interruption, model=name_of(fn_or_module))
    if checked.expect and interruption is None:
        warn_unmet(unmet(report, checked, rules))
    return report


def _not_explained(given: Any) -> str:
    """Return the reason why `given` is not traced, and what to give."""
    if is_exported(given):
        return "an exported program has its inputs; give it alone, or program.module() with other inputs"
    name = ", and names of models are for `cann-fusion explain`" if isinstance(given, str) else ""
    return f"a {type(given).__name__} is no model{name}; give a function or a module, and behind it its arguments"


class _Trace:
    """Trace of one call under fake tensors.

    Attributes:
        parts: the reports of its graphs.
        mode: the fake mode in which it runs.
    """

    def __init__(self, backend: FusionBackend, dynamic: bool | None) -> None:
        self._backend, self._dynamic = backend, dynamic
        self.parts: list[GraphReport] = []
        self.mode = fresh_fake_mode(Guesses)

    def run(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Trace the call of a copy of `function`, with copies of its arguments."""
        with CopyMode(self.mode):
            (model, fake_args, fake_kwargs), copied = _copied((function, args, kwargs))
        pairs = _copies(copied)
        originals = {id(fake): real for fake, real in pairs}
        explainer = Explainer(self._backend, self.parts, positional_arguments(function), originals)
        keep_marks(tree_leaves((args, kwargs)), copied)
        self.mode.given.give(pairs)
        for_inference = any(isinstance(each, torch.Tensor) and each.is_inference() for each in copied.values())
        with (
            watched("trace", self._backend.options.progress),
            torch.inference_mode() if for_inference else torch.no_grad(),
            real_causal_biases(),
            self.mode,
        ):
            compile_apart(model, explainer, self._dynamic)(*fake_args, **fake_kwargs)


def _copied(given: Any) -> tuple[Any, dict[int, Any]]:
    """Copy `given` deeply, sharing objects without tensors that cannot be copied (locks); return copy and memo."""
    shared: dict[int, Any] = {}
    while True:
        memo = dict(shared)
        try:
            return copy.deepcopy(given, memo), memo
        except Exception as error:
            calls = (frame for frame, _ in walk_tb(error.__traceback__) if frame.f_code is copy.deepcopy.__code__)
            failed = [frame.f_locals["x"] for frame in calls][-1:]
            if not failed or id(failed[0]) in shared or not _may_be_shared(failed[0]):
                raise
            shared[id(failed[0])] = failed[0]


def _may_be_shared(given: Any) -> bool:
    """Return True if an object has no tensor that tracing could write to."""
    holders = (torch.Tensor, torch.nn.Module, Mapping, list, tuple, set)
    attributes = getattr(given, "__dict__", {}).values()
    return not any(isinstance(each, holders) for each in (given, *attributes))


def _interruption(error: Exception, guesses: Mapping[str, int]) -> Interruption:
    where, text = innermost(stack_of(error)), worded(error)
    if inner := _INNER.search(str(error)):
        text = f"{inner['kind']}: {inner['text']}"
    advice = next((each for part, each in _ADVICE.items() if part in str(error)), "")
    if guesses and not advice:
        advice = f"numbers that data decides were read from a sample at {', '.join(guesses)}"
    return Interruption(text, where, advice, "".join(format_exception(error)))


_INNER = re.compile(r"got (?P<kind>\w+)\((?P<quote>['\"])(?P<text>.*?)(?P=quote)\)", re.DOTALL)
"""Error of an operator, in the text of the error that Dynamo raises for it."""
_ADVICE = {
    **{
        f"unexpected keyword argument '{each.name}'": f"options of the pass are given as options={{{each.name!r}: ...}}"
        for each in fields(Options)
    },
    "numpy": "explaining runs nothing, so that there are no numbers for numpy: compute this with torch, or explain the "
    "part of the model that you mean",
}
"""Advice to a user, by a part of the text of an error."""


def _breaks(departures: Departures) -> tuple[Break, ...]:
    """List graph breaks and functions that were not traced, each once, with their place in the model's code."""
    between = [
        Break(innermost(stack), _first_lines(reason)) for stack, reason in departures.breaks if OUTSIDE not in reason
    ]
    skipped = [
        Break(f"{file}:{line}", _UNRESUMED if reason.startswith(UNRESUMED) else _first_lines(reason), name)
        for name, file, line, reason in departures.skipped
        if is_of_model(file)
    ]
    return tuple(dict.fromkeys(each for each in (*between, *skipped) if each.where))


_UNRESUMED = "it holds a graph break that Dynamo cannot resume behind, as in a loop, a `with` or a `try`"


def _first_lines(reason: str) -> str:
    """Shorten the reason for a graph break to its first line and Dynamo's explanation, without addresses."""
    first, _, rest = reason.strip().partition("\n")
    explained = re.search(r"Explanation: ([^\n]*)", rest)
    text = f"{first}: {explained[1]}" if explained else first
    text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return shortened(text, _LONGEST)


_LONGEST = 200  # characters


def _copies(copied: dict[int, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pair each fake tensor with the tensor that it is a copy of, from the memo of `copy.deepcopy`."""
    originals = [each for each in copied.get(id(copied), ()) if isinstance(each, torch.Tensor)]
    return [(copied[id(each)], each) for each in originals if id(each) in copied]


def positional_arguments(called: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of the arguments of `called` that may be passed by position, in order; () if it is in C."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(each.name for each in _parameters(called) if each.kind in kinds)


def variadic_argument(called: Callable[..., Any]) -> str:
    """Return the name of the argument of `called` that takes all further ones by position (`*args`), or ""."""
    kind = inspect.Parameter.VAR_POSITIONAL
    return next((each.name for each in _parameters(called) if each.kind is kind), "")


def name_of(called: Callable[..., Any]) -> str:
    """Return the name of the class of a module, or that of a function."""
    return getattr(called, "__name__", type(called).__name__)


def _parameters(called: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    forward = called.forward if isinstance(called, torch.nn.Module) else called
    try:
        return tuple(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        return ()
