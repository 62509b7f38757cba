"""Calls of Hugging Face models by the name of their type: default config, no download, no memory.

The model keeps its real sizes and is built of fake tensors; it has fewer layers, and dense ones where possible.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion._torch.fakes import fresh_fake_mode
from fusion.errors import FusionError, OptionError
from fusion.inputs.data_dependent import Guesses

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
    """A call of a Hugging Face model.

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
        tiny: True for small real weights instead of fake tensors of real sizes.
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
        """Refuse wrong values."""
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
    """A model with the arguments of one call, and notices for the user."""

    model: Callable[..., Any]
    kwargs: Mapping[str, Any]
    notices: tuple[str, ...] = ()
    args: tuple[Any, ...] = ()


def build(request: Request) -> Call:
    """Build the call that `request` describes; fake tensors have no memory, whatever the size of the model.

    Raises:
        OptionError: there is no such model type, or it is no causal language model.
        FusionError: transformers is not installed.
    """
    return next(calls(request, []))


def calls(request: Request, failures: list[str]) -> Iterator[Call]:
    """Yield calls for `request`, closest first: a model may run and yet not be traced with one kind of cache.

    A model whose own code fails is built in other sizes, and given another cache. Then `notices` name the difference,
    and the first of `failures`, a list to which errors of the model are appended; the caller appends errors in tracing.

    Raises:
        OptionError: there is no such model type, or it is no causal language model.
        FusionError: transformers is not installed.
    """
    transformers = _transformers()
    _check_type(transformers, request.model_type)
    first: Exception | None = None
    built: Size | None = None
    for size, cache in _ways(request):
        if built is not None and size != built:
            continue
        try:
            call = _call(transformers, request, size, cache)
        except Exception as error:  # the model's own code may raise anything
            first = first or error
            failures.append(_why(error))
            continue
        built = size
        yield replace(call, notices=(*call.notices, *_changed(request, size, cache, failures)))
    if built is not None:
        return
    assert first is not None
    raise first


@dataclass(frozen=True)
class Size:
    """Size in which a model is built.

    Attributes:
        fake: True for fake tensors, else real weights.
        shrunk: "head" for small sizes that keep the size of a head, "hidden" that of all heads; "" for real sizes.
        layers: "few", the requested number; "kinds", at least one of every kind; or "all".
        dtype: a dtype other than the requested one, or "".
    """

    fake: bool
    shrunk: str = ""
    layers: str = "few"
    dtype: str = ""

    def __str__(self) -> str:
        layers = {"few": "", "kinds": ", one layer of every kind", "all": ", all layers"}[self.layers]
        dtype = f", {self.dtype}" if self.dtype else ""
        small = "real tensors of small sizes" + " and small heads" * (self.shrunk == "hidden")
        return ("fake tensors of real sizes" if self.fake else small) + layers + dtype


def _sizes(request: Request) -> list[Size]:
    """List the sizes to try, that of `request` first."""
    small = [Size(fake=False, shrunk="head", layers=each) for each in ("few", "kinds")]
    small.append(Size(fake=False, shrunk="hidden"))
    real = [Size(fake=True, layers=each) for each in ("few", "kinds", "all")]
    first = small + real if request.tiny else [*real[:2], *small, real[2]]
    return first if request.dtype == "f32" else [*first, replace(first[0], dtype="f32")]


def _ways(request: Request) -> list[tuple[Size, str]]:
    """List (size, kind of cache) to try, those of `request` first; without a cache last, and only for a prefill."""
    sizes = _sizes(request)
    caches = ["none"] if request.cache == "none" else [request.cache, "own", "grown"]
    without = [(size, "none") for size in sizes] if request.mode == "prefill" else []
    return list(dict.fromkeys([*((size, cache) for size in sizes for cache in caches), *without]))


_CACHES = {
    "static": "a static cache", "dynamic": "a dynamic cache", "own": "the cache that the model makes",
    "grown": "a dynamic cache of no layers at first", "none": "no cache",
}  # fmt: skip


def _changed(request: Request, size: Size, cache: str, failures: Sequence[str]) -> tuple[str, ...]:
    """Format a notice of the size and cache that differ from `request`, with the first of `failures` as the reason."""
    wanted = _ways(request)[0]
    if not failures or (size, cache) == wanted:
        return ()
    parts = [str(size)] * (size != wanted[0]) + [_CACHES[cache]] * (cache != wanted[1])
    replaced = [str(wanted[0])] * (size != wanted[0]) + [_CACHES[wanted[1]]] * (cache != wanted[1])
    return (f"{request.model_type} cannot be run with {', '.join(replaced)} ({failures[0]}): {', '.join(parts)}",)


def _transformers() -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise FusionError(
            f"building a Hugging Face model: transformers cannot be imported ({error}); "
            "install it with `pip install cann-fusion[models]`, or explain a factory of your own: package.module:name"
        ) from error


def _check_type(transformers: Any, model_type: str) -> None:
    known = list(transformers.CONFIG_MAPPING.keys())
    if model_type not in known:
        near = difflib.get_close_matches(model_type, known, n=4, cutoff=0.4)
        hint = f"; did you mean {', '.join(near)}?" if near else "; its config.json names it as model_type"
        raise OptionError(f"building a Hugging Face model: there is no model type {model_type!r}{hint}")
    if _auto(transformers, _default(transformers, model_type)) is None:
        raise OptionError(
            f"building a Hugging Face model: {model_type} is no causal language model (AutoModelForCausalLM "
            "does not know it, and it has no decoder that reads a cache); name one that is, or write a factory of "
            "your own: package.module:name"
        )


def _auto(transformers: Any, config: Any) -> Any:
    """Return the class of transformers that builds the causal language model of `config`, or, where there is none, its
    decoder without a head: AutoModelForCausalLM or AutoModel; None if it has no decoder that reads a cache either.
    """
    if type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForCausalLM
    if type(config) not in transformers.MODEL_MAPPING or _read(config, "is_encoder_decoder"):
        return None
    decoder = transformers.MODEL_MAPPING[type(config)]
    declared = inspect.signature(decoder.forward).parameters
    return transformers.AutoModel if {"input_ids", "past_key_values"} <= declared.keys() else None


def _default(transformers: Any, model_type: str) -> Any:
    """Make the default config of the type, with the sizes that some defaults leave out."""
    config = transformers.AutoConfig.for_model(model_type).get_text_config(decoder=True)
    for name, source in _LEFT_OUT.items():
        if _read(config, name, 0) is None and _read(config, source) is not None:
            setattr(config, name, _read(config, source))
    if _read(config, "attn_layer_indices", ()) is None:
        config.attn_layer_indices = [1]
    return config


_LEFT_OUT = {"num_key_value_heads": "num_attention_heads", "decoder_vocab_size": "vocab_size"}
"""Sizes that a default config may lack, with the attribute that has the value."""


def _read(config: Any, name: str, default: Any = None) -> Any:
    """Read an attribute of a config; `default` if the config has none, or raises."""
    try:
        return getattr(config, name, default)
    except Exception:  # configs compute attributes, and may raise anything
        return default


def _set(config: Any, name: str, value: Any) -> None:
    """Set an attribute of a config, unless it is read-only."""
    with suppress(AttributeError):
        setattr(config, name, value)


def _fewer_layers(config: Any, layers: int, covers_kinds: bool) -> tuple[str, ...]:
    """Reduce `config` to `layers` layers, the first of every kind before others, with dense feed-forwards.

    With `covers_kinds`, at least one layer of every kind is kept. Returns notices of the reductions.
    """
    total = int(_read(config, "num_hidden_layers", 0))
    per_layer = {
        name: value for name, value in config.to_dict().items() if isinstance(value, list) and len(value) == total > 3
    }
    sparse = per_layer.pop("mlp_layer_types", None) is not None
    kinds = [tuple(str(each[index]) for each in per_layer.values()) for index in range(total)]
    by_kind = sorted(range(total), key=lambda index: kinds.index(kinds[index]) != index)
    least = max(len(set(kinds)), _until_every_kind(config, total)) if covers_kinds else 0
    chosen = sorted(by_kind[: max(layers, least)])
    for name in ("num_hidden_layers", "decoder_layers", "encoder_layers"):
        if isinstance(_read(config, name), int):
            _set(config, name, len(chosen))
    for name, value in per_layer.items():
        _set(config, name, [value[index] for index in chosen])
    if _read(config, "num_kv_shared_layers", 0):
        _set(config, "num_kv_shared_layers", 0)
    if sparse:
        config.mlp_layer_types = ["dense"] * len(chosen)
    for name, value in (("first_k_dense_replace", len(chosen)), ("mlp_only_layers", list(range(len(chosen))))):
        sparse = sparse or hasattr(config, name)
        if hasattr(config, name):
            setattr(config, name, value)
    notices = (f"{len(chosen)} of {total} layers",) if len(chosen) < total else ()
    return (*notices, "dense feed-forwards in place of experts") if sparse else notices


def _until_every_kind(config: Any, total: int) -> int:
    """Count the first layers that have one of every kind, if the config computes the kind of each of `total` layers;
    else 0.
    """
    computed: list[Any] = _read(config, "layers_block_type") or []
    if len(computed) != total or "layers_block_type" in config.to_dict():
        return 0
    return 1 + max(computed.index(kind) for kind in computed)


def _shrink(config: Any, what: str) -> None:
    """Reduce the sizes in `config` to fit a laptop's memory, but for one: with `what` "head" the size of a head, else
    the size of all heads.
    """
    hidden, heads = _read(config, "hidden_size"), _read(config, "num_attention_heads")
    if hidden is None:
        raise FusionError("its config has no hidden_size that could be made small")
    head = _read(config, "head_dim") or (hidden // heads if hidden and heads else None)
    for name, size in _TINY.items():
        value = _read(config, name)
        if isinstance(value, int) and value > size:
            _set(config, name, size)
    if _read(config, "head_dim") and head:
        _set(config, "head_dim", head if what == "head" else config.hidden_size // config.num_attention_heads)
    if (_read(config, "pad_token_id") or 0) >= _read(config, "vocab_size", 0):
        _set(config, "pad_token_id", 0)


def _call(transformers: Any, request: Request, size: Size, cache: str) -> Call:
    config = _default(transformers, request.model_type)
    notices = _fewer_layers(config, request.layers, size.layers == "kinds") if size.layers != "all" else ()
    if size.shrunk:
        _shrink(config, size.shrunk)
    dtype = DTYPES[size.dtype or request.dtype]
    with fresh_fake_mode(Guesses) if size.fake else nullcontext(), torch.no_grad():
        with importlib.import_module("transformers.initialization").no_init_weights() if size.fake else nullcontext():
            model, fallback = _model(transformers, config, dtype, request)  # fake tensors need no initial values
        model.tie_weights()
        given = _cache(transformers, model, request, cache)
        tokens = request.seq if request.mode == "prefill" else 1
        ids = torch.zeros(request.batch, tokens, dtype=torch.long)
    kwargs = {"input_ids": ids, "use_cache": cache != "none"}
    return Call(model, kwargs | ({} if given is None else {_cache_name(model): given}), (*notices, *fallback))


def _model(transformers: Any, config: Any, dtype: torch.dtype, request: Request) -> tuple[Any, tuple[str, ...]]:
    auto = _auto(transformers, config)
    make = auto.from_config
    headless = f"{request.model_type} has no causal language model: its decoder, without a head"
    known = () if auto is transformers.AutoModelForCausalLM else (headless,)
    try:
        return make(config, dtype=dtype, attn_implementation=request.attention).eval(), known
    except ValueError as error:
        if request.attention == "eager" or "attention" not in str(error):
            raise
    notices = (*known, f"{request.model_type} has no {request.attention} attention: its eager attention")
    return make(config, dtype=dtype, attn_implementation="eager").eval(), notices


def _cache(transformers: Any, model: Any, request: Request, kind: str) -> Any:
    """Make a cache of `kind` with the shapes of `model`: filled for a decode, and empty for a prefill.

    `kind` is "static", "dynamic", "grown" (dynamic, without the config), "own" (the model makes it) or "none". None
    where the call passes none, as in a prefill with "own". A short prefill is run in any case, so that a model that
    raises does so here.
    """
    decodes = request.mode == "decode"
    given = {"config": model.config} if kind != "grown" else {}
    filled = request.context if decodes else _FILL
    if kind == "static":
        capacity = max(request.context, 0 if decodes else request.seq, _FILL + 1)
        cache = transformers.StaticCache(**given, max_cache_len=capacity)
        _prefill(model, request, _FILL, cache)
        if not decodes:
            cache.reset()
        return cache
    if kind in ("dynamic", "grown"):
        cache = transformers.DynamicCache(**given)
        _prefill(model, request, filled, cache)
        return cache if decodes else transformers.DynamicCache(**given)
    result = _prefill(model, request, filled, None, use_cache=kind != "none")
    return getattr(result, _cache_name(model)) if decodes else None


def _prefill(model: Any, request: Request, tokens: int, cache: Any, use_cache: bool = True) -> Any:
    ids = torch.zeros(request.batch, tokens, dtype=torch.long)
    return model(ids, use_cache=use_cache, **{_cache_name(model): cache})


def _cache_name(model: Any) -> str:
    """Return the name of the argument of `model` that takes its cache: models with recurrent states alone have another.

    An argument that the forward does not declare is dropped without an error.
    """
    declared = inspect.signature(model.forward).parameters
    return next((name for name in ("past_key_values", "cache_params") if name in declared), "past_key_values")


def _why(error: Exception) -> str:
    """Shorten the error of a model to one line."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"there is no {lines[0][:80]}" if isinstance(error, KeyError) else lines[0][:80]
