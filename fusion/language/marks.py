"""Marks on the methods of a rule, and which of its methods have one: forms, look-alikes and lowerings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, TypeVar

from fusion.language.groups import is_group

Method = TypeVar("Method", bound=Callable[..., Any])


def _marking(**marks: Any) -> Callable[[Method], Method]:
    """A decorator that leaves these on a method."""

    def mark(method: Method) -> Method:
        for name, each in marks.items():
            setattr(method, f"fusion_{name}", each)
        return method

    return mark


def pattern(method: Method) -> Method:
    """Mark a method as one written form: `def form(self, p, x=tensor("*B D"), eps=scalar())` returns its result(s)."""
    return _marking(role="pattern")(method)


def alternative(method: Method) -> Method:
    """Mark a form that another form may stand for: where that is taken, it is told of only if it would save more."""
    return _marking(alternative=True)(method)


def lookalike(reason: str, apart: tuple[str, ...] = ()) -> Callable[[Method], Method]:
    """Mark a pattern that looks like the rule but means something else.

    `reason` may name its captures in braces; the captures in `apart` must be different values.
    """
    return _marking(role="lookalike", reason=reason, apart=apart)


def lowering(method: Method) -> Method:
    """Mark a method as one way to run the rule: plain torch and `torch.ops.npu` calls on the captured tensors."""
    return _marking(role="lowering")(method)


def variants(**choices: tuple[Any, ...]) -> Callable[[Method], Method]:
    """Mark a lowering, or a form, that takes these parameters beside captures: one for each combination, best first.

    A later combination of a lowering is tried only where the ones before it are refused. Each combination of a form is
    matched for itself; guards and lowerings may ask for what was chosen. A choice may be a kind of `Group`. A lowering
    with a variant of the same name as one of the form is for that choice alone.
    """
    return _marking(variants=choices)


def calls(operator: str) -> Callable[[Method], Method]:
    """Mark a lowering by the one operator that it is for: where that cannot run, other lowerings alone are tried.

    `operator` may name what `variants` chose in braces.
    """
    return _marking(calls=operator)


def refused_on(chip: str, because: str) -> Callable[[Method], Method]:
    """Mark a lowering that does not give on a chip what the rule means, and why."""

    def mark(method: Method) -> Method:
        return _marking(refused={**getattr(method, "fusion_refused", {}), chip: because})(method)

    return mark


def marked(kind: type, role: str) -> list[tuple[str, Callable[..., Any]]]:
    """The methods of a kind of rule with a mark, those of its bases first."""
    methods = [(name, method) for base in kind.__mro__[::-1] for name, method in vars(base).items()]
    return [(name, method) for name, method in methods if getattr(method, "fusion_role", None) == role]


def each_variant(name: str, method: Callable[..., Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The names and choices of a method for each combination of its variants."""
    choices: Mapping[str, tuple[Any, ...]] = getattr(method, "fusion_variants", {})
    for chosen in product(*choices.values()):
        said = ", ".join(each.__name__ if is_group(each) else str(each) for each in chosen)
        yield f"{name}[{said}]" if chosen else name, dict(zip(choices, chosen, strict=True))
