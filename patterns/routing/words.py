"""What the reader of routers says of experts, and of what they are chosen by."""

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
