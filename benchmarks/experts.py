"""Measure what sparse and hybrid layers cost: the exchange of tokens, and the gated delta rule.

Two and four ranks, each with a lane of its own, share out the experts of a language model. Then
the delta rule competes with transformers' form; see `benchmarks.hybrid`.
"""

from __future__ import annotations

import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks import harness, hybrid
from benchmarks.harness import Bound, Contest, Run
from mimo.config.schema import Recipe
from mimo.device import barrier, initialize_distributed, set_threads
from mimo.engines.megatron import PackedSegments, dispatch
from mimo.engines.megatron.experts import routers_in
from mimo.model.build import build_model
from mimo.parallel.build import build_layout
from mimo.parallel.groups import build_topology

_TOKENS, _VOCABULARY, _EXPERTS = 512, 1000, 16
_MOST = 1.05  # choices add their weights, and numbers of rows
_HEADS = {"num_attention_heads": 8, "num_query_groups": 4, "head_size": 64, "num_layers": 4}
_MODEL = {**_HEADS, "num_experts": _EXPERTS, "experts_per_token": 4, "mrope_section": [16, 8, 8]}


class Lane:
    """One rank of ``ranks``, with its part of the experts."""

    def __init__(self, store: Path, width: int, ranks: int, rank: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        set_threads(1, ranks)
        initialize_distributed(rank, ranks, f"file://{store}", 600.0)
        language = {"family": "qwen3_moe", "grid": {"dp": ranks, "ep": ranks}}
        data = {"sources": [{"path": "nothing.tar"}], "tokenizer": "none"}
        model = _MODEL | {"hidden_size": width, "ffn_hidden_size": width // 2}
        recipe = {"name": "bench", "language": language | {"model": model}}
        recipe |= {"train": {"steps": 1, "global_batch_size": ranks}}
        checked = Recipe.model_validate(recipe | {"data": data | {"sequence_length": _TOKENS}})
        topology = build_topology(build_layout(checked))
        self.module: Any = build_model(checked, topology, _VOCABULARY).modules["language"]
        self.exchanged, dispatch._exchanged = dispatch._exchanged, self._timed
        for router in routers_in(self.module.raw):
            router.register_forward_hook(self._count)
        self.width, self.ranks, self.rank = width, ranks, rank
        ids = torch.randint(_VOCABULARY, (_TOKENS,), generator=torch.Generator().manual_seed(rank))
        segments = PackedSegments.from_lengths((_TOKENS // 2,) * 2, ids.device)
        self.inputs = {"input_ids": ids[None], "labels": ids, "loss_at": torch.arange(_TOKENS)}
        positions = torch.arange(_TOKENS).expand(3, 1, -1)
        self.inputs |= {"position_ids": positions, "packed_seq_params": segments}

    def _timed(self, rows: Any, counts: dispatch.Counts, *others: Any) -> Any:
        started = time.perf_counter()
        received = self.exchanged(rows, counts, *others)
        self.seconds += time.perf_counter() - started
        leaving = len(rows) - counts.sent[self.rank]
        size = leaving * rows[:1].nbytes / 2**20
        self.sizes["rows" if rows.shape[1:] == (self.width,) else "others"] += size
        return received

    def _count(self, router: Any, tokens: Any, choice: Any) -> None:
        """Add up (token, other rank) pairs: a row there, a sum back, and the gradients of both."""
        owners = choice.experts // (_EXPERTS // self.ranks)
        is_chosen = torch.zeros(len(owners), self.ranks).scatter_(1, owners, 1)
        pairs = is_chosen.sum() - is_chosen[:, self.rank].sum()
        self.sizes["least"] += 4 * float(pairs) * self.width * 4 / 2**20

    def __call__(self) -> Run:
        """Run a step; all ranks call it. The result is the mean over ranks, sizes in MiB."""
        self.seconds, self.sizes = 0.0, {"rows": 0.0, "others": 0.0, "least": 0.0}
        barrier()
        started = time.perf_counter()
        self.module.begin_step(False)
        self.module.run_language(lambda _, c: c.run(**self.inputs), [0], [(_TOKENS, 1)], False)
        self.module.finish_gradients(_TOKENS)
        self.module.update(1e-4, 1.0)
        barrier()
        total = time.perf_counter() - started
        means = torch.tensor([total, self.seconds, *self.sizes.values()]).double() / self.ranks
        dist.all_reduce(means)
        total, seconds, rows, others, least = means.tolist()
        sizes = {"rows": rows, "sent": rows + others, "least": least}
        return Run(total, result={"share": seconds / total, **sizes})


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 5,
    quick: harness.Quick = False,
    json_path: harness.Figures = None,
) -> int:
    """Run everything; return 1 if more is sent than needed, or the delta rule misses a bound."""
    (width, rounds), contests, bounds = (64, 1) if quick else (512, rounds), [], []
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory(prefix="mimo-bench-") as folder:
            makes = [partial(Lane, Path(folder) / "store", width, ranks, n) for n in range(ranks)]
            with harness.workers(*makes) as step:
                ((name, runs),) = harness.take_turns({f"ep {ranks}": step}, 1 + rounds).items()
        contests.append(Contest(f"{ranks} ranks", {name: runs[1:]}))
        for what, figure, limit in (("rows", "rows", 1.0), ("everything sent", "sent", _MOST)):
            ratio = contests[-1].median(name, figure) / contests[-1].median(name, "least")
            title = f"{name}: bytes of {what}, times a row for each token and other rank"
            bounds.append(Bound(title, ratio, limit, at_most=True))
    rivalries = hybrid.contests(rounds, quick)
    bounds += hybrid.judge(rivalries, speed=not quick)
    columns = {
        "time, s": Contest.median,
        "share of exchanges": partial(Contest.median, figure="share"),
        "sent by a rank, MiB": partial(Contest.median, figure="sent"),
        "peak, MiB": lambda contest, name: contest.median(name, "peak") / 2**20,
    }
    title = f"Steps of {_TOKENS} tokens a rank, {_EXPERTS} experts; the gated delta rule; fp32"
    return harness.conclude(title, [*contests, *rivalries], columns, bounds, json_path)


if __name__ == "__main__":
    harness.command(main)()
