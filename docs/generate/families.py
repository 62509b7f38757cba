"""Page of the model families: what becomes of them, read from the recorded results in tests/goldens/expected."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from docs.generate.markdown import prose, table, wrapped
from docs.generate.readme import FAMILIES
from tests.models import indexers
from tests.models.families import CONFIGS, LAYERS
from tests.repositories.base import Piece
from tests.repositories.families import of_case, told
from tests.repositories.pieces import PIECES

GROUPS = {
    "Language models": (
        "meta-llama/llama3", "meta-llama/llama", "google/gemma_pytorch", "mistralai/mistral-inference", "QwenLM/Qwen",
        "THUDM/ChatGLM3", "THUDM/ChatGLM-6B", "baichuan-inc/Baichuan2", "InternLM/InternLM", "microsoft/phi-2",
        "bigcode-project/starcoder", "allenai/OLMo", "mosaicml/llm-foundry", "huggingface/transformers",
        "EleutherAI/gpt-neox", "swiss-ai/Apertus", "stepfun-ai/Step3", "XiaomiMiMo/MiMo-V2", "unslothai/unsloth",
    ),
    "Language models that alternate attention with recurrences": (
        "tiiuae/Falcon-H1", "state-spaces/mamba", "google-deepmind/recurrentgemma",
    ),
    "Experts": ("openai/gpt-oss", "AviSoori1x/makeMoE"),
    "Latent and sparse attention": (
        "deepseek-ai/DeepSeek-V2", "deepseek-ai/DeepSeek-V3", "moonshotai/Kimi-K2", "openbmb/MiniCPM3",
        "deepseek-ai/FlashMLA", "tile-ai/tilelang", "hicann/cann-recipes-infer", "Abhishekkk2004/Deepseek-from-Scratch",
    ),
    "Encoders and encoder-decoders": (
        "google-research/bert", "google-research/text-to-text-transfer-transformer", "microsoft/DeBERTa",
        "facebookresearch/fairseq",
    ),
    "Pictures": (
        "google-research/vision_transformer", "microsoft/Swin-Transformer", "openai/CLIP", "QwenLM/Qwen2.5-VL",
        "facebookresearch/segment-anything", "facebookresearch/sam2", "facebookresearch/dinov3", "baaivision/EVA",
        "FoundationVision/VAR",
    ),
    "Pictures and films by diffusion": (
        "black-forest-labs/flux", "CompVis/latent-diffusion", "Stability-AI/sd3.5", "Wan-Video/Wan2.1",
        "Tencent/HunyuanVideo", "openai/guided-diffusion",
    ),
    "Speech and music": (
        "openai/whisper", "espnet/espnet", "wenet-e2e/wenet", "SWivid/F5-TTS", "facebookresearch/audiocraft",
        "kyutai-labs/moshi",
    ),
    "Proteins": ("facebookresearch/esm", "aqlaboratory/openfold", "bytedance/Protenix"),
    "Training": (
        "NVIDIA/Megatron-LM", "pytorch/torchtitan", "pytorch/torchtune", "Lightning-AI/litgpt",
        "facebookresearch/lingua", "pytorch/pytorch",
    ),
    "Serving, and references of kernels": (
        "vllm-project/vllm", "sgl-project/sglang", "pytorch-labs/gpt-fast", "Dao-AILab/flash-attention",
        "flashinfer-ai/flashinfer", "ascend/ascend-transformer-boost",
    ),
    "Small models and teaching code": (
        "karpathy/nanoGPT", "karpathy/nanochat", "karpathy/llama2.c", "KellerJordan/modded-nanogpt",
        "jingyaogong/minimind", "rasbt/LLMs-from-scratch", "lucidrains/x-transformers",
        "lucidrains/rotary-embedding-torch",
    ),
}  # fmt: skip
"""Titles -> repositories, in the order of the page."""
MODES = {
    "prefill": "prefill",
    "masked_prefill": "padded prefill",
    "prefill_static": "prefill, static cache",
    "decode_static": "decode, static cache",
    "decode_dynamic": "decode, growing cache",
}
"""Modes of the models of transformers -> heads of columns."""
POOLED = {"DeepseekV4": "prefill eager", "MiniMaxM3VL": "prefill sdpa", "Doge": "prefill sdpa"}
"""Families that choose keys otherwise than by an indexer of tokens -> the recorded case."""
_HEAD = """# Model families

{pieces} pieces of {repositories} public repositories, and {models} families of transformers: how many kernels a step
launches before and after, in bfloat16 on `ascend910_93`, and why some places stay as they are. {fused} of the
{attentions} attentions of the pieces become one operator each. Nothing here has run on an NPU: launches are counted in
the graph.

How to read a row: *launches* before → after; *attentions* that became one operator, of all; *rules* that were applied
([what each does](rules.md)); *remarks*, numbers of the sentences at the [end of this page](#remarks). Your own model,
with the lines of its code: `cann-fusion explain hf:TYPE`, or `cann-fusion explain my_package.my_model:build`.

Written by `make docs` from [what the tests measure](../tests/goldens/expected).
"""
_MODELS = """
## Models of transformers

Untouched models of {layers} layers with the head sizes of the published ones and small random weights, attention by
`sdpa`. A cell has the launches before → after, and the attentions that became one operator. The same at real sizes:
[README](../README.md#what-works-today-and-what-does-not).

"""
_INDEXED = """
## Models of transformers that choose keys

One prompt and one step of two layers each over a static cache. DeepSeek-V4 lists pools of keys, MiniMax-M3 blocks of
them for each group of heads, Doge keys for each head. Glm5Next and Qwen4Exp are several graphs each:
[a test](../tests/models/test_sparse_attention.py) says what their attention becomes, and why it is dense.

"""
_PIECES = """
## Code of public repositories

Each piece is [written anew](../tests/repositories/pieces.py) in the manner of its repository: the order of operations,
the layout of caches, the way in which masks are made; none of its text.
"""
_ESTIMATE = re.compile(r"estimated [\d.]+ us slower")
_COLUMNS = ("launches", "attentions", "rules", "remarks")


class Remarks:
    """Sentences by number, each written once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def links(self, reasons: Iterable[str]) -> str:
        """Return links to `reasons`, giving new ones a number."""
        same = (_ESTIMATE.sub("estimated slower", reason) for reason in reasons)
        numbers = [self._numbers.setdefault(reason, len(self._numbers) + 1) for reason in same]
        return " ".join(f"[{number}](#remark-{number})" for number in sorted(set(numbers)))

    def section(self) -> str:
        """Return the section with all sentences."""
        lines = [_remark(number, reason) for reason, number in self._numbers.items()]
        return (
            "\n## Remarks\n\nThe rule, and why it was not applied at some place of the row.\n\n"
            + "\n\n".join(lines)
            + "\n"
        )


def page() -> str:
    """Return docs/families.md."""
    remarks = Remarks()
    listed = [name for names in GROUPS.values() for name in names]
    left = {piece.repository for piece in PIECES} ^ set(listed)
    if left:
        raise ValueError(f"writing the page of the families: {', '.join(sorted(left))} has no group; add it to GROUPS")
    head = _HEAD.format(
        pieces=len(PIECES),
        repositories=len(listed),
        models=len(CONFIGS) + len(_indexed()) // len(indexers.MODES),
        fused=sum(told(each).attentions for each in PIECES),
        attentions=sum(each.attentions for each in PIECES),
    )
    parts = [head, _models(remarks), _choosing(remarks), _PIECES]
    parts += [_group(title, names, remarks) for title, names in GROUPS.items()]
    return "".join(parts) + remarks.section()


def _models(remarks: Remarks) -> str:
    rows = ((_named(family), *_modes(family), remarks.links(_reasons(family))) for family in sorted(CONFIGS))
    return _MODELS.format(layers=LAYERS) + table(("family", *MODES.values(), "remarks"), rows)


def _named(family: str) -> str:
    """Return the names of the published models of a family, and its type in transformers."""
    kind = CONFIGS[family]().model_type
    names = {known: name for name, known in FAMILIES.items()}
    return f"{names.get(kind, family)}<br>`{kind}`"


def _modes(family: str) -> Iterator[str]:
    for mode in MODES:
        found = of_case(f"model_{family}", f"{mode} sdpa")
        yield f"{found.before}\u00a0→\u00a0{found.after}<br>{found.attentions} of {LAYERS}"


def _reasons(family: str) -> list[str]:
    return [each for mode in MODES for each in of_case(f"model_{family}", f"{mode} sdpa").refused]


def _indexed() -> dict[str, tuple[str, str]]:
    """Return the recorded cases of families that choose keys: name of the row -> file and case."""
    steps = [(name, mode) for name in indexers.INDEXED for mode in indexers.MODES]
    found = {f"{name}, {mode.partition('_')[0]}": (indexers.FILE, f"{name} {mode}") for name, mode in steps}
    return found | {f"{name}, prefill": (f"model_{name}", case) for name, case in POOLED.items()}


def _choosing(remarks: Remarks) -> str:
    rows = (_row(what, of_case(*case), LAYERS, remarks) for what, case in _indexed().items())
    return _INDEXED + table(("family", *_COLUMNS), rows)


def _group(title: str, names: Iterable[str], remarks: Remarks) -> str:
    rows = [row for name in names for row in _repository(name, remarks)]
    return f"\n### {title}\n\n" + table(("repository", "piece", *_COLUMNS), rows)


def _repository(name: str, remarks: Remarks) -> Iterator[tuple[str, ...]]:
    """Yield the rows of a repository, which is named in the first."""
    for at, piece in enumerate(each for each in PIECES if each.repository == name):
        yield f"**{name}**" * (not at), *_piece(piece, remarks)


def _piece(piece: Piece, remarks: Remarks) -> tuple[str, ...]:
    return _row(piece.what, told(piece), piece.attentions, remarks)


def _row(what: str, found: Any, attentions: int, remarks: Remarks) -> tuple[str, ...]:
    rules = ", ".join(f"{rule}{f' ×{count}' if count > 1 else ''}" for rule, count in found.rules.items())
    many = f"{found.attentions} of {attentions}" if attentions else ""
    return (
        what,
        f"{found.before}\u00a0→\u00a0{found.after}",
        many,
        rules.replace("_", "\\_"),
        remarks.links(found.refused),
    )


def _remark(number: int, reason: str) -> str:
    rule, _, text = reason.partition(": ")
    return wrapped(f'<a id="remark-{number}"></a>{number}\\. `{rule}`: {prose(text)}')
