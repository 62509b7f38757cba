"""Experts through the vendor's own compiler, in a process behind the stubs."""

from __future__ import annotations

import json
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
    child = torch_npu_host.run(_SOURCE.format(module=module, form=form))
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])
