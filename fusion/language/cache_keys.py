"""Cache keys of rules and readers: whatever may change what they do changes their keys.

Rules of a package are covered by a digest of its files. A rule from a console or script, or with fields, gets a digest
of its code objects and of all values that they read.
"""

from __future__ import annotations

import copyreg
import hashlib
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache, cached_property, reduce
from itertools import chain
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

from fusion._torch.fakes import FakeTensor, without_fakes
from fusion._torch.operators import OpOverload, OpOverloadPacket
from fusion.language.reader import Library, Reader
from fusion.language.rule import Rule
from fusion.operators import Operator

MOST = 2**17
"""Limit on the values that are visited for one key."""
LARGEST = 2**24
"""Limit on the bytes of a tensor whose elements enter a key."""


def files_of(library: Library) -> str:
    """Hash all Python files of this package and of the packages that define `library`; "package digest" for each."""
    kinds = [_code_of(each) for each in (*library.rules, *library.readers, *library.operators)]
    packages = {_package(kind.__module__) for kind in kinds} | {"fusion"}
    return " ".join(f"{each} {_files(each)}" for each in sorted(packages) if _is_package(each))


loaded = cache(files_of)
"""`files_of` memoised at its first call, when the files are still those of the code that runs."""


def _code_of(given: Rule | Reader | Operator) -> Any:
    """Return the class of a rule, the function of a reader, or the decomposition of an operator."""
    if isinstance(given, Operator):
        return given.compute
    return given.read if isinstance(given, Reader) else type(given)


def key_of(given: Rule | Reader | Operator) -> str | None:
    """Return the key of a part of a library, to be used with `files_of`.

    Returns:
        Its qualified name, followed by `digest_of` if the files of a package do not define it entirely; None if it
        depends on a value without a representation that is equal in every process.
    """
    kind = _code_of(given)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if _is_in_package(given, kind):
        return name
    try:
        return f"{name} {digest_of(given)}"
    except UnkeyedError:
        return None


def keys_of(library: Library) -> str | None:
    """Join the keys of all parts of `library`, sorted; None if one has no key."""
    keys = [key_of(each) for each in (*library.rules, *library.readers, *library.operators)]
    return None if None in keys else " ".join(sorted(filter(None, keys)))


def _is_in_package(given: Rule | Reader | Operator, kind: Any) -> bool:
    """Return True if `given`, or the class of a rule without fields, is a global of a module of a package."""
    module = sys.modules.get(kind.__module__)
    if module is None or not _is_package(_package(kind.__module__)):
        return False
    if isinstance(given, Operator):
        return any(each is given for each in vars(module).values())
    named, alone = (given, True) if isinstance(given, Reader) else (kind, not vars(given))
    return alone and getattr(module, kind.__qualname__, None) is named


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_package(name: str) -> bool:
    return hasattr(sys.modules.get(name), "__path__")


def _files(package: str) -> str:
    folders = [Path(each) for each in sys.modules[package].__path__]
    digest = hashlib.sha256()
    for each in chain.from_iterable(sorted(folder.rglob("*.py")) for folder in folders):
        digest.update(each.read_bytes())
    return digest.hexdigest()


class UnkeyedError(Exception):
    """Raised for a value without a representation that is equal in every process, or that is too large."""


def digest_of(value: Any) -> str:
    """Hash `value` and, recursively, its parts and all code, globals and closure cells that its functions read.

    Raises:
        UnkeyedError: one of them is bound to one process, such as a lock, or too large.
    """
    walk = _Walk()
    walk.visit(value)
    return walk.digest.hexdigest()


def names_read(value: Any) -> frozenset[str]:
    """Return the global and attribute names and the string constants in the code of `value` and of all it refers to."""
    walk = _Walk()
    walk.visit(value)
    return frozenset(walk.names)


_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout,
    torch.memory_format, OpOverload, OpOverloadPacket,
)  # fmt: skip
_CONSTANTS = tuple, frozenset, CodeType
"""Types of which equal constants may be one object or several, depending on whether code was compiled or loaded."""
_IGNORED = frozenset(
    (
        "__dict__",
        "__weakref__",
        "__module__",
        "__doc__",
        "__annotations__",
        "__dataclass_fields__",
        "_abc_impl",
        "__firstlineno__",
        "__static_attributes__",
    )
)
"""Attributes of a class that follow from its other attributes, or do not change its behaviour."""


class _Walk:
    """A hash over a value and, recursively, its parts, each visited once, in an order equal in every process."""

    def __init__(self) -> None:
        self.digest, self.names, self._visited = hashlib.sha256(), set[str](), 0
        self._seen: dict[int, tuple[int, Any]] = {}  # keeps each value alive: ids are unique only among live objects

    def visit(self, value: Any) -> None:
        waiting = [value]
        while waiting:
            each = waiting.pop()
            if type(each) in _PLAIN:
                self._write(type(each).__name__, repr(each))
            elif id(each) in self._seen:
                self._write("seen", str(self._seen[id(each)][0]))
            else:
                self._count()
                if not isinstance(each, _CONSTANTS):
                    self._seen[id(each)] = len(self._seen), each
                text, parts = self._parts(each)
                self._write(text, str(len(parts)))
                waiting.extend(reversed(parts))

    def _count(self) -> None:
        self._visited += 1
        if self._visited > MOST:
            raise UnkeyedError

    def _write(self, *texts: str) -> None:
        for each in texts:
            self.digest.update(f"{len(each)} {each};".encode())

    def _parts(self, value: Any) -> tuple[str, Sequence[Any]]:
        """Split `value` into a text that describes it and the values that it consists of."""
        match value:
            case CodeType():
                return "code", self._code_parts(value)
            case ModuleType():
                return f"module {value.__name__}", ()
            case FunctionType() | type() if _is_foreign(value):
                return f"{value.__module__}.{value.__qualname__}", ()
            case FunctionType():
                return "function", self._function_parts(value)
            case type():
                named = [each for name in sorted(vars(value).keys() - _IGNORED) for each in (name, vars(value)[name])]
                return f"class {value.__qualname__}", (*value.__bases__, *named)
            case Reader() | Operator():  # a reader would pickle as its name alone, an operator with what it memoises
                return type(value).__name__, [getattr(value, each.name) for each in fields(value)]
            case MethodType():
                return "method", (value.__func__, value.__self__)
            case staticmethod() | classmethod():
                return type(value).__name__, (value.__func__,)
            case property():
                return "property", (value.fget, value.fset, value.fdel)
            case cached_property():
                return "cached property", (value.func,)
            case tuple() | list() if type(value) in (tuple, list):
                return type(value).__name__, value
            case dict() if type(value) is dict:
                return "dict", [*chain.from_iterable(value.items())]
            case set() | frozenset() if type(value) in (set, frozenset):
                return type(value).__name__, sorted(map(digest_of, value))
            case torch.Tensor():
                return "tensor", (value.dtype, tuple(value.shape), _numbers(value))
            case _:
                return self._object_parts(value)

    def _code_parts(self, code: CodeType) -> Sequence[Any]:
        self.names.update(code.co_names, (each for each in code.co_consts if isinstance(each, str)))
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        return *counts, *names, code.co_code, code.co_exceptiontable, code.co_consts

    def _function_parts(self, function: FunctionType) -> Sequence[Any]:
        cells = [_content(each) for each in function.__closure__ or ()]
        own = function.__code__, function.__defaults__, function.__kwdefaults__, vars(function)
        return *own, cells, [*_globals_read(function)]

    def _object_parts(self, value: Any) -> tuple[str, Sequence[Any]]:
        """Split an object by its `__reduce_ex__`; a builtin by its name and `self`, a wrapper into what it wraps."""
        if hasattr(value, "__wrapped__"):
            return "wrapper", (value.__wrapped__,)
        if isinstance(value, BuiltinFunctionType):
            return f"{value.__module__}.{value.__qualname__}", (value.__self__,)
        reducer: Any = copyreg.dispatch_table.get(type(value))
        try:
            reduced = reducer(value) if reducer else value.__reduce_ex__(4)
        except Exception as error:
            raise UnkeyedError from error
        if isinstance(reduced, str):
            return reduced, ()
        made, arguments, *more = reduced
        state = [each if number == 0 else list(each) for number, each in enumerate(more[:3]) if each is not None]
        return "object", (type(value), made, arguments, state)


_INSTALLED = Path(sysconfig.get_path("stdlib")), Path(__file__).parents[1]
"""Folders of the standard library and of this package."""


@cache
def _is_installed(file: str) -> bool:
    """Return True if the source file `file` belongs to the standard library, this package or an installed package."""
    path = Path(file)
    return (
        file.startswith("<frozen ")
        or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
        or any(map(path.is_relative_to, _INSTALLED))
    )


def _is_foreign(value: ModuleType | FunctionType | type) -> bool:
    """Return True if the qualified name of `value` identifies its code, as an installed module defines it."""
    if isinstance(value, FunctionType):
        return _is_installed(value.__code__.co_filename)
    module: Any = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__)
    if isinstance(value, type) and value.__flags__ & _MADE_AT_RUNTIME and not _resolves(module, value):
        return False
    file = getattr(module, "__file__", None)
    return module is not None and (_is_installed(file) if file else module.__name__ in sys.builtin_module_names)


def _resolves(module: Any, kind: Any) -> bool:
    """Return True if the qualified name of the class or function `kind`, resolved in `module`, is `kind`."""
    return reduce(lambda owner, name: getattr(owner, name, None), kind.__qualname__.split("."), module) is kind


_MADE_AT_RUNTIME = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: classes without the flag are defined statically in C."""


def _globals_read(function: FunctionType) -> Iterator[Any]:
    """Yield name and value of each global that `function` may read; after a module of the user also its attributes."""
    names = sorted(_names_in(function.__code__))
    for name in names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        yield name
        yield value
        if isinstance(value, ModuleType) and not _is_foreign(value):
            yield [part for each in names if each in vars(value) for part in (each, vars(value)[each])]


def _names_in(code: CodeType) -> set[str]:
    nested = (each for each in code.co_consts if isinstance(each, CodeType))
    return set(code.co_names).union(*map(_names_in, nested))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # raised for an empty cell
        return "empty"


def _numbers(x: torch.Tensor) -> bytes:
    if isinstance(x, FakeTensor) or x.is_meta or x.layout is not torch.strided or x.nbytes > LARGEST:
        raise UnkeyedError
    with without_fakes():
        return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
