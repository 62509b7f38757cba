"""Qwen3 from transformers, as it is: prefill and greedy decoding over a StaticCache, fused."""

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, StaticCache

PROMPT, NEW = 12, 8


def small() -> Qwen3ForCausalLM:
    """Two layers with heads of the real size; `from_pretrained` gives the same model with weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=512, intermediate_size=1024, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=128, vocab_size=1000,
    )  # fmt: skip
    return Qwen3ForCausalLM(config).bfloat16().eval()


@torch.inference_mode()
def generate(model, call) -> list[int]:
    cache = StaticCache(config=model.config, max_cache_len=PROMPT + NEW)
    # Early, because a cache that is first made inside a compiled call belongs to its graph.
    cache.early_initialization(1, num_heads=2, head_dim=128, dtype=torch.bfloat16, device=torch.device("cpu"))
    ids = torch.arange(1, PROMPT + 1)[None]
    tokens: list[int] = []
    for _ in range(NEW):
        logits = call(input_ids=ids, past_key_values=cache, use_cache=True).logits
        ids = logits[:, -1:].argmax(-1)
        tokens.append(int(ids))
    return tokens


def main() -> None:
    model = small()
    fused = torch.compile(model, backend="cann_fusion", options={"target": "ascend910_93"}, dynamic=False)
    plain, ours = generate(model, model), generate(model, fused)
    print("plain:", plain)
    print("fused:", ours)
    print("the same tokens" if plain == ours else "different tokens: two logits within rounding of each other")


if __name__ == "__main__":
    main()
