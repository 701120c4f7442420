"""`cluster:` of a recipe: the machines of a job and its request to SLURM.

The keys describe a site, so `mimo launch --cluster my_site.yaml` merges a file over the recipe's.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from mimo.config import bounds
from mimo.config.modules import Section

# Variables of job scripts, SLURM, torchrun and bash; a test reads the scripts for them.
_RESERVED = re.compile(
    r"SLURMD?_.*|TORCHELASTIC_.*|BASH.*|IFS|ENV|SHELLOPTS|POSIXLY_CORRECT|E?UID|PPID"
    r"|(LOCAL_|GROUP_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)|MIMO_RENDEZVOUS"
    r"|run|launch|logs|recipe|chain|number|kind|container|jobs|failures|nodes|entry|i"
    r"|rank|ranks_of_\w+|code|runs"
)


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("an environment variable has letters, digits and '_' only")
    if name == "PATH":
        raise ValueError("ranks would not find `mimo`; use cluster.venv or cluster.modules")
    if _RESERVED.fullmatch(name):
        raise ValueError("job scripts, SLURM or bash need this variable; remove or rename it")
    return name


def _mount(text: str) -> str:
    if not re.fullmatch(r"/[^:,]*:/[^:,]*(:(ro|rw))?", text):
        raise ValueError("needs the form /on/the/host:/in/the/container, with :ro for read-only")
    return text


# One word of an `#SBATCH` line: a name, a list of names, or a condition such as `a100&ib`.
Word = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,:&|*@()\[\]-]*$", max_length=256)]
Mount = Annotated[bounds.Line, AfterValidator(_mount)]
VariableName = Annotated[str, Field(max_length=256), AfterValidator(_variable)]
TimeLimit = Annotated[str, Field(pattern=r"^(\d+-)?\d+(:\d{2}){0,2}$", max_length=32)]
Option = Annotated[str, Field(pattern=r"^--[a-z][a-z-]*(=[^\s'\"\\`$#;]+)?$", max_length=1024)]
Devices = Annotated[int, Field(ge=0, le=2**10)]


class Container(Section):
    """The container that ranks run in."""

    runtime: Literal["pyxis", "apptainer"]
    """enroot by srun's pyxis plugin, or apptainer."""
    image: Annotated[bounds.Line, Field(pattern="^[^-]")]
    """A `.sqsh` file or a name in a registry for pyxis, a `.sif` file for apptainer."""
    mounts: Annotated[tuple[Mount, ...], Field(strict=False, max_length=100)] = ()
    """Folders of the node inside the container, such as `/data:/data:ro`. Folders that the recipe
    names are mounted without being listed."""


class EncoderNodes(Section):
    """Nodes of another kind for the disjoint encoders: first component of a heterogeneous job."""

    gpus_per_node: Devices | None = None
    """GPUs of such a node; null for as many as `cluster.gpus_per_node`."""
    ranks_per_node: bounds.Ranks | None = None
    """Ranks on such a node; null for one on each GPU."""
    partition: Word | None = None
    """Their partition; null for `cluster.partition`."""
    constraint: Word | None = None
    """Features that they need."""


class Cluster(Section):
    """The machines of a job, for the batch script of `mimo launch`."""

    gpus_per_node: Devices = 8
    """GPUs of a node; with 0, give `ranks_per_node`."""
    ranks_per_node: bounds.Ranks | None = None
    """Ranks on a node; null for one on each GPU."""
    encoder_nodes: EncoderNodes | None = None
    """Nodes of another kind for the disjoint encoders, with `--hetjob`; null for the same."""
    partition: Word | None = None
    """Partition of the job; null for the site's default."""
    account: Word | None = None
    """Account of the job."""
    qos: Word | None = None
    """Quality of service."""
    constraint: Word | None = None
    """Features that nodes need, such as `a100&ib`."""
    time_limit: TimeLimit | None = None
    """Time limit of one job, such as `"12:00:00"` or `"2-00:00:00"`; null for the partition's."""
    exclusive: bool = True
    """Whether the job has its nodes to itself."""
    cpus_per_rank: bounds.Threads | None = None
    """CPU cores of a rank (`--cpus-per-task`); null leaves it to SLURM."""
    options: Annotated[tuple[Option, ...], Field(strict=False, max_length=100)] = ()
    """Further options of sbatch, such as `--mem=512G` or `--mail-type=FAIL`."""
    container: Container | None = None
    """The image that ranks run in; null for none."""
    venv: bounds.PathText | None = None
    """Virtual environment on the nodes; null for that of `mimo launch`."""
    modules: Annotated[tuple[bounds.Line, ...], Field(strict=False, max_length=100)] = ()
    """Environment modules to load, in order."""
    environment: Annotated[dict[VariableName, bounds.Line], Field(max_length=1000)] = {}
    """Environment variables of all ranks."""
    log_dir: bounds.PathText | None = None
    """Folder for the output of jobs and ranks, by run; null for `launch` in the run folder."""
    signal_seconds: Annotated[int, Field(ge=10, le=65535)] = 300
    """Seconds before the time limit when the job saves and ends: enough for a step and a save."""
    restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often a failed job is requeued; preemption and the time limit do not count."""
    preflight: bool = True
    """Check nodes, network, folders and versions before ranks start."""

    @model_validator(mode="after")
    def _nodes_have_places(self) -> Self:
        for prefix, nodes in (("", self), ("encoder_nodes.", self.encoder_nodes)):
            if nodes is not None and nodes.gpus_per_node == 0 and nodes.ranks_per_node is None:
                raise ValueError(
                    f"{prefix}gpus_per_node 0 means nodes without GPUs; give {prefix}ranks_per_node"
                )
        return self

    @property
    def places_per_node(self) -> int:
        return self.ranks_per_node or self.gpus_per_node

    @property
    def places_per_encoder_node(self) -> int:
        nodes = self.encoder_nodes or EncoderNodes()
        return nodes.ranks_per_node or nodes.gpus_per_node or self.places_per_node
