"""A rule declares one fused concept: meaning, written forms, when to refuse, what the NPU runs."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

import torch

from fusion.language.forms import Pattern, traced
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
    """Refuse the match unless `condition` holds; `template` says why not, in the user's terms."""
    if not condition:
        raise Refused(template, values)


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
        return traced(type(self), "pattern")

    def lookalikes(self) -> tuple[Pattern, ...]:
        """The forms that mean something else."""
        return traced(type(self), "lookalike")

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
        """The semantic ops that its patterns mention."""
        return _used(type(self))

    def applies(self) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Each semantic op with what one of its patterns applies it to."""
        for form in (*self.patterns(), *self.lookalikes()):
            yield from form.applied


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


@cache
def _used(kind: type[Rule]) -> frozenset[str]:
    return frozenset(name for name, _ in kind().applies())


def call(method: Callable[..., Any], captures: Mapping[str, Any]) -> Any:
    """Call a guard or a lowering with those captures and groups that it names; what the form lacks is None."""
    return method(**{name: _argument(name, captures) for name in _parameters(getattr(method, "__func__", method))})


def _argument(name: str, captures: Mapping[str, Any]) -> Any:
    given = captures.get(name)
    return given.bound(name, captures) if is_group(given) else given


@cache
def _parameters(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(name for name in inspect.signature(function).parameters if name != "self")
