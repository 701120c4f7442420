"""Measure how long saving holds training up, and what memory it takes.

Two ranks with a language model save their state by turns in every way; each way writes the same
bytes, and each rank its own half of them.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver as dcp

from benchmarks.harness import (
    Bound,
    Contest,
    Figures,
    Quick,
    Run,
    Worker,
    command,
    conclude,
    take_turns,
    timed,
)
from data.text.digits import write_tokenizer
from mimo.checkpoint.folder import Progress
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.save import Saver
from mimo.config.schema import Recipe
from mimo.device import barrier, initialize_distributed, set_threads
from mimo.parallel.build import build_layout
from mimo.parallel.groups import build_topology
from mimo.train.loop import Trainer

RANKS = 2
OPTIMIZERS = ("plain", "distributed")
OURS = ("async", "sync")
SAVE, SYNCED = "torch.save", "torch.save, synced"
CONTESTANTS = (*OURS, SAVE, SYNCED, "DCP", "DCP async")
_TIMEOUT_SECONDS = 1800.0
_TOKENS, _WIDTH = 128, 1024  # of products that stand in for a step
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
train: {steps: 1, global_batch_size: 2, keep_checkpoints: 1}
"""


def recipe_of(directory: Path, optimizer: str, overlap: bool, sizes: Mapping[str, int]) -> Recipe:
    """A language model of which two ranks are replicas."""
    path = directory / f"{optimizer} {os.getpid()}.yaml"
    path.write_text(_RECIPE)
    overrides = {f"language.model.{name}": size for name, size in sizes.items()}
    overrides |= {
        "data.tokenizer": directory / "tokenizer",
        "train.distributed_optimizer": str(optimizer == "distributed").lower(),
        "train.async_save": str(overlap).lower(),
    }
    return load_recipe(path, [f"{key}={value}" for key, value in overrides.items()])


def peak_growth(action: Callable[[], Any]) -> int:
    """Bytes by which the process grows beyond what it has before, at most, during ``action``."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here on
    before = _status("VmRSS")
    action()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


class Savers:
    """One rank with a model's state, and every way to save it."""

    def __init__(
        self, directory: Path, optimizer: str, sizes: Mapping[str, int], rank: int
    ) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        set_threads(1, RANKS)
        store = directory / f"store of {optimizer}"
        initialize_distributed(rank, RANKS, f"file://{store}", _TIMEOUT_SECONDS)
        self.rank, self.folder, self.turn = rank, directory / optimizer, 0
        recipes = [recipe_of(directory, optimizer, overlap, sizes) for overlap in (True, False)]
        topology = build_topology(build_layout(recipes[0]))
        self.trainer = Trainer(recipes[0], topology, self.folder)
        modules = self.trainer.model.modules
        # Neither zeros, of which memory has one page, nor parts of larger tensors, which
        # `torch.save` would write whole: what the rivals get is as good for them as can be.
        generator = torch.Generator().manual_seed(0)
        for piece in modules["language"].pieces("load", True):
            piece.values.normal_(generator=generator)
        self.state = {
            f"{piece.key}[{piece.row},{piece.column}]": piece.values.clone()
            for piece in modules["language"].pieces("save", True)
        }
        num_weights = sum(p.values.numel() for p in modules["language"].pieces("load", False))
        self._tokens, self._weights = torch.randn(_TOKENS, _WIDTH), torch.randn(_WIDTH, _WIDTH)
        self._result = torch.empty(_TOKENS, _WIDTH)
        self._products = 1 + 3 * num_weights // _WIDTH**2
        self.savers = {
            name: Saver(modules, self.folder / name, recipe)
            for name, recipe in zip(OURS, recipes, strict=True)
        }

    def __call__(self, name: str) -> Run:
        """Save in one way: once with nothing beside it, and once before what a step computes."""
        measured = self._turn(name, works=False) | self._turn(name, works=True)
        return Run(measured["blocked"], result=measured)

    def _turn(self, name: str, works: bool) -> dict[str, Any]:
        """Measure a save: seconds in all, peak of memory and bytes of files; or what a step loses.

        works: a step follows, which computes and then updates; measured are the seconds for which
        the save blocks it, and those by which the step is longer.
        """
        self.turn += 1
        target, measured = self.folder / name, dict[str, Any]()
        barrier()
        if self.rank == 0:
            target.mkdir(parents=True, exist_ok=True)
            os.sync()  # nobody waits for what the one before has left to write
        if works:
            barrier()
            alone = timed(self._compute).seconds

        def act() -> None:
            barrier()  # ranks begin together, after they have looked at their memory
            started = time.perf_counter()
            wait_for_copy, wait = self._begin(name, target)
            measured["blocked"] = time.perf_counter() - started
            if works:
                self._compute()
                measured["blocked"] += timed(wait_for_copy).seconds
                measured["longer"] = time.perf_counter() - started - alone
            wait()
            barrier()
            measured["total"] = time.perf_counter() - started

        growth = peak_growth(act)
        files = [p for p in target.rglob("*") if p.suffix in (".safetensors", ".pt", ".distcp")]
        size = sum(path.stat().st_size for path in files)
        barrier()
        if self.rank == 0:
            shutil.rmtree(target)  # what is not on disk yet never gets there
        if works:
            return {key: measured[key] for key in ("blocked", "longer")}
        state = sum(t.numel() * t.element_size() for t in self.state.values())
        return {"total": measured["total"], "growth": growth, "files": size, "state": state}

    def _compute(self) -> None:
        """As a step does before its update: 6 operations for each weight and token of a sample."""
        for _ in range(self._products):
            torch.mm(self._tokens, self._weights, out=self._result)

    def _begin(self, name: str, target: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
        """Save; return waits for the end of its copying, and for its end."""
        if name in self.savers:
            saver = self.savers[name]
            saver.begin(Progress(self.turn, 0))
            saver.publish()
            return saver.wait_for_copy, saver.wait
        if name == "DCP async":
            response: Any = dcp.async_save(dict[str, Tensor](self.state), checkpoint_id=target)
            return _nothing, response.result
        if name == "DCP":
            dcp.save(dict(self.state), checkpoint_id=target)
            return _nothing, _nothing
        with (target / f"rank_{self.rank}.pt").open("wb") as file:
            torch.save(self.state, file)
            if name == SYNCED:
                file.flush()
                os.fsync(file.fileno())
        barrier()
        return _nothing, _nothing


def _nothing() -> None:
    """Wait for nothing: the save is complete."""


def together(ranks: Sequence[Callable[[], Run]]) -> Run:
    """One turn of all ranks: of seconds and memory the largest, of bytes the sum."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        runs = [future.result() for future in [pool.submit(rank) for rank in ranks]]
    results = [run.result for run in runs]
    names = ("longer", "total", "growth")
    merged = {name: max(result[name] for result in results) for name in names}
    merged["share"] = max(result["growth"] / result["state"] for result in results)
    merged["state"] = sum(result["state"] for result in results)
    merged["files"] = results[0]["files"]
    return Run(max(run.seconds for run in runs), result=merged)


def judge(optimizer: str, runs: Mapping[str, Sequence[Run]], speed: bool) -> list[Bound]:
    """Every promise, kept or not. runs: the first of each contestant is not timed."""
    state = runs[SAVE][0].result["state"]
    more = max(abs(run.result["files"] / state - 1) for own in runs.values() for run in own)
    bounds = [Bound(f"{optimizer}: bytes of files beside the state, as a share", more, 0.05, True)]
    if not speed:
        return bounds
    share = max(run.result["share"] for run in runs["async"])
    bounds.append(Bound(f"{optimizer}, async: memory, times what a rank saves", share, 1.2, True))
    contest = Contest("", {name: runs[name][1:] for name in (SAVE, *OURS)})
    name = f"{optimizer}, async: blocked, times torch.save"
    bounds.append(Bound(name, contest.ratio("async"), 0.3, True))
    for way in OURS:
        name = f"{optimizer}, {way}: total, times torch.save"
        bounds.append(Bound(name, contest.ratio(way, "total"), 2.0, True))
    return bounds


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Timed saves of each contestant.")] = 3,
    quick: Quick = False,
    json_path: Figures = None,
) -> int:
    """Let both ranks save in every way, in turns; return 1 when a bound is missed."""
    sizes, rounds = (_QUICK, 1) if quick else (_SIZES, rounds)
    contests, bounds, memory = list[Contest](), list[Bound](), dict[tuple[str, str], int]()
    for optimizer in OPTIMIZERS:
        with tempfile.TemporaryDirectory(prefix="mimo-bench-") as folder, ExitStack() as stack:
            write_tokenizer(Path(folder) / "tokenizer")
            sides = [partial(Savers, Path(folder), optimizer, sizes, rank) for rank in range(RANKS)]
            ranks = [stack.enter_context(Worker(side)) for side in sides]
            turns = {
                name: partial(together, [partial(rank, name) for rank in ranks])
                for name in CONTESTANTS
            }
            runs = take_turns(turns, 1 + rounds, verbose=True)
        for name, saves in runs.items():  # in the first round too, as `async` keeps its memory
            memory[optimizer, name] = max(run.result["growth"] for run in saves)
        contests.append(Contest(optimizer, {name: runs[name][1:] for name in CONTESTANTS}))
        bounds += judge(optimizer, runs, speed=not quick)
    state = contests[0].runs[SAVE][0].result["state"]
    return conclude(
        f"Saving {state / 2**20:.0f} MiB of weights and Adam's moments, fp32, {RANKS} ranks",
        contests,
        {
            "blocked, s": lambda contest, name: f"{contest.median(name):.2f}",
            "step, s": lambda contest, name: f"{contest.median(name, 'longer'):+.2f}",
            "total, s": lambda contest, name: f"{contest.median(name, 'total'):.2f}",
            "memory, MiB": lambda contest, name: f"{memory[contest.name, name] / 2**20:.0f}",
        },
        bounds,
        json_path,
    )


if __name__ == "__main__":
    command(main)()
