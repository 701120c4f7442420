"""Measure how long saving blocks training.

Two ranks with a language model save their state by turns in every way; each way writes the same
bytes, and each rank its own half of them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.distributed.checkpoint import state_dict_saver as dcp

from benchmarks import harness
from benchmarks.harness import Bound, Contest, Run
from data.text.digits import write_tokenizer
from mimo.checkpoint.folder import Progress
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.save import Saver
from mimo.device import barrier, initialize_distributed, set_threads
from mimo.parallel.build import build_layout
from mimo.parallel.groups import build_topology
from mimo.train.loop import Trainer

RANKS = 2
OURS = ("async", "sync")
SAVE = "torch.save"
CONTESTANTS = (*OURS, SAVE, "DCP")
_TIMEOUT_SECONDS = 1800.0
# Stand-in for a step of 128 tokens before its update: 6 operations for each weight and token.
_TOKENS, _WIDTH, _PRODUCTS = 128, 1024, 304
_SIZES = {"hidden_size": 1024, "ffn_hidden_size": 2816, "num_layers": 9}  # 106 M parameters
_QUICK = {"hidden_size": 64, "ffn_hidden_size": 176, "num_layers": 2}
_RECIPE = """
name: bench
language:
  family: qwen3
  grid: {dp: 2}
  model:
    num_attention_heads: 16
    num_query_groups: 8
    head_size: 64
    rotary_base: 1.0e+6
    mrope_section: [16, 8, 8]
data: {sources: [{path: nothing.tar}], sequence_length: 128}
train: {steps: 1, global_batch_size: 2, keep_checkpoints: 1, distributed_optimizer: true}
"""


class Savers:
    """One rank with a model's state, and every way to save it.

    directory: with the tokenizer and the recipe. sizes: of the model.
    """

    def __init__(self, directory: Path, sizes: dict[str, int], rank: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        set_threads(1, RANKS)
        initialize_distributed(rank, RANKS, f"file://{directory / 'store'}", _TIMEOUT_SECONDS)
        self.rank, self.folder, self.turn = rank, directory / "saves", 0
        overrides = [f"language.model.{name}={size}" for name, size in sizes.items()]
        overrides.append(f"data.tokenizer={directory / 'tokenizer'}")
        recipe = directory / "bench.yaml"
        ways = {"async": "train.async_save=true", "sync": "train.async_save=false"}
        recipes = {name: load_recipe(recipe, [*overrides, way]) for name, way in ways.items()}
        topology = build_topology(build_layout(recipes["async"]))
        modules = Trainer(recipes["async"], topology, self.folder).model.modules
        # Neither zeros, of which memory has one page, nor parts of larger tensors, which
        # `torch.save` would write whole: what the rivals get is as good for them as can be.
        generator = torch.Generator().manual_seed(0)
        for piece in modules["language"].pieces("load", True):
            piece.values.normal_(generator=generator)
        self.state = {
            f"{piece.key}[{piece.row},{piece.column}]": piece.values.clone()
            for piece in modules["language"].pieces("save", True)
        }
        self.savers = {
            name: Saver(modules, self.folder / name, recipe) for name, recipe in recipes.items()
        }

    def __call__(self, name: str) -> Run:
        """Save once with nothing beside it, and once before a step; all ranks call it together.

        Returns the seconds for which the second save blocks training, of the slowest rank; the
        result has those until the first save is complete, and the bytes of its files.
        """
        _, total, num_bytes = self._save(name, before_step=False)
        blocked, _, _ = self._save(name, before_step=True)
        seconds = torch.tensor([blocked, total])
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return Run(float(seconds[0]), result={"total": float(seconds[1]), "files": num_bytes})

    def _save(self, name: str, before_step: bool) -> tuple[float, float, int]:
        """Return seconds that a save blocks this rank and that it takes, and the bytes of files."""
        self.turn += 1
        target = self.folder / name
        if self.rank == 0:
            target.mkdir(parents=True, exist_ok=True)
            os.sync()  # nobody waits for what the one before has left to write
        barrier()
        started = time.perf_counter()
        saver = self.savers.get(name)
        if saver is not None:
            saver.begin(Progress(self.turn, 0))
            saver.publish()
        elif name == SAVE:
            torch.save(self.state, target / f"rank_{self.rank}.pt")
            barrier()
        else:
            dcp.save(dict[str, Any](self.state), checkpoint_id=target)
        blocked = time.perf_counter() - started
        if before_step:
            tokens, weights = torch.randn(_TOKENS, _WIDTH), torch.randn(_WIDTH, _WIDTH)
            for _ in range(_PRODUCTS):
                torch.mm(tokens, weights)
            if saver is not None:
                blocked += saver.wait_for_copy()
        if saver is not None:
            saver.wait()
        barrier()
        total = time.perf_counter() - started
        files = [p for p in target.rglob("*") if p.suffix in (".safetensors", ".pt", ".distcp")]
        num_bytes = sum(path.stat().st_size for path in files)
        barrier()
        if self.rank == 0:
            shutil.rmtree(target)  # what is not on disk yet never gets there
        return blocked, total, num_bytes


def judge(contest: Contest, speed: bool) -> Iterator[Bound]:
    """Yield all bounds, held or missed."""
    files = [run.result["files"] for runs in contest.runs.values() for run in runs]
    more = max(files) / min(files) - 1
    yield Bound("difference of bytes of files, as a share", more, 0.05, True)
    if speed:
        pairs = Contest("", {name: contest.runs[name] for name in (SAVE, *OURS)})
        yield Bound("async: blocked, times torch.save", pairs.ratio("async"), 0.3, True)
        for way in OURS:
            total = pairs.ratio(way, "total")
            yield Bound(f"{way}: total, times torch.save", total, 2.0, True)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Timed saves of each contestant.")] = 3,
    quick: harness.Quick = False,
    json_path: harness.Figures = None,
) -> int:
    """Let both ranks save in every way, in turns; return 1 when a bound is missed."""
    sizes, rounds = (_QUICK, 1) if quick else (_SIZES, rounds)
    with tempfile.TemporaryDirectory(prefix="mimo-bench-") as folder:
        directory = Path(folder)
        write_tokenizer(directory / "tokenizer")
        (directory / "bench.yaml").write_text(_RECIPE)
        sides = [partial(Savers, directory, sizes, rank) for rank in range(RANKS)]
        with harness.workers(*sides) as save:
            turns = {name: partial(save, name) for name in CONTESTANTS}
            runs = harness.take_turns(turns, 1 + rounds)
    contest = Contest("", {name: of_name[1:] for name, of_name in runs.items()})
    return harness.conclude(
        f"Saving weights and Adam's moments, fp32, on {RANKS} ranks",
        [contest],
        {
            "blocked, s": lambda contest, name: contest.median(name),
            "total, s": lambda contest, name: contest.median(name, "total"),
        },
        [*judge(contest, speed=not quick)],
        json_path,
    )


if __name__ == "__main__":
    harness.command(main)()
