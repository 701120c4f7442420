"""Move rows between encoders, the language model and generators, in any layout."""

from bridge.balance import assign_items, imbalance
from bridge.colocated import ColocatedBridge
from bridge.communicator import BridgeReceiver, BridgeSender
from bridge.flat import ItemRows, SampleKeys, check_plans, check_rows
from bridge.levels import LevelReceiver, split_levels, take_chunk
from bridge.outputs import ColocatedOutput, OutputReceiver, OutputSender
from bridge.plan import BridgePlan, Exchange
from bridge.runs import ItemRuns
from bridge.shard_map import (
    LaneSegments,
    ReplicatedSource,
    SequenceShardedSource,
    ShardMap,
    Source,
    replicated_destination,
    sharded_destination,
)
from bridge.transfer import BridgeEnd, Kind, WaitClock
from bridge.waiting import BridgeError, TransferWatch, UnexpectedRows
