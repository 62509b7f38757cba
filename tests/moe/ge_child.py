"""Runs in a child process behind the stubs: routers through torchair, by the backend and by the pass as its guest."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fusion
from tests.moe import expert_routing as routers
from tests.support import ge

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
A3 = {"target": "ascend910_93"}
Made = list[tuple[str, dict[str, int]]]


def chosen(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Shares and experts, of logits with any dims."""
    return logits.softmax(-1, dtype=F32).topk(routers.CHOSEN)


def chosen_expected(logits: Tensor) -> Tensor:
    return routers.plain(logits.flatten(0, -2)).view_as(logits)


def record() -> Made:
    """What will be made as torchair's own converters do not make it: GE operators and their attributes."""
    import torchair

    made, custom_op = Made(), torchair.ge.custom_op

    def recorded(kind: str, **given: Any) -> Any:
        made.append((kind, {name: each.value for name, each in given["attrs"].items()}))
        return custom_op(kind, **given)

    torchair.ge.custom_op = recorded
    return made


def told(
    made: Made, form: Callable[..., Any], expected: Callable[[Tensor], Tensor], given: Tensor, **how: Any
) -> dict[str, Any]:
    """The operators of the converted graph, what was made, and how far its results are from float64's."""
    torch._dynamo.reset()
    made.clear()
    have = torch.compile(form, **{"dynamic": False, **how})(given)
    have = have if isinstance(have, Tensor) else routers._dense(given.double(), have[1], have[0].double())
    error = (have.double() - expected(given.double())).abs().max().item()
    return {"operators": ge.operators(), "made": list(made), "error": error}


def lowered() -> None:
    """Print, as one line of JSON, what `lower="torchair"` makes of routers, by name."""
    ge.install()
    made, how = record(), {"backend": "cann_fusion", "options": A3 | {"lower": "torchair"}}
    (rows,), (row,) = routers._logits(2, 3), routers._logits(1, 1)
    marked = rows.float()
    torch._dynamo.mark_dynamic(marked, 0)
    divided, shares = routers.renormalised, routers.plain
    cases = {
        "chosen first": told(made, routers.chosen_first, divided, rows.float(), **how),
        "divided": told(made, routers.divided_in_place, divided, rows.to(BF16), **how),
        "widened": told(made, routers.widened_behind_the_choice, divided, rows.half(), **how),
        "shares": told(made, routers.plain_shares, shares, rows.half(), **how),
        "one token": told(made, routers.plain_shares, shares, row.to(BF16), **how),
        "any number of tokens": told(made, routers.divided_in_float, divided, marked, dynamic=None, **how),
        "sequences": told(made, chosen, chosen_expected, rows.float().unflatten(0, (2, 3)), **how),
    }
    print(json.dumps(cases))


def whole_softmax() -> None:
    """Print what is said of a call of the operator that the model itself makes, for its third result too."""
    ge.install()
    made, (rows,) = record(), routers._logits(2, 3)
    operator = torch.ops.npu.npu_moe_gating_top_k_softmax_v2

    def form(logits: Tensor) -> Tensor:
        return operator(logits, k=routers.CHOSEN, output_softmax=True)[2]

    try:
        torch.compile(form, backend="cann_fusion", options=A3 | {"lower": "torchair"})(rows.float())
    except torch._dynamo.exc.BackendCompilerFailed as error:
        print(json.dumps({"made": made, "raised": str(error.inner_exception).partition("\n")[0]}))


def guest() -> None:
    """Print the same of the pass as a guest of torchair, where nothing was lowered before."""
    ge.install()
    import torchair

    config = torchair.CompilerConfig()
    config.post_grad_custom_pre_pass = fusion.FusionPass(A3)
    host = torchair.get_npu_backend(compiler_config=config)
    (rows,) = routers._logits(2, 3)
    found = told(record(), routers.chosen_first, routers.renormalised, rows.float(), backend=host)
    print(json.dumps({"guest": found}))
