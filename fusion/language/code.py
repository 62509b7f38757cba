"""Keys of code, for caches between compilations: two states of rules and readers that may differ have different keys.

A package is digested by its files. A rule that no module of a package names, such as one of a console, of a script or
with fields of its own, is digested by its code objects and all values that they read.
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

MOST = 2**17
"""Values that are visited for one key."""
LARGEST = 2**24
"""Bytes of a tensor whose numbers are part of a key."""


def files_of(library: Library) -> str:
    """Digest every file of this package and of the packages that `library` is from."""
    kinds = [*map(type, library.rules), *(each.read for each in library.readers)]
    packages = {_package(kind.__module__) for kind in kinds} | {"fusion"}
    return " ".join(f"{each} {_files(each)}" for each in sorted(packages) if _is_package(each))


loaded = cache(files_of)
"""Digest of the files as they were when first asked for: of the code which runs."""


def key_of(given: Rule | Reader) -> str | None:
    """Key a rule or a reader beside `files_of`: its name, and its code where no file of a package tells all of it.

    Returns:
        The key; None where something that the code reads has no text that is the same in every process.
    """
    kind: Any = given.read if isinstance(given, Reader) else type(given)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if _is_in_package(given, kind):
        return name
    try:
        return f"{name} {digest_of(given)}"
    except UnkeyedError:
        return None


def keys_of(library: Library) -> str | None:
    """Key all rules and readers of `library`, in any order; None where one has no key."""
    keys = [key_of(each) for each in (*library.rules, *library.readers)]
    return None if None in keys else " ".join(sorted(filter(None, keys)))


def _is_in_package(given: Rule | Reader, kind: Any) -> bool:
    """True if a module of a package names `given`, or its class, and it holds no values of its own."""
    module, named = sys.modules.get(kind.__module__), given if isinstance(given, Reader) else kind
    alone = isinstance(given, Reader) or not vars(given)
    return _is_package(_package(kind.__module__)) and alone and getattr(module, kind.__qualname__, None) is named


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
    """Raised for a value that has no text which is the same in every process."""


def digest_of(value: Any) -> str:
    """Digest `value` with all code and values that it consists of, or reads as globals or from closures.

    Raises:
        UnkeyedError: one of them is of one process alone, as a lock is, or too large.
    """
    walk = _Walk()
    walk.visit(value)
    return walk.digest.hexdigest()


def names_read(value: Any) -> frozenset[str]:
    """List the names of globals and attributes that `value` reads, with those of all functions that it calls."""
    walk = _Walk()
    walk.visit(value)
    return frozenset(walk.names)


_PLAIN = (
    bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.dtype, torch.device, torch.layout,
    torch.memory_format, OpOverload, OpOverloadPacket,
)  # fmt: skip
_CONSTANTS = tuple, frozenset, CodeType
"""Types of constants: equal ones may be one object or several, as code is compiled or loaded from a cached file."""
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
"""Attributes of a class that follow from its others, or do not change what its code does."""


class _Walk:
    """Walk over a value and its parts, each once, in an order that is the same in every process."""

    def __init__(self) -> None:
        self.digest, self.names, self._visited = hashlib.sha256(), set[str](), 0
        self._seen: dict[int, tuple[int, Any]] = {}  # with the value, whose id is unique only while it lives

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
        """Take `value` apart: a text, and the values that it consists of."""
        match value:
            case CodeType():
                return "code", self._of_code(value)
            case ModuleType():
                return f"module {value.__name__}", ()
            case FunctionType() | type() if _is_foreign(value):
                return f"{value.__module__}.{value.__qualname__}", ()
            case FunctionType():
                return "function", self._of_function(value)
            case type():
                named = [each for name in sorted(vars(value).keys() - _IGNORED) for each in (name, vars(value)[name])]
                return f"class {value.__qualname__}", (*value.__bases__, *named)
            case Reader():  # which pickles as a name
                return "reader", [getattr(value, each.name) for each in fields(value)]
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
                return self._of_object(value)

    def _of_code(self, code: CodeType) -> Sequence[Any]:
        self.names.update(code.co_names, (each for each in code.co_consts if isinstance(each, str)))
        counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
        names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
        return *counts, *names, code.co_code, code.co_exceptiontable, code.co_consts

    def _of_function(self, function: FunctionType) -> Sequence[Any]:
        cells = [_content(each) for each in function.__closure__ or ()]
        own = function.__code__, function.__defaults__, function.__kwdefaults__, vars(function)
        return *own, cells, [*_globals_read(function)]

    def _of_object(self, value: Any) -> tuple[str, Sequence[Any]]:
        """Take an object apart as pickling does; a function of C by its name, a memoised function by what it wraps."""
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
"""Folders of Python itself and of this package."""


@cache
def _is_installed(file: str) -> bool:
    """True if a file of code is of Python itself, of this package or of an installed one."""
    path = Path(file)
    return (
        file.startswith("<frozen ")
        or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
        or any(map(path.is_relative_to, _INSTALLED))
    )


def _is_foreign(value: ModuleType | FunctionType | type) -> bool:
    """True if the name of `value` identifies its code: an installed module holds it under that name."""
    if isinstance(value, FunctionType):
        return _is_installed(value.__code__.co_filename)
    module: Any = value if isinstance(value, ModuleType) else sys.modules.get(value.__module__)
    if isinstance(value, type) and value.__flags__ & _MADE_AT_RUNTIME and not _names(module, value):
        return False
    file = getattr(module, "__file__", None)
    return module is not None and (_is_installed(file) if file else module.__name__ in sys.builtin_module_names)


def _names(module: Any, kind: Any) -> bool:
    """True if the qualified name of a class or function leads to it from `module`."""
    return reduce(lambda owner, name: getattr(owner, name, None), kind.__qualname__.split("."), module) is kind


_MADE_AT_RUNTIME = 1 << 9
"""Py_TPFLAGS_HEAPTYPE: classes without it are parts of Python or of an extension in C."""


def _globals_read(function: FunctionType) -> Iterator[Any]:
    """Yield each global that `function` may read, with its value; for a module of the user its attributes likewise."""
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
    except ValueError:  # not yet filled
        return "empty"


def _numbers(x: torch.Tensor) -> bytes:
    if isinstance(x, FakeTensor) or x.is_meta or x.layout is not torch.strided or x.nbytes > LARGEST:
        raise UnkeyedError
    with without_fakes():
        return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
