"""A rule declares one fused concept: meaning, written forms, when to refuse, what the NPU runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product
from typing import Any, ClassVar, TypeVar

import torch

from fusion.errors import RuleError
from fusion.language.groups import Attribute, Tensor, is_group
from fusion.language.terms import Capture, Meaning, Parameter, Term
from fusion.language.vocabulary import Vocabulary

Method = TypeVar("Method", bound=Callable[..., Any])


class Refused(Exception):  # noqa: N818 - a decision, not an error
    """Raised by `require`: this match is not to be rewritten, and why."""

    def __init__(self, template: str, values: Mapping[str, object]) -> None:
        self.template, self.values = template, values

    def __str__(self) -> str:
        """The reason, formatted only when someone reads it."""
        return self.template.format(**self.values)


def require(condition: object, template: str, **values: object) -> None:
    """Refuse the match unless `condition` holds; `template` says why not, in the user's terms."""
    if not condition:
        raise Refused(template, values)


def pattern(method: Method) -> Method:
    """Mark a method as one written form: `def form(self, p, x=tensor("*B D"), eps=scalar())` returns its result(s)."""
    method.fusion_role = "pattern"  # type: ignore[attr-defined]
    return method


def lookalike(reason: str, apart: tuple[str, ...] = ()) -> Callable[[Method], Method]:
    """Mark a pattern that looks like the rule but means something else.

    `reason` may name its captures in braces; the captures in `apart` must be different values.
    """

    def mark(method: Method) -> Method:
        method.fusion_role = "lookalike"  # type: ignore[attr-defined]
        method.fusion_reason, method.fusion_apart = reason, apart  # type: ignore[attr-defined]
        return method

    return mark


def lowering(method: Method) -> Method:
    """Mark a method as one way to run the rule: plain torch and `torch.ops.npu` calls on the captured tensors."""
    method.fusion_role = "lowering"  # type: ignore[attr-defined]
    return method


def variants(**choices: tuple[Any, ...]) -> Callable[[Method], Method]:
    """Mark a lowering, or a form, that takes these parameters beside captures: one for each combination, best first.

    A later combination of a lowering is tried only where the ones before it are refused. Each combination of a form is
    matched for itself; guards and lowerings may ask for what was chosen. A choice may be a kind of `Group`. A lowering
    with a variant of the same name as one of the form is for that choice alone.
    """

    def mark(method: Method) -> Method:
        method.fusion_variants = choices  # type: ignore[attr-defined]
        return method

    return mark


def calls(operator: str) -> Callable[[Method], Method]:
    """Mark a lowering by the one operator that it is for: where that cannot run, other lowerings alone are tried.

    `operator` may name what `variants` chose in braces.
    """

    def mark(method: Method) -> Method:
        method.fusion_calls = operator  # type: ignore[attr-defined]
        return method

    return mark


def refused_on(chip: str, because: str) -> Callable[[Method], Method]:
    """Mark a lowering that does not give on a chip what the rule means, and why."""

    def mark(method: Method) -> Method:
        method.fusion_refused = {**getattr(method, "fusion_refused", {}), chip: because}  # type: ignore[attr-defined]
        return method

    return mark


@dataclass(frozen=True)
class Lowering:
    """One way to run a rule: a method of it, with its variants chosen.

    Attributes:
        name: the method's name, and in brackets what was chosen.
        method: the method's name.
        chosen: its parameters that are no captures.
        operator: the one that it is for, "" where it names none.
        refused_on: chips on which it does not give what the rule means, and why.
    """

    name: str
    method: str
    chosen: Mapping[str, Any]
    operator: str = ""
    refused_on: Mapping[str, str] = field(default_factory=dict[str, str])

    def suits(self, choices: Mapping[str, Any]) -> bool:
        """Whether it is for a form that chose these: what has the same name is the same."""
        return all(choices.get(name, each) == each for name, each in self.chosen.items())

    def run(self, rule: Rule, captures: Mapping[str, Any]) -> Any:
        """What it gives for captures."""
        return call(getattr(rule, self.method), {**captures, **self.chosen})


@dataclass(frozen=True)
class Pattern:
    """One written form, traced: its results and the captures by name, those of a group as `group.field`.

    `given` holds what is no capture but taken as one: the kind of each group, and what `variants` chose. `varies` says
    whether that is one of several, and `choices` what `variants` chose.
    """

    name: str
    results: tuple[Term, ...]
    captures: Mapping[str, Capture | Parameter]
    reason: str = ""
    apart: tuple[str, ...] = ()
    given: Mapping[str, Any] = field(default_factory=dict)
    varies: bool = False
    choices: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def keeps_apart(self, captures: Mapping[str, Any]) -> bool:
        """Whether captures that must be different values are."""
        return len({captures[name] for name in self.apart}) == len(self.apart)

    @property
    def method(self) -> str:
        """The name of the method that it is one variant of."""
        return self.name.partition("[")[0]

    @cached_property
    def applied(self) -> frozenset[tuple[str, tuple[str, ...]]]:
        """Each semantic op that it mentions, with the names of what that is applied to."""
        return frozenset().union(*map(_applied, self.results))

    @cached_property
    def words(self) -> frozenset[str]:
        """The semantic ops that it mentions."""
        return frozenset(name for name, _ in self.applied)

    @cached_property
    def needed(self) -> frozenset[frozenset[str]]:
        """Of each part of its first result the canonical ops of which it is one: all are in or below the result."""
        return frozenset(filter(None, (each.heads() for each in _parts(self.results[0]))))

    @cached_property
    def between(self) -> frozenset[str]:
        """The canonical ops that may stand between its first result and those parts, both included."""
        return frozenset[str]().union(*self.needed)


@dataclass(frozen=True)
class Example:
    """A function in plain torch with inputs, for the laws that every rule must pass.

    Attributes:
        name: what is particular about it.
        function: plain torch code.
        inputs: makes fresh inputs of a floating dtype.
        refusal: for a reject, a part of the reason that must be given.
        instead: for a reject of a rule that takes less of it, a part of the name of the form that it takes.
    """

    name: str
    function: Callable[..., Any]
    inputs: Callable[[torch.dtype], tuple[torch.Tensor, ...]]
    refusal: str = ""
    instead: str = ""


@cache
def _snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


@dataclass(frozen=True)
class Rule:
    """One fused concept. Subclasses are frozen, without state, and answer four questions in this order.

    1. what does it mean: `reference`; 2. how is it written: methods marked `@pattern`; 3. when must we refuse: `guard`
    and methods marked `@lookalike`; 4. what does the NPU run: methods marked `@lowering`, best first. How it is tried
    stands apart, where only tests load it: the package's entry point of the group `fusion.examples`.

    A rule that is `opt_in` is off, and costs nothing, unless the option of that name names it.
    """

    opt_in: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """The semantic op that a match of this rule reads as: the class name in snake case."""
        return _snake_case(type(self).__name__)

    def guard(self) -> None:
        """Refuse a match with `require`; takes any of the captures by name."""

    def remark(self) -> str:
        """What the report should say of a match that was rewritten; takes captures, `lowering` and `machine` by name.

        `machine` is the target that it was planned for; captured tensors are values, of which shapes are known.
        """
        return ""

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """The meaning, in plain torch."""
        raise NotImplementedError

    def patterns(self) -> tuple[Pattern, ...]:
        """The written forms, traced once."""
        return _traced(type(self), "pattern")

    def lookalikes(self) -> tuple[Pattern, ...]:
        """The forms that mean something else."""
        return _traced(type(self), "lookalike")

    def lowerings(self) -> tuple[Lowering, ...]:
        """The ways to run the rule, in order of declaration."""
        return _lowerings(type(self))

    def beside(self) -> frozenset[str]:
        """Names of rules that read what this one gives and no node holds: it is offered together with one of them."""
        return frozenset()

    def within(self) -> frozenset[str]:
        """Names of the larger fusions of which this one is a part: why those did not happen is told beside it."""
        return frozenset()

    def uses(self) -> frozenset[str]:
        """The semantic ops that its patterns mention."""
        return _used(type(self))

    def applies(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Each semantic op with what one of its patterns applies it to."""
        for form in (*self.patterns(), *self.lookalikes()):
            yield from form.applied


def _marked(kind: type, role: str) -> list[tuple[str, Callable[..., Any]]]:
    methods = [(name, method) for base in kind.__mro__[::-1] for name, method in vars(base).items()]
    return [(name, method) for name, method in methods if getattr(method, "fusion_role", None) == role]


def _variants(name: str, method: Callable[..., Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The names and choices of a method for each combination of its variants."""
    choices: Mapping[str, tuple[Any, ...]] = getattr(method, "fusion_variants", {})
    for chosen in product(*choices.values()):
        said = ", ".join(each.__name__ if is_group(each) else str(each) for each in chosen)
        yield f"{name}[{said}]" if chosen else name, dict(zip(choices, chosen, strict=True))


@cache
def _lowerings(kind: type[Rule]) -> tuple[Lowering, ...]:
    return tuple(
        Lowering(label, name, chosen, _said(method, "calls", "").format(**chosen), _said(method, "refused", {}))
        for name, method in _marked(kind, "lowering")
        for label, chosen in _variants(name, method)
    )


def _said(method: Callable[..., Any], what: str, unsaid: Any) -> Any:
    """What a decorator says of a method."""
    return getattr(method, f"fusion_{what}", unsaid)


@cache
def _used(kind: type[Rule]) -> frozenset[str]:
    return frozenset(name for name, _ in kind().applies())


@cache
def _traced(kind: type[Rule], role: str) -> tuple[Pattern, ...]:
    rule = kind()
    return tuple(
        _trace(rule, label, method, chosen)
        for name, method in _marked(kind, role)
        for label, chosen in _variants(name, method)
    )


def _trace(rule: Rule, name: str, method: Callable[..., Any], chosen: Mapping[str, Any]) -> Pattern:
    captures: dict[str, Capture | Parameter] = {}
    given: dict[str, Any] = dict(chosen)
    arguments: dict[str, Any] = dict(chosen)
    where = f"{type(rule).__name__}.{name}"

    def capture(name: str, declared: Any) -> Capture | Parameter:
        return captures.setdefault(name, _capture(where, name, declared))

    for parameter in list(inspect.signature(method).parameters.values())[2:]:
        declared = chosen.get(parameter.name, parameter.default)
        if is_group(declared):
            given[parameter.name], arguments[parameter.name] = declared, declared.made(parameter.name, capture)
        elif parameter.name not in chosen:
            arguments[parameter.name] = capture(parameter.name, declared)
    result = method(rule, Vocabulary(), **arguments)
    results = result if isinstance(result, tuple) else (result,)
    reason = getattr(method, "fusion_reason", "")
    kinds = {group: kind for group, kind in given.items() if is_group(kind)}
    apart = tuple(f"{group}.{name}" for group, kind in kinds.items() for name in kind.differing)
    apart += getattr(method, "fusion_apart", ())
    unknown = sorted(set(apart) - set(captures))
    if unknown:
        raise RuleError(f"{where}: {unknown[0]!r} is to be apart, and is no capture: there are {sorted(captures)}")
    return Pattern(name, results, captures, reason, apart, given, bool(chosen), chosen)


def _capture(pattern: str, name: str, declared: Any) -> Capture | Parameter:
    if isinstance(declared, Tensor):
        return Capture(name, declared.dims, declared.optional, declared.needed)
    if isinstance(declared, Attribute):
        return Parameter(name, declared.among)
    raise RuleError(
        f"tracing pattern {pattern}: capture {name!r} is declared as {declared!r}; declare it with "
        'tensor("..."), scalar(), attribute() or a kind of Group as its default'
    )


def _parts(term: Term) -> Iterator[Term]:
    """A term and its parts."""
    yield term
    for each in term.parts():
        yield from _parts(each)


def _applied(term: Term) -> set[tuple[str, tuple[str, ...]]]:
    found = {(term.op, tuple(term.captures))} if isinstance(term, Meaning) else set[tuple[str, tuple[str, ...]]]()
    return found.union(*(_applied(child) for child in term.below() if isinstance(child, Term)))


def captured(pattern: Pattern, bound: Mapping[Any, Any]) -> dict[str, Any]:
    """The captures of a match by name; tensors as values, without optional ones that the meanings lack."""
    lacking = {term for term in pattern.captures.values() if isinstance(term, Capture) and bound.get(term) is None}
    taken = {name: bound[term] for name, term in pattern.captures.items() if term in bound and term not in lacking}
    return {**taken, **pattern.given}


def call(method: Callable[..., Any], captures: Mapping[str, Any]) -> Any:
    """Call a guard or a lowering with those captures and groups that it names; what the form lacks is None."""
    return method(**{name: _argument(name, captures) for name in _parameters(getattr(method, "__func__", method))})


def _argument(name: str, captures: Mapping[str, Any]) -> Any:
    given = captures.get(name)
    return given.bound(name, captures) if is_group(given) else given


@cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(function).parameters if name != "self")
