"""Whose schemas are in use: torch_npu before us, after us, absent, broken; each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion.operators import OPERATORS, ensure
from fusion.operators.registration import run_by_default
from tests.operators.pypto_cases import BEFORE, LAYER
from tests.operators.selection_cases import NAMES as SELECTION
from tests.operators.test_wheels import OURS
from tests.support import torch_npu_host
from tests.support.torch_npu_host import REPO, requires_torch_npu

SHOW = """
def shown(origin):
    return {"source": origin.source, "reason": origin.reason, "version": origin.version}

def told(**facts):
    import json
    print("TOLD " + json.dumps(facts))
"""
RUN = """
import torch
from fusion.operators import OPERATORS, decompositions, ensure
x, gamma = torch.randn(2, 3, 8), torch.randn(8)

def runs():
    kept = torch.ops.npu.npu_rms_norm(x, gamma)
    return all(map(torch.equal, kept, OPERATORS["npu::npu_rms_norm"].fallback(x, gamma)))
"""


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("TOLD ")).removeprefix("TOLD "))


def without_torch_npu(source: str, folder: Path | None = None) -> dict[str, Any]:
    """Run `source` where nothing but `folder` may provide a torch_npu."""
    path = os.pathsep.join(str(part) for part in (REPO, folder) if part)
    env = {**os.environ, "PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SHOW + RUN + source]
    return answer(subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=300, check=False))


def with_torch_npu(source: str, **env: str) -> dict[str, Any]:
    return answer(torch_npu_host.run(SHOW + source, env=env))


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """A folder with a torch_npu that does not import."""
    (tmp_path / "torch_npu").mkdir()
    (tmp_path / "torch_npu" / "__init__.py").write_text("raise ImportError('libhccl.so: no such file')")
    return tmp_path


@pytest.mark.rotates(6)
def test_nothing_is_registered_before_it_is_asked_for():
    facts = without_torch_npu("""
before = hasattr(torch.ops.npu, "npu_rms_norm")
ensure()
told(before=before, after=hasattr(torch.ops.npu, "npu_rms_norm"))
""")
    assert facts == {"before": False, "after": True}


@pytest.mark.rotates(6)
def test_an_overload_before_it_is_registered_says_what_to_do():
    facts = without_torch_npu("""
try:
    OPERATORS["npu::npu_swiglu"].overload()
except Exception as error:
    told(error=f"{type(error).__name__}: {error}")
""")
    assert facts["error"].startswith("OperatorError")
    assert "call fusion.operators.ensure() first" in facts["error"]


@pytest.mark.rotates(6)
def test_absent():
    facts = without_torch_npu("""
origin, again = ensure(), ensure()
schemas = {name: str(op.overload()._schema) for name, op in OPERATORS.items()}
told(origin=shown(origin), same=origin is again, runs=runs(), table=len(decompositions()), schemas=schemas,
     declared={name: op.schema for name, op in OPERATORS.items()})
""")
    assert facts["origin"] == {"source": "own", "reason": "torch_npu is not installed", "version": None}
    assert facts["same"]
    assert facts["runs"]
    assert facts["table"] == len(facts["schemas"])
    assert facts["schemas"] == facts["declared"]


@pytest.mark.rotates(6)
def test_broken(broken: Path):
    facts = without_torch_npu("told(origin=shown(ensure()), runs=runs())", broken)
    assert facts["origin"]["source"] == "own"
    assert "ImportError: libhccl.so: no such file" in facts["origin"]["reason"]
    assert facts["runs"]


@pytest.mark.rotates(6)
def test_broken_and_imported_later(broken: Path):
    facts = without_torch_npu(f"""
import importlib.util, sys
first = shown(ensure())
sys.path.append({str(broken)!r})
found = importlib.util.find_spec("torch_npu") is not None
untouched = shown(ensure())
errors = []
for attempt in range(2):
    try:
        import torch_npu
    except ImportError as error:
        errors.append(str(error))
told(found=found, first=first, untouched=untouched, errors=errors, last=shown(ensure()), runs=runs())
""")
    assert facts["found"]
    assert facts["first"] == facts["untouched"]
    assert facts["errors"] == ["libhccl.so: no such file"] * 2
    assert facts["last"]["source"] == "own"
    assert "libhccl.so" in facts["last"]["reason"]
    assert facts["runs"]


TAKEN_OVER = """
has = torch._C._dispatch_has_kernel_for_dispatch_key
theirs = [name for name in OPERATORS if not name.endswith((".tensor_lengths", ".functional", ".in_place"))]
theirs = [name for name in theirs if name.startswith(("npu::", "atb::"))]
kernels = {name: [has(name, key) for key in ("CPU", "PrivateUse1", "Meta")] for name in theirs}
own = {name: [has(name, key) for key in ("CPU", "Meta")] for name in set(OPERATORS) - set(theirs)}
packet = torch.ops.npu.npu_fused_infer_attention_score_v2
overloads = sorted(packet.overloads())
attended = packet.tensor_lengths(
    x, x, x, num_query_heads=2, actual_seq_kvlen=torch.tensor([2, 3]), input_layout="BSH"
)[0].shape
y, rstd = torch.ops.npu.npu_rms_norm(x.half().to("meta"), gamma.half().to("meta"))
"""


def assert_own_overloads(facts: dict[str, Any]) -> None:
    """Our overloads stand beside the ones of torch_npu, and run."""
    assert facts["own"].keys() == {
        each.name for each in OPERATORS.values() if OURS.search(each.name) or each.namespace not in ("npu", "atb")
    }
    assert set(map(tuple, facts["own"].values())) == {(True, True)}
    assert facts["overloads"] == ["default", "out", "tensor_lengths"]
    assert facts["attended"] == [2, 3, 8]


@pytest.mark.rotates(5)
@requires_torch_npu
def test_ours_first_then_torch_npu():
    facts = with_torch_npu(f"""
import sys
wheel = {str(torch_npu_host.wheel())!r}
sys.path.remove(wheel)
{RUN}
first = shown(ensure())
packet, ours = torch.ops.npu.npu_rms_norm, torch.ops.npu.npu_rms_norm.default
graph = torch.fx.experimental.proxy_tensor.make_fx(lambda x, gamma: ours(x, gamma)[0])(x, gamma)
compiled = torch.compile(lambda x, gamma: torch.ops.npu.npu_rms_norm(x, gamma)[0], backend="aot_eager")
compiled(x, gamma)
sys.path.append(wheel)
import torch_npu
theirs = torch.ops.npu.npu_rms_norm.default
expected = theirs(x, gamma)[0]
old = [run(x, gamma) for run in (graph, compiled, lambda *a: packet(*a)[0], lambda *a: ours(*a)[0])]
torch._dynamo.reset()
{TAKEN_OVER}
told(first=first, last=shown(ensure()), renewed=theirs is not ours, runs=runs(),
     kernels=kernels, own=own, overloads=overloads, attended=attended,
     old=[torch.equal(got, expected) for got in old], recompiled=torch.equal(compiled(x, gamma), expected),
     finders=sum("Handover" in type(f).__name__ for f in sys.meta_path))
""")
    assert facts["first"]["source"] == "own"
    assert facts["last"] == {"source": "torch_npu", "reason": "torch_npu is imported", "version": "2.13.0"}
    assert facts["renewed"]
    assert facts["runs"]
    assert facts["old"] == [True] * 4
    assert facts["recompiled"]
    assert set(map(tuple, facts["kernels"].values())) == {(True, True, True)}
    assert facts["finders"] == 1
    assert_own_overloads(facts)


@pytest.mark.rotates(5)
@requires_torch_npu
@pytest.mark.parametrize("imported", ["import torch_npu", ""], ids=["imported", "installed"])
def test_torch_npu_first(imported: str):
    facts = with_torch_npu(f"""
import torch
{imported}
{RUN}
origin = ensure()
{TAKEN_OVER}
told(origin=shown(origin), runs=runs(),
     kernels=kernels, own=own, overloads=overloads, attended=attended, table=len(decompositions()))
""")
    assert facts["origin"] == {"source": "torch_npu", "reason": "torch_npu is imported", "version": "2.13.0"}
    assert facts["runs"]
    assert set(map(tuple, facts["kernels"].values())) == {(True, True, True)}
    assert facts["table"] == len(facts["kernels"]) + len(facts["own"])
    assert_own_overloads(facts)


@pytest.mark.rotates(8)
@requires_torch_npu
def test_torch_npu_keeps_the_kernels_that_it_has():
    facts = with_torch_npu(f"""
import torch, torch_npu
other = torch.library.Library("npu", "IMPL")
other.impl("npu_swiglu", lambda input, dim=-1: input + 41, "CPU")
{RUN}
ensure()
told(kept=torch.ops.npu.npu_swiglu(torch.ones(2)).tolist(), runs=runs())
""")
    assert facts == {"kept": [42.0, 42.0], "runs": True}


@pytest.mark.rotates(6)
@requires_torch_npu
def test_the_real_torch_npu_without_its_libraries_is_broken():
    facts = with_torch_npu(f"{RUN}\ntold(origin=shown(ensure()), runs=runs())", LD_LIBRARY_PATH="")
    assert facts["origin"]["source"] == "own"
    assert "torch_npu is installed but does not import" in facts["origin"]["reason"]
    assert facts["runs"]


def test_what_hides_its_writes_is_run_by_the_vendors_own_overload():
    ensure()
    older = OPERATORS["npu::npu_mla_prolog_v2.in_place"]
    library = torch.library.Library("written_unsaid", "DEF")
    library.define("twice(Tensor x, Tensor cache) -> (Tensor, Tensor, Tensor)")
    library.define("twice.in_place(Tensor x, Tensor(a!) cache) -> (Tensor, Tensor)")
    library.impl("twice", lambda x, cache: (x + 1, x + 2, cache.add_(x)), "CPU")
    stand_in = replace(
        older, schema="written_unsaid::twice.in_place(Tensor x, Tensor(a!) cache) -> (Tensor, Tensor)",
        dims={}, dtypes={}, limits={}, uncomputed={}, without_effect=frozenset(), compute=lambda x, cache: (),
    )  # fmt: skip
    cache = torch.ones(2)
    one, two = run_by_default(stand_in, torch.ones(2), cache=cache)
    assert [each.tolist() for each in (one, two, cache)] == [[2, 2], [3, 3], [2, 2]]


@pytest.mark.rotates(8)
@requires_torch_npu
def test_a_device_has_a_kernel_for_what_hides_its_writes():
    facts = with_torch_npu("""
import torch, torch_npu
from fusion.operators import OPERATORS, ensure
ensure()
hidden = [name for name, each in OPERATORS.items() if each.runs_default]
told(hidden={name: torch._C._dispatch_has_kernel_for_dispatch_key(name, "PrivateUse1") for name in hidden})
""")
    names = (
        "npu::npu_mla_prolog.in_place",
        "npu::npu_mla_prolog_v2.in_place",
        *(each[0] for each in (LAYER, BEFORE, SELECTION)),
    )
    assert facts == {"hidden": dict.fromkeys(names, True)}
