"""Experts through the vendor's own compiler, in a process behind the stubs."""

from __future__ import annotations

from typing import Any

from tests.support import torch_npu_host

_SOURCE = """
import json, torch
from tests.support import ge
ge.install()
from {module} import {form}, inputs

args = inputs(torch.bfloat16)
want = {form}(*args)
options = dict(target="ascend910_93", lower="torchair")
have = torch.compile({form}, backend="cann_fusion", options=options)(*args)
error = ((have - want).norm() / want.norm()).item()
print(json.dumps(dict(operators=ge.operators(), error=error)))
"""


def converted(module: str, form: str) -> dict[str, Any]:
    """The operators that a form of a module becomes in GE, and how far its result is from the form's own."""
    return torch_npu_host.answer(_SOURCE.format(module=module, form=form))
