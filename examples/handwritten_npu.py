"""A layer of Qwen3-MoE as code for an NPU writes it, run on a CPU next to plain PyTorch and to what cann-fusion makes.

`fusion.fallbacks.install()` gives every operator that cann-fusion knows a decomposition into plain PyTorch, and an
`import torch_npu` where that is not installed. Prints how far hand-written, fused and plain are from float64.
"""

import torch
from qwen3_moe import CHOICES, OPTIONS, Layer, inputs, model
from torch import Tensor

import fusion
from fusion import fallbacks

print("schemas in use:", fallbacks.install().reason)

import torch_npu  # noqa: E402


def handwritten(layer: Layer, hidden: Tensor) -> Tensor:
    """Norm, router, rows sorted by expert, products in groups with SwiGLU between, and the weighted sum."""
    x, _ = torch_npu.npu_rms_norm(hidden.flatten(0, 1), layer.norm.weight, layer.norm.eps)
    experts, count = layer.experts, layer.experts.gate_up.shape[0]
    shares, chosen, _ = torch_npu.npu_moe_gating_top_k_softmax(layer.router(x).float(), None, k=CHOICES)
    weights = shares / shares.sum(-1, keepdim=True)
    rows, places, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x, expert_idx=chosen, active_num=0, expert_num=count, expert_tokens_num_type=1, expert_tokens_num_flag=True,
        active_expert_range=[0, count], quant_mode=-1,
    )  # fmt: skip
    groups = {"group_list": counts, "group_list_type": 1, "split_item": 3, "group_type": 0}
    gate_up = torch_npu.npu_grouped_matmul([rows], [experts.gate_up.mT], **groups)[0]
    given = torch_npu.npu_grouped_matmul([torch_npu.npu_swiglu(gate_up)], [experts.down.mT], **groups)[0]
    summed = torch_npu.npu_moe_finalize_routing(
        given, skip1=None, skip2=None, bias=None, scales=weights.to(given.dtype), expanded_src_to_dst_row=places,
        export_for_source_row=None, drop_pad_mode=2,
    )  # fmt: skip
    return hidden + summed.view_as(hidden)


def error(y: Tensor, truth: Tensor) -> float:
    return float((y.double() - truth).norm() / truth.norm())


@torch.inference_mode()
def main() -> None:
    layer, x = model("sorted", torch.bfloat16), inputs(torch.bfloat16)
    truth = model("sorted", torch.float64)(inputs(torch.float64))
    report = fusion.explain(layer, x, options=OPTIONS)
    print("fused by cann-fusion:", ", ".join(f"{count} {op}" for op, count in sorted(report.ops.items())))
    fused = torch.compile(layer, backend="cann_fusion", options=OPTIONS, dynamic=False)(x)
    for name, y in (("hand-written", handwritten(layer, x)), ("fused", fused), ("plain", layer(x))):
        print(f"{name}: relative error {error(y, truth):.2e}")
    name = "npu_moe_distribute_dispatch_v2"
    print(f"{name} runs here:", hasattr(torch_npu, name))


if __name__ == "__main__":
    main()
