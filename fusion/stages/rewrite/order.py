"""Order: nodes of a graph behind what they read."""

from __future__ import annotations

import heapq
from itertools import pairwise

import torch.fx as fx

from fusion.mutation import is_write


def sort(source: fx.Graph) -> None:
    """Move nodes behind what they read, as little as possible; writes to memory keep their order."""
    place = {node: position for position, node in enumerate(source.nodes)}
    waiting: dict[fx.Node, int] = {}
    followers: dict[fx.Node, list[fx.Node]] = {node: list(node.users) for node in place}
    writes = [node for node in place if is_write(node)]
    for first, second in pairwise(writes):
        followers[first].append(second)
    for users in followers.values():
        for user in users:
            waiting[user] = waiting.get(user, 0) + 1
    ready = [(position, node) for node, position in place.items() if not waiting.get(node)]
    heapq.heapify(ready)
    ordered: list[fx.Node] = []
    while ready:
        _, node = heapq.heappop(ready)
        ordered.append(node)
        for user in followers[node]:
            waiting[user] -= 1
            if not waiting[user]:
                heapq.heappush(ready, (place[user], user))
    for previous, node in pairwise(ordered):
        if previous.next is not node:
            previous.append(node)
