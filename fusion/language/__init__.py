"""The pattern language: rules, the terms that they are written in, and how a term matches a canonical value."""

from fusion.language.captures import Captures, Group, attribute, scalar, tensor
from fusion.language.decorators import alternative, calls, lookalike, lowering, pattern, refused_on, variants
from fusion.language.float16_ranges import bounded, rounding
from fusion.language.form_tracing import Pattern, captured
from fusion.language.reader import Library, Reader, Word, levels, needed, ordered, reader, word
from fusion.language.rule import Example, Lowering, Refused, Rule, ask_guard, call, require
from fusion.language.terms import Bindings, Capture, Term
from fusion.language.word_terms import relied

__all__ = [
    "Bindings",
    "Capture",
    "Captures",
    "Example",
    "Group",
    "Library",
    "Lowering",
    "Pattern",
    "Reader",
    "Refused",
    "Rule",
    "Term",
    "Word",
    "alternative",
    "ask_guard",
    "attribute",
    "bounded",
    "call",
    "calls",
    "captured",
    "levels",
    "lookalike",
    "lowering",
    "needed",
    "ordered",
    "pattern",
    "reader",
    "refused_on",
    "relied",
    "require",
    "rounding",
    "scalar",
    "tensor",
    "variants",
    "word",
]
