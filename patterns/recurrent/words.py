"""Words of delta rules: a token of N heads of each sequence, and states of K key lanes and V value lanes."""

from fusion import word

_UPDATE = {
    "k": "[*B, M, K], where M divides N",
    "k_eps": "the eps of k / sqrt(sum(k²) + eps), by which k stands for its unit vector; None for k itself",
    "v": "[*B, N, V]",
    "beta": "[*B, N]; absent for 1",
    "g": "the logarithm of the decay of each head [*B, N]; absent for 0",
    "gk": "the logarithm of the decay of each key lane [*B, N, K]; absent for 0",
    "state": "the state S before the token [*B, N, K, V], or [*B, N, V, K]",
    "values_first": "True for a state [*B, N, V, K]",
}
DELTA_STATE = word(
    "delta_state",
    "S' = D + k (beta · (v - Dᵀ k))ᵀ with D = exp(g) · exp(gk) · S: the state after a token of a gated delta rule, in "
    "the dtype of S",
    **_UPDATE,
)
DELTA_RULE = word(
    "delta_rule_output",
    "scale · S'ᵀ q, where S' is the state after the token",
    q="[*B, M, K]",
    q_eps="as k_eps",
    scale="a number",
    view="the shape of the value, which is [*B, N, V] with dims of size 1 elsewhere; -1 for a symbolic size",
    **_UPDATE,
)
