"""fuse: the pass as a decorator on a function, on a module's forward, or on a module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch

from fusion.backend import FusionBackend
from fusion.options import Options

Model = TypeVar("Model", bound=Callable[..., Any])


@overload
def fuse(model: Model, /) -> Model: ...
@overload
def fuse(
    model: None = None,
    /,
    *,
    options: Options | Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **fields: Any,
) -> Callable[[Model], Model]: ...
def fuse(
    model: Callable[..., Any] | None = None,
    /,
    *,
    options: Options | Mapping[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **fields: Any,
) -> Any:
    """Compile what is decorated with the fusion backend, at its first call.

    Works bare (`@fuse`) or with options (`@fuse(target="ascend910_93")`, `@fuse(options={...})`), on a function, on
    `forward` inside a class body (all instances share the compiled code, each with its own weights), and on a module
    instance (`model = fuse(model)`).

    Raises:
        OptionError: an option is not known.
    """
    backend = FusionBackend(Options.of(options, **fields))

    def decorate(target: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(target, backend=backend, dynamic=dynamic, fullgraph=fullgraph)

    return decorate if model is None else decorate(model)
