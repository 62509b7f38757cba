"""The default library of rules and readers, found through the entry-point group `fusion.patterns`."""

from fusion import Library
from patterns.attention.attention import Attention
from patterns.attention.core.core import attention_cores
from patterns.attention.core.read import attentions
from patterns.attention.core.read_encoded import encoded_cache
from patterns.attention.lse.attention_update import AttentionUpdate
from patterns.attention.lse.read_lse_merge import merges
from patterns.attention.lse.read_softmax_lse import softmax_lse
from patterns.attention.qkv.qkv_write import QkvRmsNormRopeCache
from patterns.attention.reasons.unclaimed import unclaimed_attentions
from patterns.attention.reasons.uses import uses_of_attentions
from patterns.attention.varlen.read_batches import batched_attentions
from patterns.attention.varlen.read_segment_ids import segment_id_attentions
from patterns.attention.varlen.read_segments import paged_segments, segmented_attentions
from patterns.cache.cache_write import CacheWrite
from patterns.cache.page_gather import PageGather
from patterns.cache.read_block_tables import block_tables
from patterns.cache.read_page_gather import page_gathers
from patterns.cache.read_writes import cache_writes
from patterns.latent.absorbed_products import AbsorbedProducts
from patterns.latent.attention.attention import LatentAttention
from patterns.latent.attention.read_int8_attention import int8_latent_attentions
from patterns.latent.attention.read_int8_query import int8_queries
from patterns.latent.head_projection import HeadProjection
from patterns.latent.prolog.kv_write import KvRmsnormRopeCache
from patterns.latent.prolog.prolog import MlaProlog
from patterns.latent.read.read import latent_operands
from patterns.latent.read.read_head_products import head_products
from patterns.latent.read.read_products import latent_products
from patterns.linear.activation import Activation
from patterns.linear.gelu import Gelu
from patterns.linear.joined_projections import JoinedProjections
from patterns.linear.read import linears
from patterns.linear.read_gates import gate_lanes
from patterns.linear.read_gelu import written_gelus
from patterns.moe.experts.read_experts import routed_experts
from patterns.moe.experts.routed_experts import RoutedExperts
from patterns.moe.router.expert_routing import ExpertRouting
from patterns.moe.router.hash_routing import HashRouting
from patterns.moe.router.read import expert_choices
from patterns.moe.router.read_tables import listed_scores
from patterns.moe.router.read_weights import topk_masks
from patterns.norm.add_norm import AddNorm
from patterns.norm.encoded_norm import EncodedNorm
from patterns.norm.group_norm import GroupNormSilu
from patterns.norm.layer_norm import LayerNorm
from patterns.norm.rms_norm import RMSNorm
from patterns.quant.quantisation import Quantisation
from patterns.quant.quantised_linear import QuantisedLinear
from patterns.quant.read_matmul import int8_matmuls
from patterns.quant.read_packed_rows import packed_rows
from patterns.quant.read_quantise import quantised
from patterns.quant.read_static_scales import int8_rows
from patterns.quant.read_unpacked_rows import unpacked_rows
from patterns.quant.read_weight_only import int8_weight_linears
from patterns.recurrent.delta_rule import DeltaRule
from patterns.recurrent.read_convolutions import causal_convolutions
from patterns.recurrent.read_delta_rule import delta_rules
from patterns.recurrent.read_recurrences import recurrences
from patterns.rotary.read import rotations
from patterns.rotary.rope import Rope
from patterns.sparse.attention.read_listed import listed_attentions
from patterns.sparse.attention.sparse_attention import SparseAttention
from patterns.sparse.compressed.compressed_attention import CompressedAttention
from patterns.sparse.compressed.read import compressed_attentions
from patterns.sparse.compressed.read_compressors import compressors
from patterns.sparse.indexer.indexer_topk import IndexerTopk
from patterns.sparse.indexer.read import lightning_indexers, listed_masks
from patterns.sparse.lists.gather_selection_kv_cache import GatherSelectionKvCache
from patterns.sparse.lists.read_buffered_rows import buffered_rows
from patterns.sparse.lists.read_lists import indexer_lists
from patterns.streams.read_gates import stream_gates
from patterns.streams.read_sinkhorn import sinkhorn
from patterns.streams.read_update import stream_updates
from patterns.streams.sinkhorn import Sinkhorn
from patterns.streams.stream_gates import StreamGates, StreamGatesHf32
from patterns.streams.stream_update import StreamUpdate

_RULES = (
    RMSNorm(),
    LayerNorm(),
    GroupNormSilu(),
    AddNorm(),
    EncodedNorm(),
    Rope(),
    Activation(),
    Gelu(),
    JoinedProjections(),
    HeadProjection(),
    Quantisation(),
    QuantisedLinear(),
    ExpertRouting(),
    HashRouting(),
    RoutedExperts(),
    Attention(),
    AttentionUpdate(),
    DeltaRule(),
    LatentAttention(),
    AbsorbedProducts(),
    SparseAttention(),
    CompressedAttention(),
    GatherSelectionKvCache(),
    IndexerTopk(),
    KvRmsnormRopeCache(),
    QkvRmsNormRopeCache(),
    MlaProlog(),
    CacheWrite(),
    PageGather(),
    Sinkhorn(),
    StreamGates(),
    StreamGatesHf32(),
    StreamUpdate(),
)
_READERS = (
    rotations,
    attention_cores,
    attentions,
    int8_latent_attentions,
    listed_attentions,
    listed_masks,
    compressed_attentions,
    compressors,
    unclaimed_attentions,
    uses_of_attentions,
    encoded_cache,
    softmax_lse,
    segment_id_attentions,
    batched_attentions,
    segmented_attentions,
    paged_segments,
    merges,
    delta_rules,
    recurrences,
    causal_convolutions,
    sinkhorn,
    stream_gates,
    stream_updates,
    lightning_indexers,
    indexer_lists,
    latent_operands,
    latent_products,
    block_tables,
    cache_writes,
    buffered_rows,
    page_gathers,
    quantised,
    int8_rows,
    packed_rows,
    unpacked_rows,
    int8_matmuls,
    int8_weight_linears,
    linears,
    gate_lanes,
    written_gelus,
    expert_choices,
    listed_scores,
    topk_masks,
    routed_experts,
    int8_queries,
    head_products,
)


def library() -> Library:
    """Return the library of all rules and readers of this package."""
    return Library(_RULES, _READERS)
