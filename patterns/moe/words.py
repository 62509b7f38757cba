"""Words for routers, which choose experts for each token, and for the products and sums of experts."""

from __future__ import annotations

from fusion import word

_GATE = {
    "logits": "[*T, E]",
    "bias": "[E], added to the scores for the choice of experts only, not to their weights",
    "norm": "the function of the logits that gives the scores: sigmoid, softmax or sqrt_softplus",
    "groups": "number of groups that the E experts are divided into, 1 without groups",
    "kept": "number of the best groups from which experts are chosen",
    "group_score": "score of a group: max of its scores + bias, or sum of the two largest",
    "count": "K, number of experts that each token chooses",
}
_SQUEEZED = "True for [*T], of argmax without the dim K = 1"
EXPERT_CHOICE = word(
    "expert_choice",
    "indices [*T, K] of the K experts that a router chooses for each token",
    **_GATE,
    dtype="dtype of the indices",
    squeezed=_SQUEEZED,
)
CHOSEN_SCORES = word(
    "chosen_scores",
    "scores [*T, K], without the bias, of the experts that expert_choice lists",
    **_GATE,
    dtype="dtype of the scores",
    squeezed=_SQUEEZED,
)

LISTED_SCORES = word(
    "listed_scores",
    "scores [*T, K] of the experts that a table lists for each token",
    logits="[*T, E]",
    norm="the function of the logits that gives the scores: sigmoid or sqrt_softplus",
    table="[V, K], indices of the experts of each token of the vocabulary",
    tokens="[*T], rows of the table",
    dtype="dtype of the scores",
)

KEPT = word(
    "kept",
    "x [*B, E] at the `count` largest elements of each row, `fill` elsewhere",
    x="[*B, E]",
    count="number of elements of each row that keep their value",
    fill="the number at all other places",
)

_ORDER = (
    "[R], index t · K + k of the pair of token t and its k-th expert for each row, or k · T + t; absent where it is "
    "t · K + k = 0 … R - 1"
)
_ACTIVE = "(first, count, E): the matrices are those of the experts first … first + count - 1 of all E"

ROUTED_ROWS = word(
    "routed_rows",
    "tokens repeated once for each of their K experts [R, H], R = T · K, in the order of `order`",
    tokens="[T, H]",
    experts="[T, K], indices of the experts",
    order=_ORDER,
)
EXPERT_PRODUCT = word(
    "expert_product",
    "x[r] @ weight[e] + bias[e] [.., N] for each row r and its expert e",
    x="[.., M], prod(..) = R",
    weight="[E, M, N]",
    bias="[E, N], absent without a bias",
    experts="[T, K], indices of the experts",
    is_sorted="true where rows are sorted by expert, not listed token by token",
    active=_ACTIVE,
    is_parameter_only="true where the matrices are computed from Parameters alone",
)
INT8_EXPERT_PRODUCT = word(
    "int8_expert_product",
    "(x[r] @ weight[e]) · scale[e] · tokens[r] + bias[e] [.., N] for each row r and its expert e, product in int32",
    x="[.., M] in int8, prod(..) = R",
    tokens="[.., 1], scale of each row",
    weight="[E, M, N] in int8",
    scale="[E, N], scale of each output channel of each expert",
    bias="[E, N] in floats, absent without a bias",
    experts="[T, K], indices of the experts",
    is_sorted="true where rows are sorted by expert, not listed token by token",
    active=_ACTIVE,
    is_parameter_only="true where matrices and scales are computed from Parameters alone",
    dtype="dtype of the result",
)
EXPERT_SUM = word(
    "expert_sum",
    "y[t] = Σ_k weights[t, k] · (row of token t and its k-th expert) + addend[t]",
    rows="[R, H], R = T · K",
    weights="[T, K]; absent where all are 1",
    active="(first, count, E): rows of other experts than first … first + count - 1 of all E are left out",
    order=_ORDER,
    shape="shape of the result, whose elements are [T, H]",
    addend="[T, H], added to the sum; absent without one",
)
