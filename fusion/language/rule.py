"""A rule declares one fused concept: meaning, written forms, when to refuse, what the NPU runs, how it is tried."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, TypeVar

import torch

from fusion.errors import RuleError
from fusion.language.terms import Capture, Meaning, Parameter, Term
from fusion.language.vocabulary import Vocabulary

Method = TypeVar("Method", bound=Callable[..., Any])


@dataclass(frozen=True)
class _Tensor:
    dims: tuple[str, ...]
    optional: bool


@dataclass(frozen=True)
class _Parameter:
    pass


def tensor(dims: str, optional: bool = False) -> Any:
    """Declare a captured tensor by its named dims, e.g. "*B D": any leading dims, then D; None if it is not there."""
    return _Tensor(tuple(dims.split()), optional)


def scalar() -> Any:
    """Declare a captured number that the graph holds as a constant."""
    return _Parameter()


def attribute() -> Any:
    """Declare a captured attribute of an op: dims, an exponent, an order of lanes."""
    return _Parameter()


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
    """Mark a lowering that takes these parameters beside captures: one way to run for each combination, best first.

    A later combination is tried only where the ones before it are refused.
    """

    def mark(method: Method) -> Method:
        method.fusion_variants = choices  # type: ignore[attr-defined]
        return method

    return mark


@dataclass(frozen=True)
class Lowering:
    """One way to run a rule: a method of it, with its variants chosen.

    Attributes:
        name: the method's name, and in brackets what was chosen.
        method: the method's name.
        chosen: its parameters that are no captures.
    """

    name: str
    method: str
    chosen: Mapping[str, Any]

    def run(self, rule: Rule, captures: Mapping[str, Any]) -> Any:
        """What it gives for captures."""
        return call(getattr(rule, self.method), {**captures, **self.chosen})


@dataclass(frozen=True)
class Pattern:
    """One written form, traced: its results and the captures by name."""

    name: str
    results: tuple[Term, ...]
    captures: Mapping[str, Capture | Parameter]
    reason: str = ""
    apart: tuple[str, ...] = ()


@dataclass(frozen=True)
class Example:
    """A function in plain torch with inputs, for the laws that every rule must pass.

    Attributes:
        name: what is particular about it.
        function: plain torch code.
        inputs: makes fresh inputs of a floating dtype.
        refusal: for a reject, a part of the reason that must be given.
    """

    name: str
    function: Callable[..., Any]
    inputs: Callable[[torch.dtype], tuple[torch.Tensor, ...]]
    refusal: str = ""


@dataclass(frozen=True)
class Rule:
    """One fused concept. Subclasses are frozen, without state, and answer five questions in this order.

    1. what does it mean: `reference`; 2. how is it written: methods marked `@pattern`; 3. when must we refuse: `guard`
    and methods marked `@lookalike`; 4. what does the NPU run: methods marked `@lowering`, best first; 5. how is it
    tried: `examples` and `rejects`.
    """

    @property
    def name(self) -> str:
        """The semantic op that a match of this rule reads as: the class name in snake case."""
        return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", type(self).__name__).lower()

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

    def examples(self) -> Iterator[Example]:
        """Functions that must be recognised."""
        return iter(())

    def rejects(self) -> Iterator[Example]:
        """Functions that must be refused, each with (a part of) the reason."""
        return iter(())

    def patterns(self) -> tuple[Pattern, ...]:
        """The written forms, traced once."""
        return _traced(type(self), "pattern")

    def lookalikes(self) -> tuple[Pattern, ...]:
        """The forms that mean something else."""
        return _traced(type(self), "lookalike")

    def lowerings(self) -> tuple[Lowering, ...]:
        """The ways to run the rule, in order of declaration."""
        return tuple(each for name, method in _marked(type(self), "lowering") for each in _variants(name, method))

    def beside(self) -> frozenset[str]:
        """Names of rules that read what this one gives and no node holds: it is offered together with one of them."""
        return frozenset()

    def uses(self) -> frozenset[str]:
        """The semantic ops that its patterns mention."""
        found: set[str] = set()
        for each in (*self.patterns(), *self.lookalikes()):
            for result in each.results:
                found |= _meanings(result)
        return frozenset(found)


def _marked(kind: type, role: str) -> list[tuple[str, Callable[..., Any]]]:
    methods = [(name, method) for base in kind.__mro__[::-1] for name, method in vars(base).items()]
    return [(name, method) for name, method in methods if getattr(method, "fusion_role", None) == role]


def _variants(name: str, method: Callable[..., Any]) -> Iterator[Lowering]:
    choices: Mapping[str, tuple[Any, ...]] = getattr(method, "fusion_variants", {})
    for chosen in product(*choices.values()):
        label = f"{name}[{', '.join(map(str, chosen))}]" if chosen else name
        yield Lowering(label, name, dict(zip(choices, chosen, strict=True)))


@cache
def _traced(kind: type[Rule], role: str) -> tuple[Pattern, ...]:
    rule = kind()
    return tuple(_trace(rule, name, method) for name, method in _marked(kind, role))


def _trace(rule: Rule, name: str, method: Callable[..., Any]) -> Pattern:
    captures: dict[str, Capture | Parameter] = {}
    for parameter in list(inspect.signature(method).parameters.values())[2:]:
        declared = parameter.default
        if isinstance(declared, _Tensor):
            captures[parameter.name] = Capture(parameter.name, declared.dims, declared.optional)
        elif isinstance(declared, _Parameter):
            captures[parameter.name] = Parameter(parameter.name)
        else:
            raise RuleError(
                f"tracing pattern {type(rule).__name__}.{name}: capture {parameter.name!r} is declared as "
                f'{declared!r}; declare it with tensor("..."), scalar() or attribute() as its default'
            )
    result = method(rule, Vocabulary(), **captures)
    results = result if isinstance(result, tuple) else (result,)
    reason, apart = getattr(method, "fusion_reason", ""), getattr(method, "fusion_apart", ())
    return Pattern(name, results, captures, reason, apart)


def _meanings(term: Term) -> set[str]:
    found = {term.op} if isinstance(term, Meaning) else set[str]()
    for child in term.below():
        if isinstance(child, Term):
            found |= _meanings(child)
    return found


def captured(pattern: Pattern, bound: Mapping[Any, Any]) -> dict[str, Any]:
    """The captures of a match by name; tensors as values, without optional ones that the meanings lack."""
    lacking = {term for term in pattern.captures.values() if isinstance(term, Capture) and bound.get(term) is None}
    return {name: bound[term] for name, term in pattern.captures.items() if term in bound and term not in lacking}


def call(method: Callable[..., Any], captures: Mapping[str, Any]) -> Any:
    """Call a guard or a lowering with those captures that it names; a capture that the form lacks is None."""
    return method(**{name: captures.get(name) for name in _parameters(getattr(method, "__func__", method))})


@cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(function).parameters if name != "self")
