"""Decorators that mark the methods of a rule as forms, look-alikes or lowerings, and functions that list them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any, TypeVar

from fusion.language.captures import is_group

Method = TypeVar("Method", bound=Callable[..., Any])


def _marking(**marks: Any) -> Callable[[Method], Method]:
    def mark(method: Method) -> Method:
        for name, each in marks.items():
            setattr(method, f"fusion_{name}", each)
        return method

    return mark


def pattern(method: Method) -> Method:
    """Mark a method as one written form: `def form(self, p, x=tensor("*B D"), eps=scalar())` returns its result(s)."""
    return _marking(role="pattern")(method)


def alternative(method: Method) -> Method:
    """Mark a form as an alternative to another form of the rule.

    Where the other form was rewritten, a refusal of the alternative is reported only if it would have saved more.
    """
    return _marking(alternative=True)(method)


def lookalike(reason: str, apart: tuple[str, ...] = ()) -> Callable[[Method], Method]:
    """Mark a form that resembles the rule but means something else: a value that matches is reported with `reason`.

    `reason` may name captures in braces. The captures named in `apart` must be bound to pairwise different values.
    """
    return _marking(role="lookalike", reason=reason, apart=apart)


def lowering(method: Method) -> Method:
    """Mark a method as one way to run the rule: plain torch and `torch.ops.npu` calls on the captured tensors."""
    return _marking(role="lowering")(method)


def variants(**choices: tuple[Any, ...]) -> Callable[[Method], Method]:
    """Expand a lowering or a form into one variant for each combination of `choices` (parameter -> values), best first.

    A later combination of a lowering is tried only where the earlier ones are refused. The combinations of a form are
    matched separately; guards and lowerings may take its choices as parameters. A choice may be a subclass of `Group`.
    A lowering and a form with a variant of the same name are combined only where their choices are equal.
    """
    return _marking(variants=choices)


def calls(operator: str) -> Callable[[Method], Method]:
    """Mark a lowering with the operator that it calls: the lowering is not traced where the compiler does not take it.

    `operator` may name variants in braces. If no lowering of the rule can run, all are traced for their reasons.
    """
    return _marking(calls=operator)


def refused_on(chip: str, because: str) -> Callable[[Method], Method]:
    """Mark a lowering as wrong on `chip`; `because` is the reason that reports give there."""

    def mark(method: Method) -> Method:
        return _marking(refused={**getattr(method, "fusion_refused", {}), chip: because})(method)

    return mark


def marked(kind: type, role: str) -> list[tuple[str, Callable[..., Any]]]:
    """List (name, method) of the methods of the class `kind` that are marked as `role`, those of its bases first."""
    methods = [(name, method) for base in kind.__mro__[::-1] for name, method in vars(base).items()]
    return [(name, method) for name, method in methods if getattr(method, "fusion_role", None) == role]


def each_variant(name: str, method: Callable[..., Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield for each combination of the variants of `method` its label, "name[choice, ...]", and variant -> choice."""
    choices: Mapping[str, tuple[Any, ...]] = getattr(method, "fusion_variants", {})
    for chosen in product(*choices.values()):
        label = ", ".join(each.__name__ if is_group(each) else str(each) for each in chosen)
        yield f"{name}[{label}]" if chosen else name, dict(zip(choices, chosen, strict=True))
