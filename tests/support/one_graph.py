"""Whether code that is compiled with sizes that are marked dynamic is compiled once for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._dynamo.utils import counters


@contextmanager
def one_graph(form: Callable[..., Any], **options: Any) -> Iterator[Callable[..., Any]]:
    """The form as the backend compiles it; behind all calls there must be one graph."""
    torch.compiler.reset()
    counters.clear()
    yield torch.compile(form, backend="cann_fusion", options={"target": "host", "lower": "eager", **options})
    assert counters["stats"]["unique_graphs"] == 1
