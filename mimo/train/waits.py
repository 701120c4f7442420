"""What a thread waits for, and for which ranks, as its stack tells it.

So nothing has to be noted while training. On a GPU most waits are queued on the device: there only
the host's own show.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

_DISTRIBUTED = str(Path(dist.__file__).parent)
_OURS = {"bridge", "data", "encoders", "mimo"}


@dataclass(frozen=True)
class Waits:
    """``what`` a rank waits for, and the ``ranks`` that have to act for it to come.

    is_transfer: of a bridge; these have a shorter timeout than collective calls.
    """

    what: str
    ranks: tuple[int, ...]
    is_transfer: bool = False


def waits_of(stack: FrameType | None) -> Waits | None:
    """What a thread with this ``stack`` waits for; None if for no other rank."""
    inner = frame = stack
    while frame is not None:
        # By their names, so that telling needs none of what they belong to.
        if (tell := _TELL.get(frame.f_code.co_qualname)) is not None:
            try:
                return tell(frame.f_locals)
            except KeyError:  # it has just begun
                return None
        frame = frame.f_back
    return None if inner is None else _collective(inner)


def place_of(stack: FrameType | None) -> str:
    """The innermost line of a ``stack`` that is ours, such as `mimo.train.step:57 train_step`.

    With the function of another package that it is in, if it is in one.
    """
    frame = stack
    while frame is not None and stack is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] in _OURS and not frame.f_code.co_name.startswith("__"):
            inside = "" if frame is stack else f", in {stack.f_code.co_name}"
            return f"{module}:{frame.f_lineno} {frame.f_code.co_name}{inside}"
        frame = frame.f_back
    return ""


def _collective(inner: FrameType) -> Waits | None:
    """The collective call that the stack of ``inner`` ends in."""
    name, group, frame = "", None, inner
    while frame is not None and frame.f_code.co_filename.startswith(_DISTRIBUTED):
        given = frame.f_locals.get("group")
        if isinstance(given, dist.ProcessGroup):
            name, group = frame.f_code.co_name, given
        frame = frame.f_back
    if group is not None:
        of = group.group_desc if group is not dist.group.WORLD else "all ranks"
        ranks = tuple(dist.get_process_group_ranks(group))
        return Waits(f"{name.strip('_')} of {of}", ranks)
    line = linecache.getline(inner.f_code.co_filename, inner.f_lineno)
    if ".wait(" in line and not inner.f_code.co_filename.endswith("threading.py"):
        return Waits("a collective call that was begun before", tuple(range(dist.get_world_size())))
    return None


def _transfer(own: Mapping[str, Any]) -> Waits:
    """It waits for one message after the other; whether those after this have come, is unknown."""
    return Waits(own["what"], (own["message"].peer,), is_transfer=True)


def _pipeline(own: Mapping[str, Any]) -> Waits:
    link, others, parts, ranks = own["self"], own["others"], [], []
    exchanges = (
        ("hidden states from", own["recv_prev"], link.prev_rank),
        ("gradients from", own["recv_next"], link.next_rank),
        ("its hidden states to be taken by", _sends(others, "next"), link.next_rank),
        ("its gradients to be taken by", _sends(others, "prev"), link.prev_rank),
    )
    for what, takes_place, rank in exchanges:
        if takes_place:
            parts.append(f"{what} rank {rank}")
            ranks.append(rank)
    return Waits(
        f"pipeline of {link.pp_group.group_desc}: {', '.join(parts)}", tuple(dict.fromkeys(ranks))
    )


def _sends(others: Mapping[str, Any], way: str) -> bool:
    return others.get(f"tensor_send_{way}") is not None


def _loader(own: Mapping[str, Any]) -> Waits | None:
    """What another rank decodes for this one; None if it waits for its own decoding."""
    steps = list(own["self"]._steps)
    if not steps or not steps[0].awaited or steps[0].num_missing > len(steps[0].awaited):
        return None
    task = steps[0].awaited[0]
    return Waits(f"samples of step {task.step} that it decodes", (task.by,))


def _save(own: Mapping[str, Any]) -> Waits | None:
    """Whose part of a checkpoint is missing, once this rank's own is written."""
    if own["event"].is_set():
        return Waits("the save of all ranks", tuple(range(dist.get_world_size())))
    frame = sys._current_frames().get(own["save"].thread.ident)
    while frame is not None:
        if frame.f_code.co_qualname == "Saver._wait_for_file":
            rank = frame.f_locals["rank"]
            return Waits("its part of the checkpoint", (rank,))
        frame = frame.f_back
    return None


def _world(own: Mapping[str, Any]) -> Waits:
    return Waits("the sum over all ranks", tuple(range(dist.get_world_size())))


_TELL: dict[str, Callable[[Mapping[str, Any]], Waits | None]] = {
    "wait_for": _transfer,
    "PlannedCommunicator._communicate": _pipeline,
    "StepLoader.next": _loader,
    "Saver._wait_for_all": _save,
    "sum_over_world": _world,
}
