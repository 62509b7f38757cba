"""The report on a model that is named on the command line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from rich.markup import escape

from fusion.errors import OptionError
from fusion.frontend import hf
from fusion.frontend.commands.console import fail, tell
from fusion.frontend.commands.flags import CallFlags
from fusion.frontend.commands.loading import call_of
from fusion.frontend.explain import explain
from fusion.frontend.library import library_for
from fusion.language import Library
from fusion.options import Options
from fusion.report.report import Report


@dataclass(frozen=True)
class Plan:
    """Options and rules of a report."""

    options: Options
    rules: Library | None = None


def explained(model: str, plan: Plan, flags: CallFlags) -> Report:
    """Explain the model that `model` names, in the call that `flags` describe.

    Notices are printed on stderr.

    Raises:
        OptionError: the model, an option or a rule is wrong.
    """
    library_for(plan.options, plan.rules)  # before a large model is built
    failures: list[str] = []
    return _first_traced(calls(model, flags, failures), failures, plan, flags.dynamic)


def calls(model: str, flags: CallFlags, failures: list[str]) -> Iterable[hf.Call]:
    """Yield the calls to try of the model that `model` names; `failures` are the errors of those before.

    Raises:
        OptionError: the model or an input is wrong.
    """
    named = model.removeprefix("hf:")
    if named == model:
        return [call_of(model, flags.input or ())]
    if flags.input:
        raise OptionError(f"explaining {model}: a model of the hub has its inputs; leave --input out, or set --seq")
    sizes = flags.layers, flags.dtype, flags.attn, flags.batch, flags.seq, flags.context
    return hf.calls(hf.Request(named, flags.mode, *sizes, flags.cache, flags.tiny), failures)


def _first_traced(candidates: Iterable[hf.Call], failures: list[str], plan: Plan, dynamic: bool | None) -> Report:
    """Explain `candidates` one by one up to the first that is traced to its end, else return the report of the first.

    The errors of the others are appended to `failures`, which `candidates` read to choose the next one.
    """
    reports: list[Report] = []
    for call in candidates:
        for notice in call.notices:
            tell(f"[dim]note: {escape(notice)}[/dim]")
        trace = partial(explain, options=plan.options, dynamic=dynamic, rules=plan.rules)
        report = trace(call.model, *call.args, **call.kwargs)
        reports.append(replace(report, notes=call.notices))
        if report.interruption is None:
            return reports[-1]
        failures.append(report.interruption.error)
    return reports[0]


def require_traced(model: str, report: Report, full: bool) -> None:
    """Require that all of the model was traced, or exit with its error; `full` adds the traceback."""
    if report.interruption is not None:
        fail(f"explaining {model}", str(report.interruption), report.interruption.traceback if full else "")
