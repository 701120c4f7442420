"""A SLURM of four nodes on this machine, with separate daemons, configuration and folders.

Every node is a `slurmd` on its own port. Nothing is shared with another SLURM, so several may
run at once; at the end no process is left.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from tests.ranks import running

NODES = ("node1", "node2", "node3", "node4")
_CONFIGURATION = """
ClusterName=mimo
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
FirstJobId={first_job}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A job that is put into the queue again waits until the credential of its start has expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdParameters=config_overrides
MpiDefault=none
ProctrackType=proctrack/linuxproc
SwitchType=switch/none
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0,sched_min_interval=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
# A node that was killed stays away, whatever SLURM takes for its answer.
ReturnToService=1
SlurmctldTimeout=10
SlurmdTimeout=30
KillWait=5
MinJobAge=3600
{nodes}
# Nodes that need not be there: SLURM says whether a job could run on them.
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=INFINITE
NodeName=gpu[001-138] State=CLOUD CPUs=128 RealMemory=1000000 Gres=gpu:8 Feature=a100,ib,l40s
PartitionName=gpu Nodes=gpu[001-138] SuspendTime=100000000
PartitionName=large Nodes=gpu[001-138]
PartitionName=small Nodes=gpu[001-138]
PartitionName=batch Nodes={names} Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=urgent Nodes={names} PriorityTier=10 PreemptMode=OFF
"""


class Slurm:
    """One controller and four nodes, with `NODES` as names. Its commands need `environment`.

    Use as a context; raises RuntimeError with the logs if it does not come up.
    """

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # paths of sockets are short
        self._configuration = self._folder / "slurm.conf"
        # A shell from which jobs are submitted may itself be a rank of another one.
        left_over = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "none"}
        self.environment = {**os.environ, **left_over, "SLURM_CONF": str(self._configuration)}
        for name in [name for name in self.environment if name.startswith(("SBATCH_", "SLURM_"))]:
            if name != "SLURM_CONF":
                del self.environment[name]  # of a job that this runs in
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Slurm:
        host = socket.gethostname().partition(".")[0]
        controller, *ports = _free_ports(1 + len(NODES))
        nodes = [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=8"
            for name, port in zip(NODES, ports, strict=True)
        ]
        self._configuration.write_text(
            _CONFIGURATION.format(
                host=host,
                controller=controller,
                # Jobs of equal numbers meet on equal ports, and workers run jobs side by side.
                first_job=1 + 1000 * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]),
                folder=self._folder,
                nodes="\n".join(nodes),
                names=",".join(NODES),
            )
        )
        (self._folder / "state").mkdir()
        key = self._folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(os.urandom(128))
        with ExitStack() as stack:
            stack.callback(self.__exit__)
            self._start(
                "munged",
                *("munged", "--foreground", "--force", f"--key-file={key}"),
                f"--socket={self._folder}/munge.socket",
                f"--pid-file={self._folder}/munged.pid",
                f"--log-file={self._folder}/munged.log",
                f"--seed-file={self._folder}/munge.seed",
            )
            self.wait_for((self._folder / "munge.socket").exists, 20)
            self._start("slurmctld", "slurmctld", "-D")
            for node in NODES:
                self.start_node(node)
            self.wait_for(self._all_idle, 30)
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes():
            with suppress(psutil.Error):
                process.kill()
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ------------------------------------------------------------------------------- nodes

    def start_node(self, node: str) -> None:
        """Start or restart a node."""
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Kill a node's daemon and the processes of its jobs, as a power cut does."""
        for process in self._processes(node):
            with suppress(psutil.Error):
                process.kill()
        self._daemons.pop(node).wait()
        # SLURM would notice by itself, once the node has not answered for long enough.
        self.command("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def heal(self) -> None:
        """End all jobs, restart killed nodes, and wait until all are idle."""
        self.command("scancel", "--user=root")
        for node in NODES:
            if node not in self._daemons:
                self.start_node(node)
        self.wait_for(self._all_idle, 60)

    def _all_idle(self) -> bool:
        for node, state in self.states().items():
            if state.startswith(("down", "drain")):
                self.command("scontrol", "update", f"nodename={node}", "state=resume")
        return self.states() == dict.fromkeys(NODES, "idle")

    def states(self) -> dict[str, str]:
        """Return the state of each node by name; with a `*` if it does not answer."""
        text = self.command("sinfo", "--noheader", "--Node", "--partition=batch", "--format=%N %T")
        return dict(line.split() for line in text.splitlines())  # pyright: ignore

    def _processes(self, node: str | None = None) -> list[psutil.Process]:
        """Return the daemons and processes of jobs, of all nodes or of one.

        Daemons are known by the folder they run in: they write over their environment.
        """
        processes = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):  # it has just ended
                folder, env = Path(process.cwd()), process.environ()
                matches = folder.is_relative_to(self._folder)
                if node is not None:
                    matches = folder == self._folder / node
                if env.get("SLURM_CONF") == str(self._configuration):
                    matches = matches or node in (None, env.get("SLURMD_NODENAME"))
                if matches and running([process.pid]):
                    processes.append(process)
        return processes

    # -------------------------------------------------------------------------------- jobs

    def command(self, *words: str | Path, cwd: Path | None = None) -> str:
        """Return what a command of SLURM prints. Raises RuntimeError if it fails."""
        done = subprocess.run(
            words, capture_output=True, text=True, env=self.environment, cwd=cwd, timeout=60
        )
        if done.returncode != 0:
            raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr}")
        return done.stdout

    def job(self, number: str) -> Mapping[str, str]:
        """Return what `scontrol show job` prints, by key."""
        line = self.command("scontrol", "--oneliner", "show", "job", number).splitlines()[0]
        return dict(word.split("=", 1) for word in line.split() if "=" in word)  # pyright: ignore

    def nodes_of(self, number: str) -> list[str]:
        """Return the nodes of a job, in order."""
        nodes = self.job(number)["NodeList"]
        return self.command("scontrol", "show", "hostnames", nodes).splitlines()

    def ranks_of(self, number: str) -> dict[int, str]:
        """Return the nodes of a job's running ranks."""
        processes = self.rank_processes(number)
        return {rank: processes[rank].environ()["SLURMD_NODENAME"] for rank in sorted(processes)}

    def rank_processes(self, number: str) -> dict[int, psutil.Process]:
        """Return a job's running ranks."""
        ranks = {}
        for process in self._processes():
            with suppress(psutil.Error):
                env = process.environ()
                # srun has the variables of the batch script, which is no rank; nor is a shell.
                is_of_job = number in (env.get("SLURM_JOB_ID"), env.get("SLURM_HET_JOB_ID"))
                is_python = process.name().startswith(("mimo", "python"))
                if is_of_job and is_python and "SLURM_SRUN_COMM_PORT" in env:
                    ranks[int(env["SLURM_PROCID"])] = process
        return ranks

    def processes_of(self, number: str) -> list[str]:
        """Return the command lines of a job's processes on all nodes."""
        lines = []
        for process in self._processes():
            with suppress(psutil.Error):
                if process.environ().get("SLURM_JOB_ID") == number:
                    lines.append(" ".join(process.cmdline()))
        return lines

    def wait_for(self, condition: Callable[[], object], seconds: float) -> None:
        """Wait until a condition is true. Raises RuntimeError, with the logs, if it stays false."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with suppress(RuntimeError):  # a daemon that is busy or not yet there
                if condition():
                    return
            time.sleep(0.2)
        raise RuntimeError(f"not within {seconds:g} s\n{self.logs()}")

    def logs(self) -> str:
        """Return the queue and the ends of the daemons' logs."""
        queue = subprocess.run(["squeue"], capture_output=True, text=True, env=self.environment)
        parts = [queue.stdout + queue.stderr]
        for path in sorted(self._folder.glob("*.log")):
            parts.append(f"--- {path.name}\n" + "".join(path.read_text().splitlines(True)[-25:]))
        return "\n".join(parts)

    def _start(self, name: str, *command: str) -> None:
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        with (self._folder / f"{name}.log").open("ab") as log:
            self._daemons[name] = subprocess.Popen(
                command, stdout=log, stderr=log, env=self.environment, cwd=folder
            )


def _free_ports(number: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return [opened.getsockname()[1] for opened in sockets]
