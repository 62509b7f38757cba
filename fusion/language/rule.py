"""A rule declares one fused concept: meaning, written forms, when to refuse, what the NPU runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from functools import cache
from string import Formatter
from typing import Any, ClassVar

import torch

from fusion.language.forms import Pattern, State, traced
from fusion.language.groups import is_group
from fusion.language.marks import each_variant, marked


class Refused(Exception):  # noqa: N818 - a decision, not an error
    """Raised by `require`: this match is not to be rewritten, and why."""

    def __init__(self, template: str, values: Mapping[str, object]) -> None:
        self.template, self.values = template, values

    def __str__(self) -> str:
        """The reason, formatted only when someone reads it."""
        return self.template.format(**self.values)


def require(condition: object, template: str, **values: object) -> None:
    """Refuse the match unless `condition` holds; `template` says why not, in the user's terms.

    Raises:
        Refused: `condition` does not hold.
        TypeError: `template` names a field that is not among `values`.
    """
    if condition:
        return
    if missing := lacking(template, values):
        raise TypeError(missing)
    raise Refused(template, values)


def lacking(template: str, given: Container[str]) -> str:
    """Say which field of `template` is not among the names `given`, "" where none is."""
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
        """Run the method of `rule` on what it takes of `captures`.

        Raises:
            TypeError: it returned nothing.
        """
        result = call(getattr(rule, self.method), {**captures, **self.chosen})
        if result is None:
            raise TypeError("it returned nothing; return the tensors that replace the results of the form")
        return result


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

    A rule that is `opt_in` is off, and costs nothing, unless the option of that name names it. `aliases` are other
    names by which users know a rule, such as "swiglu": an option with one of them is answered with the rule's name.
    """

    opt_in: ClassVar[bool] = False
    aliases: ClassVar[tuple[str, ...]] = ()

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
        """Trace the written forms, once."""
        return traced(type(self), tuple(vars(self).items()), "pattern")

    def lookalikes(self) -> tuple[Pattern, ...]:
        """Trace the forms that mean something else, once."""
        return traced(type(self), tuple(vars(self).items()), "lookalike")

    def lowerings(self) -> tuple[Lowering, ...]:
        """The ways to run the rule, in order of declaration."""
        return _lowerings(type(self))

    def beside(self) -> frozenset[str]:
        """Names of rules that read what this one gives and no node holds: it is offered together with one of them."""
        return frozenset()

    def within(self) -> frozenset[str]:
        """Names of the larger fusions of which this one is a part: why those did not happen is told beside it.

        A name is that of a rule, or of one of its forms, as `rope.together`. It takes any of the captures by name,
        where forms are parts of different ones.
        """
        return frozenset()

    def uses(self) -> frozenset[str]:
        """List the semantic ops that its patterns mention."""
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
    """Let the guard of `rule` look at `captures`.

    Raises:
        Refused: the match is not to be rewritten.
        TypeError: the guard returned something, which refuses nothing.
    """
    answer = call(rule.guard, captures)
    if answer is not None:
        raise TypeError(f"it returned {answer!r}, which refuses nothing; refuse with require(condition, why)")


def call(method: Callable[..., Any], captures: Mapping[str, Any]) -> Any:
    """Call a guard or a lowering with those captures and groups that it names; what the form lacks is None."""
    return method(**{name: _argument(name, captures) for name in parameters_of(getattr(method, "__func__", method))})


def _argument(name: str, captures: Mapping[str, Any]) -> Any:
    given = captures.get(name)
    return given.bound(name, captures) if is_group(given) else given


@cache
def parameters_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """List the parameters of a method that captures are given to."""
    return tuple(name for name in inspect.signature(function).parameters if name != "self")
