"""The private interfaces of Inductor that the project needs, checked against torch 2.13.0."""

# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from fusion._torch.fakes import fake_mode_of
from fusion._torch.functional import functional_graph
from fusion._torch.tracing import Boxed, forget_output_strides

Passes = tuple[Callable[[fx.Graph], None], Callable[[fx.Graph], None], Callable[[fx.Graph], None]]
"""Graph passes to run before and after Inductor's joint-graph patterns, and after all of its own passes."""


def inductor_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], passes: Passes) -> Boxed:
    """Compile `gm` for inference by Inductor, with its own decompositions and with `passes`.

    The tracing context of the AOT autograd that traced `gm` tells Inductor which inputs have static addresses, such as
    weights and static caches, as CUDA graphs require.
    Private: `torch._inductor.compile_fx.compile_fx_forward`, which is the inner compiler of `compile_fx`.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_forward, create_compiler_config_extra
    from torch._inductor.virtualized import V

    given: Any = config
    forget_output_strides()
    functional = functional_graph(gm, inductor_table())
    results: Any = functional.graph.output_node().args[0]
    with torch.no_grad(), given.patch(_configuration(passes)), V.set_fake_mode(fake_mode_of(functional)):
        run: Any = compile_fx_forward(
            functional, list(example_inputs), len(results), len(example_inputs),
            create_compiler_config_extra(functional), is_inference=True,
        )  # fmt: skip
    return run


def inductor_table() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions that Inductor applies before its own passes.

    Private: `torch._inductor.decomposition.select_decomp_table`.
    """
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def hosts_pass() -> bool:
    """Return True if Inductor is compiling in this thread, so that a pass that runs now is a custom pass of Inductor.

    Private: `torch._inductor.virtualized.V.fake_mode`, set from AOT autograd to the end of code generation.
    """
    from torch._inductor.virtualized import NullHandler, V

    return not isinstance(V.fake_mode, NullHandler)


def calls_at_run_time() -> bool:
    """Return True if the code that Inductor is generating may call Python, and nothing replays its launches.

    Private: `torch._inductor.virtualized.V.aot_compilation` and names in `torch._inductor.config`.
    """
    from torch._inductor import config
    from torch._inductor.virtualized import V

    given: Any = config
    return not (V.aot_compilation or given.cpp_wrapper or given.triton.cudagraphs)


def inductor_mode(mode: str) -> AbstractContextManager[Any]:
    """Configure Inductor inside the context as `torch.compile(mode=mode)` does: CUDA graphs, tuning.

    Raises:
        RuntimeError: Inductor has no such mode.
    """
    from torch._inductor import config, list_mode_options

    given: Any = config
    return given.patch(list_mode_options(mode))


def passes_at(hook: str, config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the passes of the user that Inductor runs at `hook`: those in `config`, else those of its configuration.

    Private: `torch._inductor.config` and `torch._inductor.custom_graph_pass.get_custom_graph_passes`.
    """
    from torch._inductor import config as configured
    from torch._inductor.custom_graph_pass import get_custom_graph_passes

    return get_custom_graph_passes(config[hook] if hook in config else getattr(configured, hook))


def _configuration(passes: Passes) -> dict[str, Any]:
    """Return the configuration of one compilation: `passes` added to those of the user.

    Inductor's configuration is thread-local.
    Private: the names of the hooks in `torch._inductor.config`.
    """
    before, behind, last = (_graph_pass(each.__name__, each) for each in passes)
    return {
        "joint_custom_pre_pass": (*passes_at("joint_custom_pre_pass", {}), before),
        "joint_custom_post_pass": (behind, *passes_at("joint_custom_post_pass", {})),
        "post_grad_custom_post_pass": (*passes_at("post_grad_custom_post_pass", {}), last),
    }


def _graph_pass(name: str, change: Callable[[fx.Graph], None]) -> Any:
    """Wrap `change` as a graph pass of Inductor; its `name` is part of the key of Inductor's cache.

    Private: `torch._inductor.custom_graph_pass.CustomGraphPass`.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            change(graph)

        def uuid(self) -> str:
            return f"cann_fusion: {name}"

    return Pass()


def inductor_can_build(device_type: str) -> bool:
    """Return True if the compiler that Inductor needs is installed: C++ for `device_type` "cpu", Triton for others.

    Private: `torch._inductor.cpp_builder.get_cpp_compiler`, `torch.utils._triton.has_triton`.
    """
    if device_type != "cpu":
        from torch.utils._triton import has_triton

        return has_triton()
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return False
    return os.path.isfile(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
