"""Failures: what a stage or a rule raises becomes a record of where it was, and costs no more than it must."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch.fx as fx

from fusion.errors import Failure, FusionError, OperatorError, StageError, VerificationError
from fusion.graph import Graph, Value
from fusion.graph.origin import location, module_path, source_text
from fusion.language import Refused
from fusion.records import Candidate, Match
from fusion.report.progress import at

_LONGEST = 300  # characters of a message; those of torch hold whole stacks


@contextmanager
def stage(name: str) -> Generator[None, None, None]:
    """What is raised inside becomes a `StageError` that says where; errors that are meant for the user stay.

    Raises:
        StageError: something was raised.
        FusionError: the graph, the options or a rule cannot be used.
    """
    at(name)
    try:
        yield
    except Exception as error:
        if isinstance(error, FusionError) and not isinstance(error, VerificationError | OperatorError):
            raise
        raise StageError(failure(name, error)) from error


def failure(name: str, error: Exception, rule: str = "", node: fx.Node | None = None) -> Failure:
    """The record of what was raised in a stage; with a `rule`, only that one is lost."""
    node = node or culprit(error)
    place = {} if node is None else place_in_report(node)
    return Failure(name, worded(error), rule or _maker(node) or _working(error), not rule, **place)


def place_in_report(node: fx.Node) -> dict[str, str]:
    """Name a node, with the line of the model that it is of, for a report."""
    return {"node": node.name, "where": location(node), "source": source_text(node), "module": module_path(node)}


def raised(part: str, error: Exception) -> Refused:
    """The reason why a rule is refused a part of which raised."""
    return Refused("its {part} raised {error}", {"part": part, "error": worded(error)})


def worded(error: Exception) -> str:
    """Type and message, in one line."""
    told = " ".join(str(error).split())
    short = shortened(told, _LONGEST)
    return f"{type(error).__name__}: {short}" if short else type(error).__name__


def shortened(text: str, most: int) -> str:
    """Cut a text behind so many characters."""
    return text if len(text) <= most else f"{text[:most]} …"


def culprit(error: Exception) -> fx.Node | None:
    """The node that was worked on: what the innermost call that has one names so, or else a value that a node holds."""
    calls = _calls(error)
    named = (each for names in calls if isinstance(each := names.get("node"), fx.Node))
    places: list[Mapping[Any, Any]] = [found for names in calls for each in names.values() if (found := _places(each))]
    worked_on = (each for names in calls for each in (names.get("node"), names.get("value"), *names.values()))
    return next(chain(named, filter(None, (_node_of(each, places) for each in worked_on))), None)


def _calls(error: Exception) -> list[dict[str, Any]]:
    """The names of the calls that an error has left, innermost first."""
    return [frame.f_locals for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]


def _places(holder: Any) -> Mapping[Any, Any]:
    """The nodes that hold each value, where an object of ours knows them."""
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
            return next((held[each][0] for held in places if held.get(each)), None)
        case _:
            return None


def _maker(node: fx.Node | None) -> str:
    """The rule that has put a node into the graph, "" for one of the model."""
    made = {} if node is None else node.meta.get("fusion", {})
    return str(made.get("rule", ""))


def _working(error: Exception) -> str:
    """The rule of the match that was worked on, "" where there is none."""
    held = (each for names in _calls(error) for each in names.values() if isinstance(each, Candidate | Match))
    matches = (each.match if isinstance(each, Candidate) else each for each in held)
    return next((each.rule.name for each in matches), "")


def warn(failures: Iterable[Failure]) -> None:
    """Tell a user whose model runs all the same, with what helps."""
    for each in failures:
        lost = "a graph and runs it as it came" if each.whole else f"by the rule {each.rule!r} and goes on without it"
        warnings.warn(f"cann-fusion could not fuse {lost}: {each}; {each.advice}.", stacklevel=3)
