"""Python objects and models that are named on the command line."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fusion._torch.fakes import unlogged
from fusion.errors import OptionError
from fusion.frontend import hf

_DTYPES = {
    **hf.DTYPES, "f64": torch.float64, "i8": torch.int8, "u8": torch.uint8, "i32": torch.int32, "i64": torch.int64,
    "bool": torch.bool,
}  # fmt: skip
_INPUT = re.compile(r"(?:(?P<name>\w+)=)?(?P<dtype>\w+)\[(?P<shape>[\d,\s]*)\]")


def loaded(place: str, doing: str) -> Any:
    """Return the object that `place` names: package.module:attribute or path/to/file.py:attribute.

    Raises:
        OptionError: there is no such module or attribute; `doing` begins the message.
    """
    module, _, name = (f"{place}:" if place.endswith(".py") else place).rpartition(":")
    if not module or (not name and not module.endswith(".py")):
        raise OptionError(
            f"{doing}: it is no model type, module or file; write hf:<model type>, package.module:factory, "
            "path/to/file.py:factory or program.pt2"
        )
    made = _file_module(Path(module), doing) if module.endswith(".py") else _package_module(module, doing)
    if name and hasattr(made, name):
        return getattr(made, name)
    own = [key for key, value in vars(made).items() if _is_own(value, made)]
    defined = f"it defines {', '.join(own) or 'nothing'}"
    if not name:
        raise OptionError(f"{doing}: it names no function or class of the file; {defined}: write {module}:NAME")
    near = [f"did you mean {each!r}? " for each in difflib.get_close_matches(name, own, n=1)]
    raise OptionError(f"{doing}: module {module!r} has no callable {name!r}; {''.join(near)}{defined}")


def _is_own(value: object, module: ModuleType) -> bool:
    return callable(value) and getattr(value, "__module__", "") == module.__name__


def _package_module(module: str, doing: str) -> ModuleType:
    sys.path.insert(0, "")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        hint = "start in the folder that holds it, install it, or name its file: path/to/file.py:name"
        raise OptionError(f"{doing}: there is no module {error.name!r}; {hint}") from error
    except Exception as error:
        raise _unusable(module, error, doing) from error
    finally:
        sys.path.remove("")


def _file_module(path: Path, doing: str) -> ModuleType:
    """Import a file as a module of its name, with its folder on the path, as `python file.py` has it."""
    if not path.is_file():
        raise OptionError(f"{doing}: there is no file {str(path)!r}; name one by its path from this folder")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # of the code of the file
        raise _unusable(str(path), error, doing) from error
    return module


def _unusable(name: str, error: Exception, doing: str) -> OptionError:
    """Describe the `error` that importing the module or file `name` raised, with the line of that file."""
    steps = [each for each in traceback.extract_tb(error.__traceback__) if Path(each.filename).name == Path(name).name]
    at = f" at {name}:{steps[-1].lineno}" if steps else ""
    return OptionError(
        f"{doing}: {name} cannot be imported ({type(error).__name__}: {error}){at}; mend it so that `python` imports it"
    )


def call_of(model: str, inputs: Sequence[str] = ()) -> hf.Call:
    """Return the call of the model that `model` names: a function, a class of modules, or a file of torch.export.

    A function without required parameters is a factory: it is called, and returns the model, with its arguments if it
    takes any. One with required parameters is the model, if `inputs` give these. A class of modules is constructed.

    Args:
        model: module:name, file.py:name, or the path of a program.
        inputs: the arguments of the call, each as [NAME=]DTYPE[SHAPE]; empty for those that the factory returns.

    Raises:
        OptionError: the model cannot be loaded, or its arguments are missing.
    """
    doing = f"explaining {model}"
    if model.endswith(".pt2"):
        return _exported(model, inputs, doing)
    args, kwargs = _inputs(inputs, doing)
    made = loaded(model, doing)
    if not callable(made):
        raise OptionError(f"{doing}: {made!r} is no callable; name a function that returns the model")
    is_class = isinstance(made, type) and issubclass(made, nn.Module)
    required = [] if isinstance(made, nn.Module) else _required(made)
    if is_class and required:
        raise OptionError(
            f"{doing}: its constructor requires {', '.join(required)}; name a function that returns the model: "
            f"def build(): return {made.__name__}(...), (args of forward)"
        )
    if required and not inputs:
        raise OptionError(
            f"{doing}: it requires {', '.join(required)}; a factory takes no arguments: write "
            f"def build(): return {getattr(made, '__name__', 'model')}, ({', '.join(required)},), or give them by "
            f"--input {required[0]}=bf16[2,16,256]"
        )
    is_model = isinstance(made, nn.Module) or bool(required)
    call = hf.Call(made, {}) if is_model else _checked(made(), doing)
    return _complete(hf.Call(call.model, kwargs, args=args) if inputs else call, doing)


def _exported(path: str, inputs: Sequence[str], doing: str) -> hf.Call:
    if inputs:
        raise OptionError(f"{doing}: a program of torch.export has its inputs; leave --input out")
    if not Path(path).is_file():
        raise OptionError(f"{doing}: there is no file {path!r}; torch.export.save(program, {path!r}) writes it")
    try:
        with unlogged("torch.export"):  # torch logs the traceback of each format that it tries
            return hf.Call(torch.export.load(path), {})
    except Exception as error:  # whatever the file holds
        raise OptionError(
            f"{doing}: it is no program of torch.export ({type(error).__name__}: {error}); write it by "
            "torch.export.save, with this version of torch"
        ) from error


def _required(made: Any) -> list[str]:
    """List the names of the parameters of a callable that have no default; none where it has no signature."""
    try:
        parameters = inspect.signature(made).parameters.values()
    except (TypeError, ValueError):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]


def _checked(returned: Any, doing: str) -> hf.Call:
    parts: tuple[Any, ...] = returned if isinstance(returned, tuple) else (returned,)
    if not 1 <= len(parts) <= 3:
        raise OptionError(
            f"{doing}: the factory returned a tuple of {len(parts)}; return (model, args, kwargs) at most"
        )
    model, args, kwargs = parts + ((), {})[len(parts) - 1 :]
    kinds = (("model", model, callable(model)), ("args", args, isinstance(args, (tuple, list))))
    for what, given, right in (*kinds, ("kwargs", kwargs, isinstance(kwargs, Mapping))):
        if not right:
            raise OptionError(
                f"{doing}: the factory returned {type(given).__name__} as {what}; "
                "return model, (model, args) or (model, args, kwargs)"
            )
    return hf.Call(model, kwargs, args=tuple(args))


def _complete(call: hf.Call, doing: str) -> hf.Call:
    """Return `call` if it has an argument for each required parameter of the model.

    Raises:
        OptionError: one is missing.
    """
    forward = call.model.forward if isinstance(call.model, nn.Module) else call.model
    missing = [name for name in _required(forward)[len(call.args) :] if name not in call.kwargs]
    if missing:
        raise OptionError(
            f"{doing}: the model requires {', '.join(missing)}; give them by --input {missing[0]}=bf16[2,16,256], or "
            "name a function that returns (model, args)"
        )
    return call


def _inputs(texts: Iterable[str], doing: str) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    args: list[torch.Tensor] = []
    kwargs: dict[str, torch.Tensor] = {}
    for text in texts:
        given = _INPUT.fullmatch(text)
        if given is None or given["dtype"] not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise OptionError(
                f"{doing}: --input {text!r} is no tensor; write DTYPE[SHAPE] or NAME=DTYPE[SHAPE], such as "
                f"x=bf16[2,16,256], of {known}"
            )
        shape = [int(each) for each in given["shape"].split(",") if each.strip()]
        tensor = torch.zeros(shape, dtype=_DTYPES[given["dtype"]])
        if given["name"]:
            kwargs[given["name"]] = tensor
        else:
            args.append(tensor)
    return tuple(args), kwargs
