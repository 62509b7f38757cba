"""What readers say of experts, of what they are chosen by, and of what they give."""

from __future__ import annotations

from fusion import word

_GATE = {
    "logits": "[*T, E]",
    "bias": "[E], added to what experts are chosen by, not to what they count",
    "norm": "what the scores are of the logits: sigmoid or softmax",
    "groups": "how many groups of experts there are, 1 for none",
    "kept": "in how many of them experts are chosen",
    "group_score": "what a group is chosen by: max or sum of its two largest",
    "count": "how many experts are chosen",
}
EXPERT_CHOICE = word("expert_choice", "the experts that a router chooses [*T, K]", **_GATE, dtype="of the list")
CHOSEN_SCORES = word("chosen_scores", "the scores of these, without the bias [*T, K]", **_GATE, dtype="of the scores")

KEPT = word(
    "kept",
    "x where it is among the largest of its row, another number elsewhere [*B, E]",
    x="[*B, E]",
    count="how many are kept",
    fill="what stands in the place of all others",
)

ROUTED_ROWS = word(
    "routed_rows",
    "the rows of each token, one for every expert that it chose [R, H], R = T · K",
    tokens="[T, H]",
    experts="[T, K]",
    order="which pair of a token and a choice each row is [R]; absent as they are listed",
)
EXPERT_PRODUCT = word(
    "expert_product",
    "each row by the matrix of its expert (+ its bias) [.., N]",
    x="[.., M], prod(..) = R",
    weight="[E, M, N]",
    bias="[E, N], of which the line of its expert is added to each row",
    experts="[T, K]",
    is_sorted="whether rows are sorted by expert",
    is_parameter_only="whether the matrices are computed from Parameters alone",
)
INT8_EXPERT_PRODUCT = word(
    "int8_expert_product",
    "(each row by the matrix of its expert) · scale · tokens (+ its bias), sums in int32 [.., N]",
    x="[.., M] in int8, prod(..) = R",
    tokens="[.., 1]",
    weight="[E, M, N] in int8",
    scale="[E, N], of which the line of its expert is that of each row",
    bias="[E, N], as of expert_product, in floats",
    experts="[T, K]",
    is_sorted="as of expert_product",
    is_parameter_only="whether matrices and scales are computed from Parameters alone",
    dtype="of the result",
)
EXPERT_SUM = word(
    "expert_sum",
    "the sum over its choices of the rows of a token, each times a weight",
    rows="[R, H]", weights="[T, K]", order="as of routed_rows", shape="of the value",
    beside="[T, H], which is added to the sum",
)  # fmt: skip
