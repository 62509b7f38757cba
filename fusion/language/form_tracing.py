"""Tracing of the forms of a rule: each marked method is called once, and becomes a `Pattern` of terms and captures."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from dis import get_instructions
from functools import cache, cached_property
from traceback import walk_tb
from types import CodeType
from typing import Any

from fusion.errors import RuleError
from fusion.language.captures import Attribute, Tensor, is_group
from fusion.language.decorators import each_variant, marked
from fusion.language.terms import Capture, Parameter, Term
from fusion.language.vocabulary import Vocabulary
from fusion.language.word_terms import Meaning


@dataclass(frozen=True)
class Pattern:
    """A traced form.

    Attributes:
        name: the method's name, followed by the choices of its variants in brackets.
        results: the terms that the method returned; matching begins at the first.
        captures: name -> term; "group.field" for the fields of groups.
        reason: the reason of a look-alike; "" for others.
        apart: names of captures that must be bound to pairwise different values.
        given: parameters of the method that are no captures: group name -> class, variant -> choice.
        varies: True if the method has variants.
        choices: variant -> choice.
        alternative: True if the form is marked `@alternative`.
    """

    name: str
    results: tuple[Term, ...]
    captures: Mapping[str, Capture | Parameter]
    reason: str = ""
    apart: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    varies: bool = False
    choices: Mapping[str, Any] = field(default_factory=dict[str, Any])
    alternative: bool = False

    def keeps_apart(self, captures: Mapping[str, Any]) -> bool:
        """Return True if the captures named in `apart` are pairwise different."""
        return len({captures[name] for name in self.apart}) == len(self.apart)

    @property
    def method(self) -> str:
        """The name of the method."""
        return self.name.partition("[")[0]

    @cached_property
    def applied(self) -> frozenset[tuple[str, tuple[str, ...]]]:
        """The semantic ops in the form, each with the names of its captures."""
        return frozenset().union(*map(_applied, self.results))

    @cached_property
    def words(self) -> frozenset[str]:
        """The names of the semantic ops in the form."""
        return frozenset(name for name, _ in self.applied)

    @cached_property
    def needed(self) -> frozenset[frozenset[str]]:
        """The heads (`Term.heads`) of each part of the first result.

        Every match has, for each of these sets, a value of one of its ops at or below the root.
        """
        return frozenset(filter(None, (each.heads() for each in _parts(self.results[0]))))

    @cached_property
    def between(self) -> frozenset[str]:
        """The union of `needed`: the ops that may occur on a path from the root of a match down to a value that
        `needed` requires.
        """
        return frozenset[str]().union(*self.needed)


State = tuple[tuple[str, Any], ...]
"""(field, value) for each field of a rule, as a key of memoised functions."""


@cache
def traced(kind: type, state: State, role: str) -> tuple[Pattern, ...]:
    """Trace the methods that the rule class `kind` marks as `role`, on an instance with the fields `state`; memoised.

    Raises:
        RuleError: a method is declared wrongly, or raised an exception.
    """
    rule = object.__new__(kind)
    vars(rule).update(state)
    return tuple(
        _trace(rule, label, method, chosen)
        for name, method in marked(kind, role)
        for label, chosen in each_variant(name, method)
    )


def _trace(rule: Any, name: str, method: Callable[..., Any], chosen: Mapping[str, Any]) -> Pattern:
    captures: dict[str, Capture | Parameter] = {}
    given: dict[str, Any] = dict(chosen)
    arguments: dict[str, Any] = dict(chosen)
    where = f"{type(rule).__name__}.{name}"

    def capture(name: str, declared: Any) -> Capture | Parameter:
        return captures.setdefault(name, _capture(where, name, declared))

    for parameter in _taken(where, method):
        declared = chosen.get(parameter.name, parameter.default)
        if is_group(declared):
            given[parameter.name], arguments[parameter.name] = declared, declared.made(parameter.name, capture)
        elif parameter.name not in chosen:
            arguments[parameter.name] = capture(parameter.name, declared)
    results = _returned(where, method, rule, arguments)
    reason = getattr(method, "fusion_reason", "")
    kinds = {group: kind for group, kind in given.items() if is_group(kind)}
    apart = tuple(f"{group}.{name}" for group, kind in kinds.items() for name in kind.differing)
    apart += getattr(method, "fusion_apart", ())
    unknown = sorted(set(apart) - set(captures))
    if unknown:
        raise RuleError(f"{where}: {unknown[0]!r} is to be apart, and is no capture: there are {sorted(captures)}")
    alternative = getattr(method, "fusion_alternative", False)
    return Pattern(name, results, captures, reason, apart, given, bool(chosen), chosen, alternative)


def _taken(where: str, method: Callable[..., Any]) -> list[inspect.Parameter]:
    """List the parameters of the form `method` after `self` and the vocabulary `p`.

    Raises:
        RuleError: there is no parameter for the vocabulary.
    """
    parameters = list(inspect.signature(method).parameters.values())
    if len(parameters) < 2 or parameters[1].default is not inspect.Parameter.empty:
        raise RuleError(
            f"tracing pattern {where} ({place_of(method)}): its first parameter is no vocabulary; "
            "declare it as `def form(self, p, x=tensor(...), ...)`"
        )
    return parameters[2:]


def _returned(where: str, method: Callable[..., Any], rule: Any, arguments: Mapping[str, Any]) -> tuple[Term, ...]:
    """Call the form `method` with terms as `arguments`, and return the terms of its results.

    Raises:
        RuleError: the method raised an exception, or returned something that is no term.
    """
    try:
        result = method(rule, Vocabulary(), **arguments)
    except Exception as error:
        what = str(error) if isinstance(error, RuleError) else f"it raised {type(error).__name__}: {error}"
        raise RuleError(f"tracing pattern {where} ({place_of(method, error)}): {what}") from error
    results = result if isinstance(result, tuple) else (result,)
    for each in results:
        if not isinstance(each, Term):
            raise RuleError(
                f"tracing pattern {where} ({place_of(method)}): it returned {each!r}; return the term, or the tuple of "
                "terms, that the rule replaces"
            )
    return results


def place_of(method: Any, error: BaseException | None = None, name: str = "") -> str:
    """Return "file:line" of `method`: of the line that raised `error`, else that reads `name`, else of the first."""
    code: CodeType = method.__code__
    line = code.co_firstlineno
    if error is not None:
        line = next((at for frame, at in walk_tb(error.__traceback__) if frame.f_code is code), line)
    elif name:
        reading = (each for each in get_instructions(code) if each.argval == name and each.positions)
        line = next((each.positions.lineno for each in reading if each.positions and each.positions.lineno), line)
    return f"{code.co_filename}:{line}"


def _capture(pattern: str, name: str, declared: Any) -> Capture | Parameter:
    if isinstance(declared, Tensor):
        return Capture(name, declared.dims, declared.optional, declared.needed)
    if isinstance(declared, Attribute):
        return Parameter(name, declared.among)
    what = "without a default" if declared is inspect.Parameter.empty else f"as {declared!r}"
    raise RuleError(
        f"tracing pattern {pattern}: capture {name!r} is declared {what}; declare it with "
        'tensor("..."), scalar(), attribute() or a kind of Group as its default'
    )


def _parts(term: Term) -> Iterator[Term]:
    """Yield `term` and, recursively, its parts."""
    yield term
    for each in term.parts():
        yield from _parts(each)


def _applied(term: Term) -> set[tuple[str, tuple[str, ...]]]:
    own = {(term.op, tuple(term.captures))} if isinstance(term, Meaning) else set[tuple[str, tuple[str, ...]]]()
    return own.union(*(_applied(child) for child in term.below() if isinstance(child, Term)))


def captured(pattern: Pattern, bound: Mapping[Any, Any]) -> dict[str, Any]:
    """Return name -> value or constant for the captures of a match, without unbound ones, and for `pattern.given`."""
    lacking = {term for term in pattern.captures.values() if isinstance(term, Capture) and bound.get(term) is None}
    taken = {name: bound[term] for name, term in pattern.captures.items() if term in bound and term not in lacking}
    return {**taken, **pattern.given}
