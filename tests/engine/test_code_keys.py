"""Keys of code: equal in every process, and others for whatever changes what a rule does."""

from __future__ import annotations

import marshal
import pickle
import sys
import threading
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import fusion
from fusion import FusionBackend, FusionPass, Library
from fusion.language.cache_keys import UnkeyedError, digest_of, key_of, keys_of, names_read
from fusion.language.reader import Reader

from ..support.child import child
from .graphs import numbers
from .kept_files import later

pytestmark = pytest.mark.usefixtures("empty")

RULE = '''
import functools
from dataclasses import dataclass
import torch
from fusion import Rule, lowering, pattern, scalar, tensor, require

SCALE = {scale}
TABLE = torch.tensor([{entry}, 2])
NAMES = {names}


def twice(x, by={default}):
    return x * by


@functools.cache
def cached(x):
    return x {operator} 1


class Helper:
    base = {base}

    def apply(self, x):
        return [each for each in (x, {nested})][0]


def closed(number):
    return lambda x: x + number


add = closed({number})


@dataclass(frozen=True)
class Mine(Rule):
    """y = exp(x) · 2."""

    @pattern
    def written(self, p, x=tensor("*B D"), factor=scalar()):
        """Written."""
        return p.scale(p.op("{op}", x), factor)

    def guard(self, factor):
        """Only one."""
        require(factor == {factor}, "another")

    @lowering
    def run(self, x):
        """Run."""
        y = twice(Helper().apply(1)) * SCALE * len(NAMES) + TABLE.dim() + cached(1)
        return torch.ops.aten.pow.Scalar(float(add(y) + (lambda z: z {inner} 2)(1)), x)
'''
FIRST = {
    "scale": "1", "entry": "1", "names": "{'a', 'b'}", "default": "1", "operator": "+", "base": "0", "nested": "1",
    "number": "1", "op": "exp", "factor": "2", "inner": "*",
}  # fmt: skip
CHANGES = {
    "scale": "2", "entry": "3", "names": "{'a', 'c'}", "default": "2", "operator": "-", "base": "1", "nested": "2",
    "number": "2", "op": "sin", "factor": "3", "inner": "+",
}  # fmt: skip
"""Changes of the text of a rule, by what is changed: a global, a tensor, a set, a default, memoised code, a class,
nested code, a closure, a form, a guard, a lambda."""


def made(module: str | None = "console", before: str = "", **changes: str) -> Any:
    """Make the rule where no file is, as a console does."""
    names: dict[str, Any] = {} if module is None else {"__name__": module}
    text = RULE
    for name, value in {**FIRST, **changes}.items():
        text = text.replace(f"{{{name}}}", value)
    exec(before + text, names)
    return names["Mine"]()


def test_equal_code_has_one_key_wherever_it_is_made():
    keys = [key_of(made(before=before)) for before in ("", "\n\n# another line\n")]
    assert keys[0] is not None
    assert keys[0] == keys[1]


@pytest.mark.parametrize("module", ["console", "__main__", None])
@pytest.mark.parametrize("change", CHANGES)
def test_each_change_of_what_the_code_reads_is_another_key(change: str, module: str | None):
    first, second = key_of(made(module)), key_of(made(module, **{change: CHANGES[change]}))
    assert first is not None
    assert second is not None
    assert first != second


KEY = """
    import sys
    sys.path.insert(0, {path!r})
    from tests.engine.test_code_keys import made
    from fusion.language.cache_keys import key_of
    print(key_of(made()))
"""


@pytest.mark.rotates(8)
def test_a_key_is_the_same_in_every_process():
    path = str(Path(__file__).parents[2])
    assert child(KEY.format(path=path), PYTHONHASHSEED="7").stdout == f"{key_of(made())}\n"


CODE = """
PAIR = (1, 2), (1, 2)

def read(x, by=(1, 2)):
    add = (lambda y: y + 300000), (lambda y: y + 300000)
    return x in {"a", "b"} or x in (1, 2) and (1, 2) == by == PAIR[0] or add[0](x)
"""


def read_of(code: Any) -> Any:
    names: dict[str, Any] = {"__name__": "console"}
    exec(code, names)
    return names["read"]


def test_a_key_is_the_same_for_code_that_is_compiled_loaded_or_hot():
    """Cached files and compilers share equal constants differently, and Python rewrites code that runs often."""
    compiled = compile(CODE, "a", "exec")
    fresh, loaded = read_of(compiled), read_of(marshal.loads(marshal.dumps(compiled)))
    key = digest_of(fresh)
    assert digest_of(loaded) == key
    for number in range(5000):
        fresh(number)
    assert digest_of(fresh) == key
    fresh.__globals__["PAIR"] = tuple(map(tuple, ([1, 2], [1, 2])))  # two objects
    assert digest_of(fresh) == key


def test_a_key_tells_subclasses_of_the_types_of_python_from_them():
    def made_of(body: str) -> Any:
        return read_of(f"class Own(list):\n  def first(self): return {body}\ndef read(x): return Own(x).first()")

    assert digest_of(made_of("1")) == digest_of(made_of("1")) != digest_of(made_of("2"))
    kinds: Any = ([1], Counter(a=1), defaultdict(list), Pair(1, 2), Mode.ON, torch.Size([1, 2]), torch.ops.aten.exp2)
    assert len({digest_of(each) for each in (*kinds, (1, 2), {"a": 1}, 1)}) == len(kinds) + 3


class Mode(IntEnum):
    ON = 1


class Pair(NamedTuple):
    one: int
    two: int


def test_a_memoised_attribute_is_read_as_its_function():
    def memoised(number: int) -> Any:
        return type("Own", (), {"each": cached_property(lambda self: number)})

    assert digest_of(memoised(1)) == digest_of(memoised(1)) != digest_of(memoised(2))


def test_a_global_that_changes_later_is_another_key():
    rule = made()
    before = key_of(rule)
    type(rule).run.__globals__["SCALE"] = 7
    assert key_of(rule) != before


def test_a_module_of_the_user_is_read_as_far_as_the_code_reads_it(monkeypatch: pytest.MonkeyPatch):
    module = ModuleType("their_numbers")
    module.used, module.other = 1, 1  # type: ignore[attr-defined]
    names: dict[str, Any] = {"__name__": "console", "their_numbers": module}
    exec("def read(x): return x + their_numbers.used", names)
    before = digest_of(names["read"])
    module.other = 2  # type: ignore[attr-defined]
    assert digest_of(names["read"]) == before
    module.used = 2  # type: ignore[attr-defined]
    assert digest_of(names["read"]) != before


def test_installed_rules_and_readers_are_told_by_their_files():
    keys = keys_of(fusion.installed())
    assert keys is not None
    assert "patterns.norm.rms_norm.RMSNorm" in keys.split()
    assert len(keys.split()) == len(fusion.installed().rules) + len(fusion.installed().readers)


def test_a_reader_that_a_function_makes_is_told_by_its_code():
    def reading(number: int) -> Reader:
        def read(graph: Any) -> Any:
            return iter(() * number)

        return fusion.reader(gives=("a",))(read)

    assert key_of(reading(1)) == key_of(reading(1)) != key_of(reading(2))


def test_a_reader_of_a_module_that_is_no_package_is_told_by_its_code(monkeypatch: pytest.MonkeyPatch):
    def of_module(text: str) -> Reader:
        module = ModuleType("their_readers")
        monkeypatch.setitem(sys.modules, "their_readers", module)
        exec(f"import fusion\n@fusion.reader(gives=('a',))\ndef found(graph): {text}", vars(module))
        return module.found  # type: ignore[no-any-return]

    first = of_module("yield from ()")
    assert pickle.loads(pickle.dumps(first)) is first
    assert key_of(first) == key_of(of_module("yield from ()")) != key_of(of_module("return iter(())"))


@pytest.mark.parametrize("value", [threading.Lock(), (each for each in ()), torch.empty(2, device="meta")], ids=type)
def test_what_is_of_this_process_alone_has_no_key(value: Any):
    with pytest.raises(UnkeyedError):
        digest_of({"held": [value]})


def test_a_pass_with_a_rule_without_a_key_has_no_key_either():
    rule = made()
    type(rule).run.__globals__["SCALE"] = threading.Lock()
    assert key_of(rule) is None
    assert FusionPass({"target": "host"}, [rule]).uuid() is None
    assert FusionPass({"target": "host"}, [made()]).uuid() != FusionPass({"target": "host"}, [made(scale="2")]).uuid()


def test_names_are_read_in_all_functions_that_are_called():
    assert {"pow", "their", "cumsum"} & names_read(type(made(nested="x.cumsum(0)"))) == {"pow", "cumsum"}


# what is kept --------------------------------------------------------------------------------------------------------


def fused(rule: Any, where: str, function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    torch.compiler.reset()
    backend = FusionBackend({"target": "host", "lower": "eager", "plan_cache": where}, Library((rule,)))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        return torch.compile(function, backend=backend)(x)


@pytest.mark.rotates(6)
@pytest.mark.parametrize("where", ["off", "memory", "disk"])
def test_a_rule_without_a_source_file_runs_by_its_own_body(where: str):
    x = numbers(2, 64)
    for change in ({}, {"scale": "2"}, {"number": "3"}, {"base": "5"}, {"default": "3"}, {}):
        rule = made(**change)
        for _ in range(2):
            got = fused(rule, where, lambda x: x.exp() * 2, x)
            torch.testing.assert_close(got, type(rule).run(rule, x))
        if where == "disk":
            later()
