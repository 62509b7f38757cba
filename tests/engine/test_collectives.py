"""Collectives stand where they stood: nothing crosses them, and the local work on both sides is fused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

from tests.support.torch_npu_host import REPO


@pytest.mark.rotates(9)
@pytest.mark.skipif(not distributed.is_available(), reason="this torch has no process groups")
def test_two_processes_compute_what_one_does(tmp_path: Path):
    environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.engine.distributed_child"]
    children = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")], cwd=REPO, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        said = [child.communicate(timeout=600) for child in children]
    finally:
        for child in children:
            child.kill()
    for child, (_, errors) in zip(children, said, strict=True):
        assert child.returncode == 0, errors[-3000:]
    for out, _ in said:
        ops = json.loads(out.splitlines()[-1])
        for name in ("rms_norm", "apply_rotary_pos_emb", "fused_infer_attention_score_v2", "add_rms_norm"):
            assert ops.get(f"npu::npu_{name}") == 1, ops
