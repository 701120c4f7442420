"""`mimo bench checkpoint`: how long saving holds training up, and what memory it takes.

Two ranks with a language model save their state by turns in every way; each way writes the same
bytes, and each rank its own half of them.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver as dcp

from data.digits.text import write_tokenizer
from mimo.bench.contest import Apart, Contest, Run, take_turns
from mimo.bench.report import Bound, Report
from mimo.checkpoint.folder import Progress
from mimo.checkpoint.saving import Saver
from mimo.device import barrier, initialize_distributed, set_threads
from mimo.hf.recipes import load_recipe
from mimo.layout.build import build_layout
from mimo.layout.groups import build_topology
from mimo.recipe.schema import Recipe
from mimo.train.loop import Trainer

RANKS = 2
OPTIMIZERS = ("plain", "distributed")
OURS = ("async", "sync")
SAVE, SYNCED = "torch.save", "torch.save, synced"
CONTESTANTS = (*OURS, SAVE, SYNCED, "DCP", "DCP async")
_TIMEOUT_SECONDS = 1800.0
_LAYER_PARAMETERS = 11.8e6  # of the larger model
_QUICK = {"hidden_size": 64, "ffn_hidden_size": 176, "num_layers": 2}


def recipe_of(directory: Path, optimizer: str, overlap: bool, sizes: Mapping[str, int]) -> Recipe:
    """A language model of which two ranks are replicas."""
    content = {
        "name": "bench",
        "language": {
            "family": "qwen3",
            "grid": {"dp": RANKS},
            "model": {
                "num_attention_heads": 16,
                "num_query_groups": 8,
                "head_size": 64,
                "rotary_base": 1e6,
                "mrope_section": [16, 8, 8],
                **sizes,
            },
        },
        "data": {
            "sources": [{"path": str(directory / "*.tar")}],  # nothing is read of it
            "tokenizer": str(directory / "tokenizer"),
            "sequence_length": 128,
        },
        "train": {
            "steps": 1,
            "global_batch_size": RANKS,
            "distributed_optimizer": optimizer == "distributed",
            "async_save": overlap,
            "keep_checkpoints": 1,
        },
    }
    path = directory / f"{optimizer} {os.getpid()}.yaml"
    path.write_text(json.dumps(content))  # which is YAML as well
    return load_recipe(path)


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
        self.savers = {
            name: Saver(modules, self.folder / name, recipe)
            for name, recipe in zip(OURS, recipes, strict=True)
        }

    def __call__(self, name: str) -> Run:
        """Save in one way; the seconds that training is blocked, and what else was measured."""
        self.turn += 1
        ways: dict[str, Callable[[Path], float]] = {
            SAVE: partial(self._save, synced=False),
            SYNCED: partial(self._save, synced=True),
            "DCP": lambda path: _timed(lambda: dcp.save(dict(self.state), checkpoint_id=path)),
            "DCP async": self._dcp_async,
        }
        save = ways.get(name) or partial(self._ours, self.savers.get(name))
        target, found = self.folder / name, dict[str, Any]()
        barrier()
        if self.rank == 0:
            target.mkdir(parents=True, exist_ok=True)
            os.sync()  # nobody waits for what the one before has left to write

        def act() -> None:
            barrier()  # ranks begin together; to look at their memory took them some time
            started = time.perf_counter()
            found["stands"] = save(target)
            barrier()
            found["total"] = time.perf_counter() - started

        growth = peak_growth(act)
        found["state"] = sum(t.numel() * t.element_size() for t in self.state.values())
        files = [p for p in target.rglob("*") if p.suffix in (".safetensors", ".pt", ".distcp")]
        found["files"] = sum(path.stat().st_size for path in files)
        barrier()
        if self.rank == 0:
            shutil.rmtree(target)  # what is not on disk yet never gets there
        return Run(found.pop("stands"), found={**found, "growth": growth})

    def _ours(self, saver: Saver | None, target: Path) -> float:
        assert saver is not None
        started = time.perf_counter()
        saver.begin(Progress(self.turn, 0))
        saver.publish()
        stands = time.perf_counter() - started
        saver.wait()
        return stands

    def _save(self, target: Path, synced: bool) -> float:
        def save() -> None:
            with (target / f"rank_{self.rank}.pt").open("wb") as file:
                torch.save(self.state, file)
                if synced:
                    file.flush()
                    os.fsync(file.fileno())
            barrier()

        return _timed(save)

    def _dcp_async(self, target: Path) -> float:
        started = time.perf_counter()
        response: Any = dcp.async_save(dict[str, Tensor](self.state), checkpoint_id=target)
        stands = time.perf_counter() - started
        response.result()
        return stands


def _timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def together(ranks: Sequence[Callable[[], Run]]) -> Run:
    """One turn of all ranks: of seconds and memory the largest, of bytes the sum."""
    with ThreadPoolExecutor(len(ranks)) as pool:
        runs = [future.result() for future in [pool.submit(rank) for rank in ranks]]
    found = {
        "total": max(run.found["total"] for run in runs),
        "growth": max(run.found["growth"] for run in runs),
        "share": max(run.found["growth"] / run.found["state"] for run in runs),
        "state": sum(run.found["state"] for run in runs),
        "files": runs[0].found["files"],
    }
    return Run(max(run.seconds for run in runs), found=found)


def judge(optimizer: str, runs: Mapping[str, Sequence[Run]], speed: bool) -> list[Bound]:
    """Every promise, kept or not. runs: the first of each contestant is not timed."""

    def ratio(ours: str, figure: Callable[[Run], float]) -> float:
        pairs = zip(runs[ours][1:], runs[SAVE][1:], strict=True)
        return statistics.median(figure(a) / figure(b) for a, b in pairs)

    state = runs[SAVE][0].found["state"]
    more = max(abs(run.found["files"] / state - 1) for own in runs.values() for run in own)
    found = [Bound(f"{optimizer}: bytes of files beside the state, as a share", more, 0.05, True)]
    if not speed:
        return found
    share = max(run.found["share"] for run in runs["async"])
    found.append(Bound(f"{optimizer}, async: memory, times what a rank saves", share, 1.2, True))
    name = f"{optimizer}, async: blocked, times torch.save"
    found.append(Bound(name, ratio("async", lambda run: run.seconds), 0.3, True))
    for own in OURS:
        name = f"{optimizer}, {own}: total, times torch.save"
        found.append(Bound(name, ratio(own, lambda run: run.found["total"]), 2.0, True))
    return found


def main(millions: int, rounds: int, quick: bool, json_path: Path | None, picture: Path) -> int:
    """Let both ranks save in every way, in turns; 1 when a bound is missed.

    millions: of parameters, at least. Quick runs judge the bytes alone.
    """
    layers = -(-millions * 1_000_000 // int(_LAYER_PARAMETERS))
    large = {"hidden_size": 1024, "ffn_hidden_size": 2816, "num_layers": layers}
    sizes, rounds = (_QUICK, 1) if quick else (large, rounds)
    contests, bounds, memory = list[Contest](), list[Bound](), dict[tuple[str, str], int]()
    for optimizer in OPTIMIZERS:
        with tempfile.TemporaryDirectory(prefix="mimo-bench-") as folder, ExitStack() as stack:
            write_tokenizer(Path(folder) / "tokenizer")
            sides = [partial(Savers, Path(folder), optimizer, sizes, rank) for rank in range(RANKS)]
            # What this one looks at is its own growth; looks would fall into the time of a copy.
            ranks = [stack.enter_context(Apart(side, watched=False)) for side in sides]
            turns = {
                name: partial(together, [partial(rank, name) for rank in ranks])
                for name in CONTESTANTS
            }
            runs = take_turns(turns, 1 + rounds, tell=True)
        for name, own in runs.items():  # in the first round too, as `async` keeps its memory
            memory[optimizer, name] = max(run.found["growth"] for run in own)
        contests.append(Contest(optimizer, {name: runs[name][1:] for name in CONTESTANTS}))
        bounds += judge(optimizer, runs, speed=not quick)
    state = contests[0].runs[SAVE][0].found["state"]
    report = Report(
        title=f"Saving {state / 2**20:.0f} MiB of weights and Adam's moments, fp32, {RANKS} ranks",
        notes=[
            "In every way each rank writes its own half into a file. `blocked`: until training "
            "goes on; `total`: until the save is complete. Ours and DCP also wait until it is on "
            "disk, as does `torch.save, synced`; `torch.save` does not.",
            f"{rounds} rounds after one that is not timed; in every round each runs once, in "
            "another order. Memory is the peak growth of a rank, in the first round too.",
        ],
        contests=contests,
        columns={
            "blocked, s": lambda one, name: f"{one.median(name):.2f}",
            "total, s": lambda one, name: f"{_total(one, name):.2f}",
            "memory, MiB": lambda one, name: f"{memory[one.name, name] / 2**20:.0f}",
        },
        bounds=bounds,
    )
    return report.conclude(picture, json_path)


def _total(contest: Contest, contestant: str) -> float:
    return statistics.median(run.found["total"] for run in contest.runs[contestant])
