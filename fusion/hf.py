"""A call of a Hugging Face model, from nothing but the name of its type: default config, no download, no memory.

The model keeps its real sizes and is built of fake tensors; only its layers become fewer, and dense where they can.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fusion._torch.fakes import fresh_fake_mode
from fusion.errors import FusionError, OptionError
from fusion.guesses import Guesses

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
_CHOICES = {
    "mode": ("prefill", "decode"), "dtype": tuple(DTYPES), "attention": ("sdpa", "eager"),
    "cache": ("static", "dynamic", "none"),
}  # fmt: skip

_FILL = 4  # tokens of the short prefill that gives every cache its shape
_TINY = {
    "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "vocab_size": 512,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts": 8,
    "num_local_experts": 8, "q_lora_rank": 256, "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 512,
}  # fmt: skip


@dataclass(frozen=True)
class Request:
    """Which call of which model.

    Attributes:
        model_type: name of a type in transformers, e.g. "qwen3".
        mode: "prefill" (`seq` tokens into an empty cache) or "decode" (one token behind `context`).
        layers: number of layers, one of every kind first.
        dtype: one of `DTYPES`.
        attention: "sdpa" or "eager".
        batch: B, the number of sequences.
        seq: S, the tokens of a prefill.
        context: length of the cache in tokens.
        cache: "static", "dynamic" or "none".
        tiny: small real weights instead of fake tensors of real sizes.
    """

    model_type: str
    mode: str = "prefill"
    layers: int = 2
    dtype: str = "bf16"
    attention: str = "sdpa"
    batch: int = 1
    seq: int = 32
    context: int = 256
    cache: str = "static"
    tiny: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise OptionError(
                    f"building a model: {name} is {getattr(self, name)!r}; give one of {', '.join(known)}"
                )
        for name in ("layers", "batch", "seq", "context"):
            if getattr(self, name) < 1:
                raise OptionError(f"building a model: {name} is {getattr(self, name)}; give a positive number")
        if self.mode == "decode" and self.cache == "none":
            raise OptionError("building a model: decode reads a cache; give cache static or dynamic")


@dataclass(frozen=True)
class Call:
    """A model with the arguments of one call, and what a reader should know about them."""

    model: Callable[..., Any]
    kwargs: Mapping[str, Any]
    notices: tuple[str, ...] = ()


def build(request: Request) -> Call:
    """The call that `request` describes; fake tensors have no memory, whatever the size of the model.

    Raises:
        OptionError: there is no such model type, or it is no causal language model.
        FusionError: transformers is not installed, or the model cannot be built.
    """
    transformers = _transformers()
    config, notices = _config(transformers, request)
    if not request.tiny:
        try:
            return _call(transformers, config, request, notices, fresh_fake_mode(Guesses))
        except Exception as error:  # a model's own code may fail under fake tensors in any way
            told = _first_line(error)
            notices += (f"{request.model_type} cannot be built of fake tensors ({told}): real tensors, small sizes",)
    return _call(transformers, _shrunk(config), request, notices, nullcontext())


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise FusionError(
            f"building a Hugging Face model: transformers cannot be imported ({error}); "
            "install it with `pip install cann-fusion[models]`, or explain a factory of your own: package.module:name"
        ) from error


def _config(transformers: Any, request: Request) -> tuple[Any, tuple[str, ...]]:
    """The default config of the type with fewer and dense layers, and what had to be left as it is."""
    known = list(transformers.CONFIG_MAPPING.keys())
    if request.model_type not in known:
        near = difflib.get_close_matches(request.model_type, known, n=4, cutoff=0.4)
        hint = f"; did you mean {', '.join(near)}?" if near else "; its config.json names it as model_type"
        raise OptionError(f"building a Hugging Face model: there is no model type {request.model_type!r}{hint}")
    config = transformers.AutoConfig.for_model(request.model_type).get_text_config(decoder=True)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise OptionError(
            f"building a Hugging Face model: {request.model_type} is no causal language model (AutoModelForCausalLM "
            "does not know it); name one that is, or write a factory of your own: package.module:name"
        )
    return config, _fewer_layers(config, request.layers)


def _fewer_layers(config: Any, layers: int) -> tuple[str, ...]:
    """Keep `layers` layers, the first of every kind before others of the same kind, with dense feed-forwards."""
    total = int(getattr(config, "num_hidden_layers", 0))
    per_layer = {
        name: value for name, value in config.to_dict().items() if isinstance(value, list) and len(value) == total > 3
    }
    sparse = per_layer.pop("mlp_layer_types", None) is not None
    kinds = [tuple(str(each[index]) for each in per_layer.values()) for index in range(total)]
    by_kind = sorted(range(total), key=lambda index: kinds.index(kinds[index]) != index)
    kept = sorted(by_kind[:layers])
    config.num_hidden_layers = len(kept)
    for name, value in per_layer.items():
        setattr(config, name, [value[index] for index in kept])
    if sparse:
        config.mlp_layer_types = ["dense"] * len(kept)
    for name, value in (("first_k_dense_replace", len(kept)), ("mlp_only_layers", list(range(len(kept))))):
        sparse = sparse or hasattr(config, name)
        if hasattr(config, name):
            setattr(config, name, value)
    notices = (f"{len(kept)} of {total} layers",) if len(kept) < total else ()
    return (*notices, "dense feed-forwards in place of experts") if sparse else notices


def _shrunk(config: Any) -> Any:
    """Sizes that a laptop holds; the sizes of one head stay as they are."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name, size in _TINY.items():
        value = getattr(config, name, None)
        if isinstance(value, int) and value > size:
            setattr(config, name, size)
    if hasattr(config, "head_dim"):
        config.head_dim = head
    if (getattr(config, "pad_token_id", None) or 0) >= config.vocab_size:
        config.pad_token_id = 0
    return config


def _call(
    transformers: Any, config: Any, request: Request, notices: tuple[str, ...], context: AbstractContextManager[Any]
) -> Call:
    with context, torch.no_grad():
        model, told = _model(transformers, config, request)
        tokens = request.seq if request.mode == "prefill" else 1
        ids = torch.zeros(request.batch, tokens, dtype=torch.long)
        cache = _cache(transformers, model, request)
    kwargs = {"input_ids": ids, "use_cache": cache is not None}
    return Call(model, kwargs | ({} if cache is None else {"past_key_values": cache}), (*notices, *told))


def _model(transformers: Any, config: Any, request: Request) -> tuple[Any, tuple[str, ...]]:
    make = transformers.AutoModelForCausalLM.from_config
    dtype = DTYPES[request.dtype]
    try:
        return make(config, dtype=dtype, attn_implementation=request.attention).eval(), ()
    except ValueError as error:
        if request.attention == "eager" or "attention" not in str(error):
            raise
    told = (f"{request.model_type} has no {request.attention} attention: its eager attention",)
    return make(config, dtype=dtype, attn_implementation="eager").eval(), told


def _cache(transformers: Any, model: Any, request: Request) -> Any:
    """A cache of the model's own shapes: filled by a short prefill, and emptied again for a prefill."""
    if request.cache == "none":
        return None
    if request.cache == "dynamic":
        cache = transformers.DynamicCache(config=model.config)
        if request.mode == "decode":
            _prefill(model, request, cache, request.context)
        return cache
    capacity = max(request.context, request.seq if request.mode == "prefill" else 0, _FILL + 1)
    cache = transformers.StaticCache(config=model.config, max_cache_len=capacity)
    _prefill(model, request, cache, _FILL)
    if request.mode == "prefill":
        cache.reset()
    return cache


def _prefill(model: Any, request: Request, cache: Any, tokens: int) -> None:
    model(torch.zeros(request.batch, tokens, dtype=torch.long), past_key_values=cache, use_cache=True)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:80] if lines else ''}"
