"""The fallbacks where torch_npu is missing, does not import, or is there; each in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import torch_npu_host
from tests.support.child import child
from tests.support.torch_npu_host import requires_torch_npu

pytestmark = pytest.mark.rotates(16)
RUNS = """
import torch
from fusion import fallbacks
origin = fallbacks.install()
assert fallbacks.install() is origin
import torch_npu
x, gamma = torch.randn(3, 16), torch.ones(16)
assert torch.equal(torch_npu.npu_rms_norm(x, gamma)[0], torch.ops.npu.npu_rms_norm(x, gamma)[0])
"""


@pytest.mark.rotates(8)
def test_where_it_is_missing_a_stand_in_is_imported_and_others_see_no_npu():
    child(
        RUNS
        + """
from transformers.utils import is_torch_npu_available
from fusion.planning.target import Target
assert origin.source == "own"
assert not is_torch_npu_available()
assert not Target.detect().is_npu
assert torch_npu.atb.npu_ring_mla is torch.ops.atb.npu_ring_mla
compiled = torch.compile(lambda x: torch_npu.npu_rms_norm(x, gamma)[0] + 1, backend="aot_eager", fullgraph=True)
assert torch.equal(compiled(x), torch_npu.npu_rms_norm(x, gamma)[0] + 1)
"""
    )


@pytest.mark.rotates(6)
def test_where_it_does_not_import_a_stand_in_is_imported(tmp_path: Path):
    (tmp_path / "torch_npu.py").write_text("raise ImportError('libhccl.so: no such file')")
    child(f"import sys; sys.path.append({str(tmp_path)!r})" + RUNS + "assert 'libhccl.so' in origin.reason")


@pytest.mark.rotates(6)
def test_without_a_stand_in_its_import_fails():
    child("""
from fusion import fallbacks
fallbacks.install(torch_npu=False)
try:
    import torch_npu
except ImportError:
    pass
else:
    raise AssertionError
""")


@requires_torch_npu
@pytest.mark.rotates(8)
def test_where_it_imports_it_stays():
    done = torch_npu_host.run(
        RUNS
        + """
assert origin.source == "torch_npu"
assert torch_npu.__file__
assert hasattr(torch_npu, "npu_format_cast")
"""
    )
    assert done.returncode == 0, done.stderr[-2000:]
