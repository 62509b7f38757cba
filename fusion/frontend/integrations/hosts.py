"""The pass as a guest of compilers that run passes of their users: Inductor, and vLLM, which compiles by Inductor.

A guest sees no calls: the options `assume`, `verify` and `expect` have no effect, as its report says. A graph of
Inductor looks up prepared weights by a call inside the graph; vLLM, which captures launches itself, prepares nothing.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any
from uuid import uuid4

import torch.fx as fx

from fusion._torch.inductor import passes_at
from fusion.errors import FusionError, OptionError
from fusion.frontend.integrations.configurations import check_config, given_as
from fusion.frontend.library import Rules
from fusion.frontend.passes import FusionPass
from fusion.options import Options

HOOK = "post_grad_custom_pre_pass"
"""The place in Inductor: behind its decompositions, before its own rewrites of graphs for inference."""
_VLLM = ("vllm.compilation.passes.inductor_pass", "vllm.compilation.inductor_pass")
"""Modules that have `InductorPass`, that of the newest vLLM first."""


def inductor(
    config: Mapping[str, Any] | None = None,
    options: Options | Mapping[str, Any] | None = None,
    rules: Rules = None,
) -> dict[str, Any]:
    """Return `config` with the pass behind the passes that Inductor runs at `HOOK`.

        torch.compile(model, options=fusion.integrations.inductor({"max_autotune": True}))

    Args:
        config: options of Inductor by name, as `torch.compile(options=...)` and AOTInductor's `inductor_configs` take
            them. If no passes are at `HOOK` in it, those in `torch._inductor.config` count.
        options: the options of the pass.
        rules: the rules to choose from; None for the installed ones.

    Raises:
        OptionError: an option of the pass is wrong, or `config` is no configuration of Inductor.
    """
    check_config("inductor", config)
    guest = FusionPass(options, rules)
    given = {name.replace("-", "_"): value for name, value in (config or {}).items()}
    before = passes_at(HOOK, given)
    for each in before:
        if not callable(each):
            raise OptionError(f"configuring inductor: {HOOK} has {given_as(each)}, which is no pass; give functions")
    if any(isinstance(each, FusionPass) and each.uuid() == guest.uuid() for each in before):
        return given
    return {**given, HOOK: (*before, guest)}


def vllm(options: Options | Mapping[str, Any] | None = None, rules: Rules = None, earlier: Any = None) -> FusionPass:
    """Return the pass as an `InductorPass` of vLLM, whose manager of passes runs it behind vLLM's own.

        guest = fusion.integrations.vllm()
        LLM(model, compilation_config={"inductor_compile_config": {"post_grad_custom_post_pass": guest}})

    Args:
        options: the options of the pass.
        rules: the rules to choose from; None for the installed ones.
        earlier: an `InductorPass` to run first, as vLLM's configuration has room for one.

    Raises:
        FusionError: vLLM cannot be imported.
        OptionError: an option of the pass is wrong.
    """
    checked = FusionPass(options, rules)
    if not isinstance(earlier, Callable | None):
        raise OptionError(f"making a pass for vLLM: earlier is {given_as(earlier)}; give an InductorPass, or None")
    return _guest_of(_inductor_pass())(checked.options, checked.rules, earlier)


def _inductor_pass() -> type:
    """Return the class `InductorPass` of the installed vLLM.

    Raises:
        FusionError: no module of vLLM has it.
    """
    errors: list[str] = []
    for name in _VLLM:
        try:
            return importlib.import_module(name).InductorPass
        except Exception as error:  # an installation that does not fit raises anything
            errors.append(f"{type(error).__name__}: {error}")
    raise FusionError(
        f"making a pass for vLLM: vllm cannot be imported ({errors[0]}); install the vllm that fits torch, or compile "
        "the model by torch.compile(model, backend='cann_fusion')"
    )


@cache
def _guest_of(base: type) -> type[Any]:
    """Return the class of passes that are both `FusionPass` and `base`, the `InductorPass` of vLLM."""

    class VllmPass(FusionPass, base):  # type: ignore[misc]
        """The pass, and `earlier` before it, with a key of both."""

        def __init__(self, options: Any = None, rules: Rules = None, earlier: Any = None) -> None:
            super().__init__(options, rules)
            self.earlier = earlier
            self._own = uuid4().hex

        def __reduce__(self) -> tuple[Any, ...]:
            return partial(vllm, earlier=self.earlier), (self.options, self.rules)

        def __call__(self, graph: fx.GraphModule | fx.Graph, *context: Any) -> None:
            if self.earlier is not None:
                self.earlier(graph)
            super().__call__(graph, *context)

        def _parameters(self, source: fx.Graph) -> dict[str, str]:
            return {}  # vLLM captures the launches of a graph, and a captured graph looks up no weights

        def uuid(self) -> str:
            """Return a key of both passes; of this object alone where the rules have none, so that no cache hits."""
            key = super().uuid() or self._own
            before = "" if self.earlier is None else str(self.earlier.uuid())
            return hashlib.sha256(f"{key}\n{before}".encode()).hexdigest()

    return VllmPass
