"""Parts of pages that are measured: the listing and the table of README.md, the report of the first fusion."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fusion
from docs.generate.markdown import ROOT
from fusion.frontend import hf
from fusion.graph.launches import is_launch

TARGET = "ascend910_93"
WIDTH = 76
FAMILIES = {
    "Llama 2, 3": "llama", "Qwen3": "qwen3", "Mistral": "mistral", "Gemma 3": "gemma3_text", "Phi-3, Phi-4": "phi3",
    "OLMo 2": "olmo2", "GLM-4": "glm4", "SmolLM3": "smollm3", "Qwen3-MoE": "qwen3_moe", "Mixtral": "mixtral",
    "gpt-oss": "gpt_oss", "Ernie 4.5 MoE": "ernie4_5_moe", "DeepSeek-V2": "deepseek_v2",
    "DeepSeek-V3, R1, Kimi-K2": "deepseek_v3", "LongCat-Flash": "longcat_flash",
    "DeepSeek-V3.2": "deepseek_v32", "GLM-5": "glm_moe_dsa",
}  # fmt: skip
"""Families of the table in README -> their type in transformers."""


def filled(path: Path, **parts: Callable[[], str]) -> str:
    """Return the text of the file `path` with each of `parts` between the comments that have its name."""
    text = path.read_text()
    for name, part in parts.items():
        marks = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        text = marks.sub(lambda found, part=part: f"{found[1]}{part()}{found[2]}", text)
    return text


def families_table() -> str:
    """Trace one step of decoding of each family at its real sizes, one layer of every kind, for `ascend910_93`."""
    head = (
        "One token behind a static cache, models of `transformers` at their real sizes with one or two layers of each "
        "kind, in bfloat16 for `ascend910_93`; for yours, `cann-fusion explain hf:TYPE --mode decode`:\n\n"
        "| family (type) | launches | calls of fused operators, by rule |\n|---|---|---|\n"
    )
    return head + "".join(_traced(name, kind) for name, kind in FAMILIES.items()) + "\n"


def _traced(name: str, kind: str) -> str:
    call = hf.build(hf.Request(kind, "decode"))
    report = fusion.explain(call.model, *call.args, options={"target": TARGET}, **call.kwargs)
    rules = ", ".join(f"`{rule}` {count}" for rule, count in Counter(each.rule for each in report.matches).items())
    return f"| {name} (`{kind}`) | {report.launches[0]} → {report.launches[1]} | {rules} |\n"


def listing() -> str:
    """List the launches of the block of examples/first_fusion.py before and after, as text."""
    blocks: list[str] = []
    for title, fuel in (("before", 0), ("after", None)):
        report = _explained(fuel=fuel)
        names = [_short(str(node.target)) for node in report.graphs[0].graph.nodes if is_launch(node)]
        blocks.append(f"{title}, {len(names)} launches\n" + _wrapped(names))
    return "```\n" + "\n".join(blocks) + "```\n"


def block() -> str:
    """Return the code of examples/first_fusion.py before its `main`."""
    code = (ROOT / "examples" / "first_fusion.py").read_text().partition("\n\n\ndef main")[0]
    return "```python\n" + code.partition('"""\n\n')[2] + "\n```\n"


def report() -> str:
    """Return the report of the block of examples/first_fusion.py, as text."""
    lines = [line.rstrip() for line in str(_explained()).strip().splitlines()]
    return "```text\n" + "\n".join(lines) + "\n```\n"


def _explained(**options: Any) -> fusion.Report:
    sys.path.insert(0, str(ROOT / "examples"))
    from first_fusion import HIDDEN, LENGTH, Block, tables

    torch.manual_seed(0)
    model = Block().bfloat16().eval()
    inputs = (torch.zeros(1, LENGTH, HIDDEN, dtype=torch.bfloat16), *tables())
    return fusion.explain(model, *inputs, options={"target": TARGET, **options})


def _short(target: str) -> str:
    namespace, name = target.split(".")[:2]
    return name if namespace == "aten" else f"{namespace}.{name}"


def _wrapped(names: list[str]) -> str:
    lines = [""]
    for name in names:
        if len(lines[-1]) + len(name) > WIDTH:
            lines.append("")
        lines[-1] += f"  {name}"
    return "\n".join(lines) + "\n"
