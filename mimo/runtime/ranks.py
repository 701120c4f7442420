"""Ranks: started on this machine, or by torchrun or srun; and the variables that we set for them.

It needs no torch: some variables are read when a library is loaded, so they are set before that.
"""

import atexit
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mimo.errors import EXIT_CONTINUE
from mimo.runtime.processes import RankError, RanksFailed, run_processes, warm_up
from mimo.runtime.signals import Signalled, signal_handlers

RENDEZVOUS = "MIMO_RENDEZVOUS"


@dataclass(frozen=True)
class RankEnv:
    """The rank that this process is.

    rendezvous: an `init_method` of torch.distributed. hosts_store: whether rank 0 opens its store,
    as torchrun may have done. restart: how often torchrun has restarted the ranks.
    """

    rank: int
    world_size: int
    local_rank: int
    rendezvous: str
    ranks_on_machine: int = 1
    hosts_store: bool = False
    restart: int = 0
    max_restarts: int = 0

    @property
    def ranks_here(self) -> range:
        """The ranks of this machine, which are numbered in a row; this rank at least."""
        first = max(0, self.rank - self.local_rank)
        last = min(first + max(self.ranks_on_machine, self.local_rank + 1), self.world_size)
        return range(first, last)


def launch(
    target: str,
    args: tuple[Any, ...],
    world_size: int,
    preload: Sequence[str] = (),
    log_dir: Path | None = None,
    on_failure: Callable[[RankError], object] = lambda _: None,
) -> int:
    """Run `target(*args)` (`module:function`) in `world_size` ranks and return an exit code.

    When a rank fails, the others are ended, the cause is the last thing on stderr, and every failed
    rank's traceback goes to `log_dir/error_rank_<r>.txt`. The exit code is the largest that a rank
    returns, 2 for an InputError, 1 for another exception, 128 + the signal that ended this process
    at once, or EXIT_CONTINUE if a signal has requested a stop.
    preload: modules to import before the ranks are forked. on_failure: gets the cause, unless a
    signal had requested a stop before.
    """
    warm_up(preload)
    try:
        with signal_handlers() as requests, _rendezvous_dir() as folder:
            try:
                variables = rank_variables(Path(folder))
                results = run_processes(target, args, world_size, variables, stop_requests=requests)
            except RanksFailed as failure:
                code = _report(failure, log_dir)
                if not requests:
                    on_failure(failure.errors[0])
                return code
            codes = [result for result in results if isinstance(result, int)]
            return max(codes, default=0) or (EXIT_CONTINUE if requests else 0)
    except Signalled as signalled:
        (signum,) = signalled.args
        print(f"ended by {signal.Signals(signum).name}", file=sys.stderr)
        return 128 + signum


def _rendezvous_dir() -> AbstractContextManager[str]:
    return tempfile.TemporaryDirectory(prefix="mimo-ranks-", ignore_cleanup_errors=True)


# A machine's GPUs must be hidden from the fork server as well, which must not initialise CUDA.
_WITHOUT_GPUS = {"CUDA_VISIBLE_DEVICES": "", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


def warm_up_on_cpu(preload: Sequence[str]) -> None:
    """Start the fork server for ranks that use the CPU alone; returns at once."""
    warm_up(preload, _WITHOUT_GPUS)


def run_on_cpu(
    target: str | Callable[..., Any], args: tuple[Any, ...], world_size: int, timeout_seconds: float
) -> list[Any]:
    """Run `target(*args)` in `world_size` one-thread ranks of this machine; return their results.

    Raises RanksFailed when a rank fails, RanksHung with the ranks' stacks after `timeout_seconds`.
    """
    with _rendezvous_dir() as folder:
        stack_dir = Path(folder)
        variables = {**rank_variables(stack_dir), "OMP_NUM_THREADS": "1", **_WITHOUT_GPUS}
        return run_processes(target, args, world_size, variables, timeout_seconds, stack_dir)


def rank_variables(rendezvous_dir: Path) -> dict[str, str]:
    """Return this process's environment for ranks that meet through a file in `rendezvous_dir`."""
    return {
        # All ranks are on this machine; without it gloo looks up the host's name, which may fail.
        "GLOO_SOCKET_IFNAME": "lo",
        **os.environ,
        RENDEZVOUS: f"file://{rendezvous_dir.resolve() / 'store'}",
    }


def rank_environment() -> RankEnv | None:
    """Return the rank that `launch`, torchrun or srun started this process as; else None."""
    variables = os.environ
    if RENDEZVOUS in variables:
        rendezvous = variables[RENDEZVOUS]
    elif all(name in variables for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        rendezvous = "env://"
    else:
        return _slurm_environment()
    return RankEnv(
        rank=int(variables["RANK"]),
        world_size=int(variables["WORLD_SIZE"]),
        local_rank=int(variables.get("LOCAL_RANK", "0")),
        rendezvous=rendezvous,
        ranks_on_machine=int(variables.get("LOCAL_WORLD_SIZE", "1")),
        hosts_store=rendezvous == "env://"
        and variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        restart=int(variables.get("TORCHELASTIC_RESTART_COUNT", "0")),
        max_restarts=int(variables.get("TORCHELASTIC_MAX_RESTARTS", "0")),
    )


def _slurm_environment() -> RankEnv | None:
    """Return the rank of a task of srun, which meets the others on the step's first node."""
    variables = os.environ
    # A batch script has SLURM_PROCID as well, but it is no task of a step.
    if "SLURM_STEP_ID" not in variables or "SLURM_PROCID" not in variables:
        return None
    world_size = int(variables.get("SLURM_STEP_NUM_TASKS") or variables.get("SLURM_NTASKS", "1"))
    if world_size < 2:
        return None
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", "")
    host = variables.get("MASTER_ADDR") or first_host(nodes) or "127.0.0.1"
    # Jobs and steps that share a node get different ports, the same one on all their ranks.
    job_id, step_id = int(variables.get("SLURM_JOB_ID", "0")), int(variables["SLURM_STEP_ID"])
    port = variables.get("MASTER_PORT") or 20000 + (job_id * 37 + step_id) % 10000
    return RankEnv(
        rank=int(variables["SLURM_PROCID"]),
        world_size=world_size,
        local_rank=int(variables.get("SLURM_LOCALID", "0")),
        rendezvous=f"tcp://{host}:{port}",
        hosts_store=True,
    )


def first_host(nodes: str) -> str:
    """Return the first host of a SLURM node list, such as `gpu03-ib` of `gpu[03-04,9]-ib,a`."""
    first, _, _ = re.sub(r"\[(\d+)[^\]]*\]", r"\1", nodes).partition(",")
    return first


def node_name() -> str:
    """Return this machine's name in SLURM, else its host name."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()


def end_at_once(exit_code: int) -> int:
    """End this process before its interpreter winds down; returns the exit code.

    Threads of backends may not wind down in time, and have aborted ranks that were done. Threads
    that are no daemons are waited for; exit handlers that were registered earlier do not run.
    """

    def end() -> None:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:  # also where nobody reads what is printed
            os._exit(exit_code)

    atexit.register(end)
    return exit_code


def _report(failure: RanksFailed, log_dir: Path | None) -> int:
    """Print what happened, the cause last, and return the exit code."""
    cause, *others = failure.errors
    try:
        if log_dir is not None and log_dir.is_dir():
            for error in failure.errors:
                path = log_dir / f"error_rank_{error.rank}.txt"
                path.write_text(f"{error.traceback}{error}\n", encoding="utf-8")
    except OSError as problem:  # a full disk, which may be why they failed
        print(f"warning: not written: {problem}", file=sys.stderr)
    sys.stdout.flush()
    if others:
        ranks = ", ".join(str(error.rank) for error in others)
        where = f"; see {log_dir}/error_rank_*.txt" if log_dir is not None else ""
        print(f"failed as well, later or because of it: rank {ranks}{where}", file=sys.stderr)
    if not cause.traceback:  # it died silently: what a peer was waiting for says more
        for error in [error for error in others if cause.rank in error.waits_for][:1]:
            print(error, file=sys.stderr)
    # An error about the input is a message to a person; a traceback would bury it.
    traceback = cause.traceback if cause.exit_code != 2 else ""
    print(f"{traceback}{cause}", file=sys.stderr, flush=True)
    return cause.exit_code


# ----------------------------------------------------------- variables of the environment


@dataclass(frozen=True)
class Variable:
    """An environment variable and our value.

    instead: variables by which a user says the same; ours is left unset beside them.
    """

    name: str
    value: str
    instead: tuple[str, ...] = ()

    @property
    def is_users(self) -> bool:
        """Whether the environment already says something else."""
        value = os.environ.get(self.name, self.value)
        return value != self.value or any(name in os.environ for name in self.instead)


VARIABLES = (
    # Threads that wait for each other sleep after microseconds instead of spinning for
    # milliseconds: on a busy machine a spinning thread holds the core that the other one needs.
    Variable("GOMP_SPINCOUNT", "1000", ("OMP_WAIT_POLICY",)),
    Variable("KMP_BLOCKTIME", "1", ("OMP_WAIT_POLICY",)),
    # Packed batches differ in size; segments that grow can be reused for any of them.
    Variable("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", ("PYTORCH_ALLOC_CONF",)),
    # Looking for GPUs initialises none.
    Variable("PYTORCH_NVML_BASED_CUDA_CHECK", "1"),
)
"""Variables of every process, whatever its rank."""


def set_variables(variables: Iterable[Variable] = VARIABLES) -> None:
    """Set what the user has not, in this process and those that it starts."""
    for variable in variables:
        if not variable.is_users:
            os.environ[variable.name] = variable.value
