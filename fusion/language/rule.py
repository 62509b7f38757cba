"""Rules: declarations of fused operations, each with its meaning, forms, refusals and lowerings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import chain
from string import Formatter
from typing import Any, ClassVar

import torch

from fusion.language.captures import Captures, is_group
from fusion.language.decorators import each_variant, marked
from fusion.language.form_tracing import Pattern, State, traced


class Refused(Exception):  # noqa: N818 - a decision, not an error
    """The refusal of a match, raised by `require`; its text is the reason that reports show."""

    def __init__(self, template: str, values: Mapping[str, object]) -> None:
        self.template, self.values = template, values

    def __str__(self) -> str:  # formatted on demand: most refusals are never shown
        return self.template.format(**self.values)


def require(condition: object, template: str, **values: object) -> None:
    """Refuse the match unless `condition` is true; the reason is `template`, formatted with `values`.

    Raises:
        Refused: `condition` is false.
        TypeError: `condition` is false, and `template` cannot be formatted with `values`.
    """
    if condition:
        return
    if missing := lacking(template, values):
        raise TypeError(missing)
    raise Refused(template, values)


def lacking(template: str, given: Container[str]) -> str:
    """Return an error text if `template` is malformed or has a field that is not among the names `given`; else ""."""
    try:
        fields = [name for _, name, _, _ in Formatter().parse(template) if name is not None]
    except ValueError as error:
        return f"its text {template!r} cannot be formatted ({error}); write {{{{ and }}}} for braces"
    roots = [re.split(r"[.\[]", each, maxsplit=1)[0] for each in fields]
    unknown = next((each for each in roots if each not in given), None)
    if unknown is None:
        return ""
    return f"its text {template!r} names {{{unknown}}}, which is not given; give it by that name"


@dataclass(frozen=True)
class Lowering:
    """One way to emit a rule: a method marked `@lowering`, with one choice for each of its `@variants`.

    Attributes:
        name: the method's name, followed by the choices in brackets.
        method: the method's name.
        chosen: variant name -> choice.
        operator: the operator that `@calls` names; "" without `@calls`.
        refused_on: chip -> reason why the result is wrong there.
    """

    name: str
    method: str
    chosen: Mapping[str, Any]
    operator: str = ""
    refused_on: Mapping[str, str] = field(default_factory=dict[str, str])

    def suits(self, choices: Mapping[str, Any]) -> bool:
        """Return True if no variant of the lowering differs from the choice of a form under the same name in
        `choices`.
        """
        return all(choices.get(name, each) == each for name, each in self.chosen.items())

    def run(self, rule: Rule, captures: Mapping[str, Any]) -> Any:
        """Call the method of `rule` with the choices and those of the `captures` that are its parameters.

        Raises:
            TypeError: the method returned None.
        """
        result = call(getattr(rule, self.method), {**captures, **self.chosen})
        if result is None:
            raise TypeError("it returned nothing; return the tensors that replace the results of the form")
        return result


@dataclass(frozen=True)
class Example:
    """A function in plain torch, with inputs, on which the tests try a rule.

    Attributes:
        name: a label of the variant of code, such as "in float32".
        function: plain torch code.
        inputs: a function from a floating dtype to new inputs.
        refusal: a substring of the reason that a refused example must be given; "" for an example that must match.
        instead: a substring of the name of the form that a refused example, in which the rule fuses less, must match.
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
    """The declaration of one fused operation. Subclasses are frozen and stateless, and answer four questions in order.

    1. what does it mean: `reference`; 2. how is it written: methods marked `@pattern`; 3. when must we refuse: `guard`
    and methods marked `@lookalike`; 4. what does the NPU run: methods marked `@lowering`, best first. Examples are
    declared apart, in the entry point group `fusion.examples`, which only tests load.

    A rule with `opt_in` is off unless the option `opt_in` names it. `aliases` are other names by which users know a
    rule, such as "swiglu": the error about an option that holds an alias suggests the rule's name.
    """

    opt_in: ClassVar[bool] = False
    aliases: ClassVar[tuple[str, ...]] = ()

    @property
    def name(self) -> str:
        """The semantic op as which other rules read a match: the class name in snake case."""
        return _snake_case(type(self).__name__)

    def guard(self) -> None:
        """Refuse a match by `require`; an override declares the captures that it needs as parameters."""

    def remark(self) -> str:
        """Return a remark for the report on a rewritten match; "" for none.

        An override declares captures, `lowering` (the name of the chosen one) and `machine` (the target) as
        parameters; captured tensors are canonical values.
        """
        return ""

    def reference(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the results of the operation in plain torch."""
        raise NotImplementedError

    def patterns(self) -> tuple[Pattern, ...]:
        """Return the forms marked `@pattern`, traced once and memoised."""
        return traced(type(self), tuple(vars(self).items()), "pattern")

    def lookalikes(self) -> tuple[Pattern, ...]:
        """Return the forms marked `@lookalike`, traced once and memoised."""
        return traced(type(self), tuple(vars(self).items()), "lookalike")

    def lowerings(self) -> tuple[Lowering, ...]:
        """List the lowerings in order of declaration, one for each combination of variants."""
        return _lowerings(type(self))

    def readers_of_results(self) -> frozenset[str]:
        """Name the rules that read results of this rule which no node of the model computes, such as absorbed queries.

        Planning finds the matches that read them without these names. Loading a library checks the names, and tests of
        this rule run with the named rules as well.
        """
        return frozenset()

    def within(self) -> frozenset[str]:
        """Name the larger fusions that include this one; their refusals are reported although this rule matched.

        A name is that of a rule, or of a rule and its form, such as "rope.together". An override may declare captures
        as parameters, where the answer depends on the form.
        """
        return frozenset()

    def uses(self) -> frozenset[str]:
        """Return the names of the semantic ops in the rule's patterns and look-alikes."""
        return _used(type(self), tuple(vars(self).items()))


@cache
def _used(kind: type[Rule], state: State) -> frozenset[str]:
    forms = (*traced(kind, state, "pattern"), *traced(kind, state, "lookalike"))
    return frozenset().union(*(form.words for form in forms))


@cache
def _lowerings(kind: type[Rule]) -> tuple[Lowering, ...]:
    return tuple(
        Lowering(
            label,
            name,
            chosen,
            getattr(method, "fusion_calls", "").format(**chosen),
            getattr(method, "fusion_refused", {}),
        )
        for name, method in marked(kind, "lowering")
        for label, chosen in each_variant(name, method)
    )


def ask_guard(rule: Rule, captures: Mapping[str, Any]) -> None:
    """Call the guard of `rule` with those of the `captures` that are its parameters.

    Raises:
        Refused: the guard refuses the match.
        TypeError: the guard returned a value; only `require` refuses.
    """
    answer = call(rule.guard, captures)
    if answer is not None:
        raise TypeError(f"it returned {answer!r}, which refuses nothing; refuse with require(condition, why)")


def call(method: Callable[..., Any], captures: Mapping[str, Any]) -> Any:
    """Call `method` with those of the `captures` that are its parameters; None for a name without a capture.

    A group in `captures` is passed as an instance with the captures of its fields; so is a parameter that is annotated
    with a match record.
    """
    records = records_of(method)
    return method(**{name: _argument(name, captures, records.get(name)) for name in _parameters(method)})


def _argument(name: str, captures: Mapping[str, Any], record: type[Captures] | None = None) -> Any:
    if record is not None:
        return record(**{each.name: _argument(each.name, captures) for each in fields(record)})
    given = captures.get(name)
    return given.bound(name, captures) if is_group(given) else given


def parameters_of(method: Callable[..., Any]) -> tuple[str, ...]:
    """List the names of captures that `method` takes, as parameters or as fields of match records."""
    records = records_of(method)
    named = (
        [each.name for each in fields(records[name])] if name in records else [name] for name in _parameters(method)
    )
    return tuple(chain.from_iterable(named))


def _parameters(method: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(_signature(getattr(method, "__func__", method)))


def records_of(method: Callable[..., Any]) -> Mapping[str, type[Captures]]:
    """Map the parameters of `method` that are annotated with a match record to the class of the record."""
    function = getattr(method, "__func__", method)
    return {name: kind for name, kind in _signature(function).items() if kind is not None}


@cache
def _signature(function: Callable[..., Any]) -> Mapping[str, type[Captures] | None]:
    """Map the parameters of `function` but for `self` to the match record that each is annotated with, or None."""
    given = inspect.signature(function).parameters
    known: Mapping[str, Any] = getattr(function, "__globals__", {})
    kinds = {name: known.get(str(each.annotation), each.annotation) for name, each in given.items() if name != "self"}
    return {
        name: kind if isinstance(kind, type) and issubclass(kind, Captures) else None for name, kind in kinds.items()
    }
