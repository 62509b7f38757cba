"""JSON of a document: equal layers are one entry."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fusion.report.document import Change, Copied, Cost, Document, Layers, Left, Memory, Module, Rewrite
from fusion.report.trace import Line


def to_json(document: Document) -> str:
    """Write everything but the graphs of `document` as JSON."""
    content: dict[str, Any] = {
        "model": document.model,
        "target": document.target,
        "graphs": document.graphs,
        **_sides(document.before, document.after),
        "ops": dict(document.ops),
        "packages": dict(document.packages),
        "refusals": [_change(each) for each in document.changes],
        "refusals_hidden": document.hidden,
        "rewrites": [_rewrite(each) for each in document.rewrites],
        "left": [_left(each) for each in document.left],
        "copies": [_copied(each) for each in document.copied],
        "modules": [_module(each) for each in document.modules],
        "layers": [_layers(each) for each in document.layers],
        "result_copies": document.result_copies,
        "host_reads": document.host_reads,
        "prepared": _memory(document.memory),
        "regions": [asdict(each) for each in document.expected],
        "assumptions": dict(document.assumptions),
        "guesses": dict(document.guesses),
        "breaks": [asdict(each) for each in document.breaks],
        "interruption": None if document.interruption is None else asdict(document.interruption),
        "notes": list(document.notes),
        "failures": [{"graph": number, **asdict(each)} for number, each in document.failures],
    }
    return json.dumps(content, indent=2)


def _sides(before: Cost, after: Cost) -> dict[str, Any]:
    return {
        "launches": {"before": before.launches, "after": after.launches},
        "us": {"before": round(before.us, 3), "after": round(after.us, 3)},
    }


def _place(line: Line | None) -> dict[str, str]:
    return {"where": str(line) if line else "", "source": line.text if line else ""}


def _change(change: Change) -> dict[str, Any]:
    return {
        "rule": change.rule,
        "op": change.op,
        "reason": change.reason,
        **_place(change.line),
        "module": change.module,
        "times": change.times,
        "is_mendable": change.is_mendable,
        "target": change.target,
        "launches": change.launches,
        "saves_us": round(change.us, 3),
        "saves_at_most": not change.is_planned,
        "fused_otherwise": change.fused_otherwise,
    }


def _rewrite(rewrite: Rewrite) -> dict[str, Any]:
    return {
        "rule": rewrite.rule,
        "lowering": rewrite.lowering,
        "calls": dict(rewrite.calls),
        "replaced": dict(rewrite.replaced),
        "module": rewrite.module,
        "times": rewrite.times,
        "saves": {"launches": rewrite.saved.launches, "us": round(rewrite.saved.us, 3)},
        "remark": rewrite.remark,
        "lines": [{"module": origin.module, **_place(line)} for origin in rewrite.origins for line in origin.lines],
    }


def _left(left: Left) -> dict[str, Any]:
    return {
        "op": left.op,
        "module": left.module,
        "times": left.times,
        **_place(left.line),
        "us": round(left.us, 3),
        "bytes": left.bytes,
        "rule": left.rule,
        "reason": left.reason,
        "made_by": left.made_by,
        "copies": list(left.copies),
    }


def _copied(copied: Copied) -> dict[str, Any]:
    return {
        "kind": copied.kind,
        "op": copied.op,
        "inputs": list(copied.inputs),
        "module": copied.module,
        "times": copied.times,
        **_place(copied.line),
        "us": round(copied.us, 3),
        "bytes": copied.bytes,
        "cure": copied.cure,
    }


def _module(module: Module) -> dict[str, Any]:
    sides = _sides(module.before, module.after)
    return {"module": module.path, "times": module.times, **sides, "bookkeeping": module.bookkeeping}


def _layers(layers: Layers) -> dict[str, Any]:
    sides = _sides(layers.before, layers.after)
    differs = {"differs_from": layers.usual, "differences": list(layers.differences)}
    return {"layers": layers.path, "times": layers.times, **sides, **differs}


def _memory(memory: Memory) -> Mapping[str, Any]:
    return {
        "bytes": memory.bytes,
        "parameter_bytes": memory.parameter_bytes,
        "stored": [asdict(each) for each in memory.stored],
        "not": list(memory.not_prepared),
    }
