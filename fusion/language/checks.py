"""Checks of the declarations of rules and readers when a library is loaded, before any model is compiled.

Each error names the rule, its method with `file:line`, what is wrong, and what to do.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import fields
from difflib import get_close_matches
from dis import opname
from functools import cache, cached_property, partial
from itertools import pairwise
from types import CodeType, FunctionType, MethodType
from typing import Any

from fusion.errors import RuleError
from fusion.language.captures import Group, is_group
from fusion.language.decorators import marked
from fusion.language.form_tracing import Pattern, place_of
from fusion.language.reader import Library, Word, levels, ordered, require_known
from fusion.language.rule import Rule, lacking, parameters_of
from fusion.language.terms import Operation, Term
from fusion.language.vocabulary import FUNCTIONS

_METHODS = ("guard", "within", "remark", "readers_of_results")
"""Unmarked methods of a rule that are called during a compile."""
_GENERATES = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def check_library(library: Library, elsewhere: Callable[[], Iterable[str]] = tuple) -> None:
    """Check that every word of `library` is given and used with its declared captures, and check each rule by itself.

    `elsewhere` lists rules and words of other installed libraries, for hints in errors.

    Raises:
        RuleError: a declaration is wrong, or dependencies are cyclic.
    """
    words = _Words(library, elsewhere)
    for each in library.readers:
        for name in sorted(each.needs | each.refines):
            words.require_given(lambda each=each: f"reader {each.name} needs", name)
    for rule in library.rules:
        check_rule(rule)
        words.check(rule)
    ordered(library.readers)
    levels(library.rules)


class _Words:
    """The semantic ops of a library with their captures, against which the forms of rules are checked."""

    def __init__(self, library: Library, elsewhere: Callable[[], Iterable[str]]) -> None:
        self._declared: Mapping[str, Word] = library.words()
        self._rules = {rule.name: rule for rule in library.rules}
        self._given = {word for each in library.readers for word in each.gives} | set(self._rules)
        self._taken = {rule.name: _taken(rule) for rule in library.rules}
        self._elsewhere = elsewhere

    def check(self, rule: Rule) -> None:
        """Check the words in the forms of `rule`, their captures, and the rules of `readers_of_results`.

        Raises:
            RuleError: one is unknown.
        """
        for form in (*rule.patterns(), *rule.lookalikes()):
            for name, captures in sorted(form.applied):
                who = partial(_mentions, rule, form, name)
                self.require_given(who, name)
                if name in self._declared:
                    self._declared[name].require(who, captures)
                else:
                    self._require_captures(who, self._rules[name], captures)

        every = {*self._rules, *self._elsewhere()} if rule.readers_of_results() - self._rules.keys() else self._rules
        require_known(
            lambda: f"rule {rule.name} is offered beside", rule.readers_of_results(), every, "which is no rule"
        )

    def require_given(self, who: Callable[[], str], name: str) -> None:
        """Require that a reader or a rule gives the word `name`; `who` begins the message.

        Raises:
            RuleError: none does.
        """
        if name not in self._given and name in self._elsewhere():
            raise RuleError(
                f"loading rules and readers: {who()} {name!r}, which is installed but not among the rules that were "
                "handed over; hand over `fusion.installed() + [...]`"
            )
        require_known(
            who, [name], self._given, "which no rule or reader gives", lambda: {*self._elsewhere(), *FUNCTIONS}
        )

    def _require_captures(self, who: Callable[[], str], rule: Rule, named: Collection[str]) -> None:
        """Require that some match of `rule` can have the captures `named`, which a form uses; `who` begins the message.

        Raises:
            RuleError: none can.
        """
        needed, every = self._taken[rule.name]
        require_known(lambda: f"{who()} {rule.name} of", named, every, "which it never takes")
        if any(each <= set(named) for each in needed):
            return
        takes = " | ".join(dict.fromkeys(", ".join(sorted(each)) for each in needed))
        raise RuleError(
            f"loading rules and readers: {who()} {rule.name} of {', '.join(sorted(named))}, but no match of it takes "
            f"these alone; name all that one of its forms takes: {takes}"
        )


def _taken(rule: Rule) -> tuple[list[frozenset[str]], frozenset[str]]:
    """Return the names of the required captures of each form of `rule`, and the names of all captures of all forms."""
    forms = [{**form.captures, **form.given} for form in rule.patterns()]
    needed = [frozenset(name for name, each in form.items() if not getattr(each, "optional", False)) for form in forms]
    return needed, frozenset().union(*forms)


def _mentions(rule: Rule, form: Pattern, word: str) -> str:
    return f"rule {rule.name} uses, in form {form.name} ({place_of(getattr(rule, form.method), name=word)}),"


@cache
def check_rule(rule: Rule) -> None:
    """Check the class and the methods of `rule`, independently of other rules.

    Raises:
        RuleError: a declaration is wrong.
    """
    _check_class(rule)
    for name in _METHODS:
        _check_method(rule, name)
    for role in ("pattern", "lookalike", "lowering"):
        for name, _ in marked(type(rule), role):
            _check_method(rule, name)
    forms, ways = rule.patterns(), rule.lowerings()
    for form in (*forms, *rule.lookalikes()):
        _check_terms(rule, form)
    for form in rule.lookalikes():
        if missing := lacking(form.reason, {*form.captures, *form.given}):
            raise _fault(rule, form.method, missing)
    captures = {form.name: {*form.captures, *form.given} for form in forms}
    everything = set[str]().union(*captures.values())
    _check_parameters(rule, "guard", everything)
    _check_parameters(rule, "within", everything)
    _check_parameters(rule, "remark", everything | {"lowering", "machine"})
    for way in ways:
        suited = (captures[form.name] for form in forms if way.suits(form.choices))
        _check_parameters(rule, way.method, set(way.chosen).union(*suited))
        _check_result(rule, way.method)
    _check_guard(rule)
    for name, method in _methods(type(rule)):
        _check_texts(rule, name, method)
    for kind in {each for form in forms for each in form.given.values() if is_group(each)}:
        for name, method in _methods(kind):
            _check_texts(rule, f"{kind.__name__}.{name}", method)


def _fault(rule: Rule, method: str, wrong: str, place: str = "") -> RuleError:
    member: Any = getattr(rule, method, None)
    where = f" ({place or place_of(member)})" if place or hasattr(member, "__code__") else ""
    return RuleError(f"checking rule {rule.name}: {type(rule).__name__}{'.' * bool(method)}{method}{where}: {wrong}")


def _check_class(rule: Rule) -> None:
    kind = type(rule)
    if values := sorted(_values(rule) - {each.name for each in fields(rule)}):
        raise _fault(
            rule, values[0], "it is no field of a frozen dataclass; write @dataclass(frozen=True) above the class"
        )
    for role, todo in (("pattern", "it is recognised in no form"), ("lowering", "there is no way to run it")):
        if not marked(kind, role):
            raise _fault(rule, "", f"{todo}; mark a method with @{role}")
    given: Any = rule
    if not isinstance(given.opt_in, bool):
        raise _fault(rule, "opt_in", f"it is {given.opt_in!r}; write True or False")
    if not isinstance(given.aliases, tuple):
        raise _fault(rule, "aliases", f"it is {given.aliases!r}; write a tuple of names")


def _values(rule: Rule) -> set[str]:
    """Return the names that the class of `rule` annotates, and the instance attributes that are no cached property."""
    annotations: Mapping[str, Any] = vars(type(rule)).get("__annotations__", {})
    annotated = {name for name, each in annotations.items() if "ClassVar" not in str(each)}
    memoised = {name for name in vars(rule) if isinstance(getattr(type(rule), name, None), cached_property)}
    return annotated | (vars(rule).keys() - memoised)


def _check_method(rule: Rule, name: str) -> None:
    """Require that the attribute `name` of `rule` is a plain method without *args and **kwargs."""
    method: Any = getattr(rule, name)
    if not isinstance(method, FunctionType | MethodType) or not hasattr(method, "__code__"):
        raise _fault(rule, name, f"it is {method!r}, which is no plain method; write `def {name}(self, ...)`")
    if isinstance(method, MethodType) and method.__self__ is not rule:
        raise _fault(rule, name, "it is a method of the class; write it without @classmethod")
    for each in inspect.signature(method).parameters.values():
        if each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD):
            raise _fault(rule, name, f"its argument {each} names no capture; name each that it takes")


def _check_terms(rule: Rule, form: Pattern) -> None:
    """Require that the operands of all operations in `form` are terms, and that all its terms can be traversed."""
    waiting, seen = list(form.results), set[Term]()
    while waiting:
        term = waiting.pop()
        if term in seen:
            continue
        seen.add(term)
        waiting += [each for each in term.below() if isinstance(each, Term)]
        arguments: tuple[Any, ...] = term.args if isinstance(term, Operation) else ()
        wrong = [each for each in arguments if not isinstance(each, Term)]
        if wrong and isinstance(term, Operation):
            raise _fault(rule, form.method, f"{' or '.join(term.ops)} is applied to {wrong[0]!r}; apply it to tensors")
    try:
        _ = form.needed, form.between, form.applied
    except Exception as error:
        raise _fault(rule, form.method, f"its terms cannot be read: {type(error).__name__}: {error}") from error


def _check_parameters(rule: Rule, method: str, known: Collection[str]) -> None:
    """Require that all parameters of `method` are among the names `known` of captures."""
    for name in parameters_of(getattr(rule, method)):
        if name in known:
            continue
        near = get_close_matches(name, sorted(known), 1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; there are: {', '.join(sorted(known)) or 'none'}"
        raise _fault(rule, method, f"no form captures its argument {name!r}{hint}")


def _check_guard(rule: Rule) -> None:
    """Require that the guard returns no value and does not yield; results of calls are checked by `ask_guard`."""
    code = rule.guard.__code__
    line = next((_line(code, at) for kind, at in _returns(code) if kind == "value"), None)
    if code.co_flags & _GENERATES:
        line = code.co_firstlineno
    if line is not None:
        wrong = "it returns a value, which refuses nothing; refuse with require(condition, why)"
        raise _fault(rule, "guard", wrong, f"{code.co_filename}:{line}")


def _check_result(rule: Rule, method: str) -> None:
    """Require that some return of the lowering `method` is not None."""
    code = getattr(rule, method).__code__
    kinds = {kind for kind, _ in _returns(code)}
    if kinds == {"none"} and not code.co_flags & _GENERATES:
        raise _fault(rule, method, "it returns nothing; return the tensors that replace the results of the form")


def _returns(code: CodeType) -> Iterator[tuple[str, int]]:
    """Yield ("none" | "call" | "value", offset) for each return instruction, by what it returns."""
    steps = [*_steps(code)]
    for (before, its_arg, _), (name, arg, offset) in pairwise(steps):
        if name == "RETURN_CONST":
            yield "none" if code.co_consts[arg] is None else "value", offset
        elif name == "RETURN_VALUE" and before == "LOAD_CONST":
            yield "none" if code.co_consts[its_arg] is None else "value", offset
        elif name == "RETURN_VALUE":
            yield "call" if before.startswith("CALL") else "value", offset


def _steps(code: CodeType) -> Iterator[tuple[str, int, int]]:
    """Yield (name, argument, offset) of each instruction, with extended arguments folded in."""
    high = 0
    for offset in range(0, len(code.co_code), 2):
        name, arg = opname[code.co_code[offset]], high | code.co_code[offset + 1]
        high = arg << 8 if name == "EXTENDED_ARG" else 0
        if name not in ("CACHE", "EXTENDED_ARG"):
            yield name, arg, offset


def _line(code: CodeType, offset: int) -> int:
    return next((line for start, end, line in code.co_lines() if line and start <= offset < end), code.co_firstlineno)


def _check_texts(rule: Rule, name: str, method: FunctionType) -> None:
    """Require that each `require` call in `method`, called `name` in `rule`, passes the fields of its text.

    Without source code nothing is checked here: `require` checks when called.
    """
    wrong, place = _wrong_text(method)
    if wrong:
        raise _fault(rule, name, wrong, place)


@cache
def _wrong_text(method: FunctionType) -> tuple[str, str]:
    """Return the fault of the first wrong `require` text in `method` and its "file:line"; ("", "") if all are right."""
    code = method.__code__
    if "require" not in code.co_names:
        return "", ""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(method)))
    except (OSError, SyntaxError):
        return "", ""
    for call in ast.walk(tree):
        match call:
            case ast.Call(ast.Name("require"), [_, ast.Constant(str(template))], keywords):
                given = {str(each.arg) for each in keywords}
                wrong = "" if None in (each.arg for each in keywords) else lacking(template, given)
                if wrong:
                    return wrong, f"{code.co_filename}:{code.co_firstlineno + call.lineno - 1}"
            case _:
                pass
    return "", ""


def _methods(kind: type) -> Iterator[tuple[str, FunctionType]]:
    """Yield (name, function) for the functions that `kind` and its bases define, but for `Rule` and `Group`."""
    for each in kind.__mro__:
        if each not in (Rule, Group, object):
            yield from ((name, method) for name, method in vars(each).items() if isinstance(method, FunctionType))
