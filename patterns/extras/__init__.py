"""Rules for operators of packages outside torch_npu (atb, custom_pypto), a library of its own.

It is found through an entry point of its own, and the rest of `patterns` imports nothing of it.
"""

from fusion import Library
from patterns.extras.latent_attention_atb import LatentAttentionAtb
from patterns.extras.lightning_indexer_prolog_pto import LightningIndexerPrologPto
from patterns.extras.mla_preprocess import MlaPreprocess
from patterns.extras.ring_mla import RingMla
from patterns.extras.sparse_attention_pto import SparseAttentionPto


def library() -> Library:
    """Return the library of the rules of this folder."""
    rules = (RingMla(), LatentAttentionAtb(), MlaPreprocess(), SparseAttentionPto(), LightningIndexerPrologPto())
    return Library(rules)
