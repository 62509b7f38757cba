"""Failures: errors in a stage or a rule, recorded with their place, and contained as far as possible."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any, TypeVar

import torch.fx as fx

from fusion.errors import Failure, FusionError, OperatorError, StageError, VerificationError
from fusion.graph import Graph, Value
from fusion.graph.origin import location, module_path, source_text
from fusion.language import Refused
from fusion.records import Candidate, Match
from fusion.report.progress import at

Made = TypeVar("Made")
_LONGEST = 300  # characters of a message; messages of torch may include stacks


@contextmanager
def stage(name: str) -> Generator[None, None, None]:
    """Convert errors inside the context to a `StageError` of stage `name` with their place.

    Raises:
        StageError: something was raised.
        FusionError: the graph, the options or a rule cannot be used; passed on as raised.
    """
    at(name)
    try:
        yield
    except Exception as error:
        if isinstance(error, FusionError) and not isinstance(error, VerificationError | OperatorError):
            raise
        raise StageError(failure(name, error)) from error


def attempted(doing: str, make: Callable[[], Made], otherwise: Made) -> Made:
    """Return what `make` returns; where it raises, `otherwise`, with a warning that names what was being done.

    For all that only describes a compilation: the graph is compiled all the same.
    """
    try:
        return make()
    except Exception as error:
        warnings.warn(
            f"cann-fusion failed while {doing} ({worded(error)}): the graph is compiled all the same, without this. "
            "Please report it, unless the message names a file that cannot be written.",
            stacklevel=3,
        )
        return otherwise


def failure(name: str, error: Exception, rule: str = "", node: fx.Node | None = None) -> Failure:
    """Record `error` in stage `name`; with a `rule`, only that rule is dropped."""
    node = node or culprit(error)
    place = {} if node is None else place_in_report(node)
    return Failure(name, worded(error), rule or _maker(node) or _working(error), not rule, **place)


def place_in_report(node: fx.Node) -> dict[str, str]:
    """Describe `node` for a report: its name, line of the model, source text and module."""
    return {"node": node.name, "where": location(node), "source": source_text(node), "module": module_path(node)}


def raised(part: str, error: Exception) -> Refused:
    """Return the reason to refuse a rule whose `part` raised `error`."""
    return Refused("its {part} raised {error}", {"part": part, "error": worded(error)})


def worded(error: Exception) -> str:
    """Format type and message of `error` in one line."""
    message = " ".join(str(error).split())
    short = shortened(message, _LONGEST)
    return f"{type(error).__name__}: {short}" if short else type(error).__name__


def shortened(text: str, most: int) -> str:
    """Cut `text` after `most` characters."""
    return text if len(text) <= most else f"{text[:most]} …"


def culprit(error: Exception) -> fx.Node | None:
    """Find the node that was being processed: the innermost local variable `node`, or else a value with a node."""
    calls = _calls(error)
    named = (each for names in calls if isinstance(each := names.get("node"), fx.Node))
    places: list[Mapping[Any, Any]] = [nodes for names in calls for each in names.values() if (nodes := _places(each))]
    worked_on = (each for names in calls for each in (names.get("node"), names.get("value"), *names.values()))
    return next(chain(named, filter(None, (_node_of(each, places) for each in worked_on))), None)


def _calls(error: Exception) -> list[dict[str, Any]]:
    """Return the local variables of the frames of `error`, innermost first."""
    return [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]


def _places(holder: Any) -> Mapping[Any, Any]:
    """Return the `places` (value -> its nodes) of `holder` if it is a Graph, or an object of a stage that has one; else
    {}.
    """
    if not isinstance(holder, Graph) and not type(holder).__module__.startswith("fusion.stages."):
        return {}
    known = getattr(holder, "places", None)
    return known if isinstance(known, Mapping) else {}


def _node_of(each: Any, places: list[Mapping[Any, Any]]) -> fx.Node | None:
    match each:
        case fx.Node():
            return each
        case Match():
            return each.node
        case Candidate():
            return each.match.node
        case Value():
            return next((nodes[each][0] for nodes in places if nodes.get(each)), None)
        case _:
            return None


def _maker(node: fx.Node | None) -> str:
    """Return the rule that inserted `node` into the graph, "" for a node of the model."""
    made = {} if node is None else node.meta.get("fusion", {})
    return str(made.get("rule", ""))


def _working(error: Exception) -> str:
    """Return the rule of the innermost match in the frames of `error`, "" where there is none."""
    active = (each for names in _calls(error) for each in names.values() if isinstance(each, Candidate | Match))
    matches = (each.match if isinstance(each, Candidate) else each for each in active)
    return next((each.rule.name for each in matches), "")


def warn(failures: Iterable[Failure]) -> None:
    """Warn of each failure, with advice; the model runs all the same."""
    for each in failures:
        lost = (
            "a graph and runs it as it came"
            if each.drops_graph
            else f"by the rule {each.rule!r} and goes on without it"
        )
        warnings.warn(f"cann-fusion could not fuse {lost}: {each}; {each.advice}.", stacklevel=3)
