"""From flat embeddings in any encoder layout to rows in any language-model layout."""

from bridge.balance import assign_items, imbalance
from bridge.communicator import (
    BridgeEnd,
    BridgeError,
    BridgeReceiver,
    BridgeSender,
    check_plans,
)
from bridge.flat import FlatEmbeddings
from bridge.plan import (
    BridgePlan,
    Exchange,
    ItemRuns,
    ShardMap,
    gathered_destination,
    replicated_source,
    sequence_parallel_destination,
)

__all__ = [
    "BridgeEnd",
    "BridgeError",
    "BridgePlan",
    "BridgeReceiver",
    "BridgeSender",
    "Exchange",
    "FlatEmbeddings",
    "ItemRuns",
    "ShardMap",
    "assign_items",
    "check_plans",
    "gathered_destination",
    "imbalance",
    "replicated_source",
    "sequence_parallel_destination",
]
