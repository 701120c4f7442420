"""The batch script of a job, made from its recipe and placement.

Values of a recipe are quoted for bash, and refused where a line of SLURM cannot quote them.
"""

import json
import os.path
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import batched
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from mimo.checkpoint.hf.recipes import load_phases
from mimo.config.cluster import Cluster
from mimo.config.phases import PhasedRecipe
from mimo.config.schema import Recipe
from mimo.errors import RecipeError
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import Layout
from mimo.slurm.placement import Placement, explain, place

_ENTRIES_PER_LINE = 12
# Options of sbatch that the layout or the script decide.
_RESERVED_OPTIONS = (
    *("array", "chdir", "dependency", "distribution", "error", "gpus-per-node", "job-name"),
    *("nodes", "no-requeue", "ntasks", "ntasks-per-node", "open-mode", "output", "parsable"),
    *("mincpus", "requeue", "signal", "test-only", "wait", "wrap"),
)


@dataclass(frozen=True)
class Job:
    """A recipe on its nodes.

    folder: the absolute folder in which the recipe's relative paths begin. bin: the folder of the
    `mimo` that nodes without a container or a venv of the recipe run.
    """

    phased: PhasedRecipe
    layouts: Sequence[Layout]
    placement: Placement
    folder: Path
    bin: Path = Path(sys.executable).parent

    @property
    def recipe(self) -> Recipe:
        """The recipe of the first phase; all phases have the same machines."""
        return self.phased.phases[0].recipe

    @property
    def cluster(self) -> Cluster:
        return self.recipe.cluster

    @property
    def name(self) -> str:
        return self.phased.run_dir.name

    @property
    def run(self) -> Path:
        return self.folder / self.phased.run_dir

    @property
    def launch(self) -> Path:
        """The folder of the script and of everything else about jobs."""
        return self.run / "launch"

    @property
    def logs(self) -> Path:
        """The folder of what jobs and ranks print."""
        log_dir = self.cluster.log_dir
        return self.launch if log_dir is None else self.folder / log_dir / self.name

    @property
    def venv_bin(self) -> Path:
        """The folder of `mimo` and `torchrun` on the nodes."""
        return self.bin if self.cluster.venv is None else self.folder / self.cluster.venv / "bin"

    @property
    def placement_text(self) -> str:
        return explain(self.phased, self.layouts, self.placement)

    @property
    def text(self) -> str:
        """The script. Raises RecipeError for values that no script can quote."""
        inside = self.cluster.container is not None
        mimo = str(self.venv_bin / "mimo")
        return template("job.sh.j2").render(
            job=self,
            cluster=self.cluster,
            script=json.dumps(str(self.launch / "job.sh")),
            components=[*self._components()],
            container=Container(self.phased, self.folder),
            path=None if inside else self.venv_bin,
            mimo=shlex.quote(mimo) if inside and self.cluster.venv is not None else "mimo",
        )

    def directives(self, number: int = 0) -> Iterator[str]:
        """Yield the options of sbatch for the nodes of one component."""
        cluster, component = self.cluster, self.placement.components[number]
        encoders = cluster.encoder_nodes if component.name == "encoders" else None
        gpus, partition, constraint = cluster.gpus_per_node, cluster.partition, cluster.constraint
        if encoders is not None:
            gpus = gpus if encoders.gpus_per_node is None else encoders.gpus_per_node
            partition, constraint = encoders.partition or partition, encoders.constraint
        options = {
            "nodes": len(component.nodes),
            "ntasks-per-node": max(map(len, component.nodes)),
            "gpus-per-node": gpus or None,
            "cpus-per-task": cluster.cpus_per_rank,
            "partition": partition,
            "account": cluster.account,
            "qos": cluster.qos,
            "constraint": constraint,
            "time": cluster.time_limit,
        }
        yield from (f"--{key}={value}" for key, value in options.items() if value is not None)
        if cluster.exclusive:
            yield "--exclusive"
        yield f"--signal=USR1@{cluster.signal_seconds}"
        yield "--requeue"
        for index, option in enumerate(cluster.options):
            name = option.removeprefix("--").partition("=")[0]
            # SLURM accepts abbreviations of option names.
            if any(reserved.startswith(name) for reserved in _RESERVED_OPTIONS):
                message = f"got {option!r}, which `mimo launch` decides itself; remove it"
                raise RecipeError(self.recipe.problem(("cluster", "options", index), message))
            yield option

    def output(self, name: str) -> Iterator[str]:
        """Yield the options for a script's output. Raises RecipeError if SLURM cannot read it."""
        path = f"{str(self.logs).replace('%', '%%')}/{name}"
        if not path.isprintable() or set(path) & set("\"'\\#"):
            message = f"SLURM reads no quotes, '\\' or '#' in {path!r}; set cluster.log_dir"
            raise RecipeError(self.recipe.problem(("cluster", "log_dir"), message))
        yield f'--output="{path}"'
        yield "--open-mode=append"

    def _components(self) -> Iterator[dict[str, Any]]:
        placement, cluster = self.placement, self.cluster
        several = len(placement.components) > 1
        for number, component in enumerate(placement.components):
            directives = [*self.directives(number)]
            if number == 0:
                directives[:0] = [f"--job-name={self.name}", *self.output("job_%j.out")]
            hosts = f"hosts_{component.name}"
            options = [f"--het-group={number}"] if several else []
            sizes, table = [*map(len, component.nodes)], list[str]()
            options.append(f"--nodes={len(sizes)} --ntasks={sum(sizes)}")
            if len(set(sizes)) == 1:
                options[-1] += f" --ntasks-per-node={sizes[0]} --distribution=block"
            else:
                table = [f"{len(ranks)}x{node}" for node, ranks in enumerate(component.nodes)]
                options.append(f'--distribution=arbitrary --nodelist="$launch/{hosts}"')
            if cluster.cpus_per_rank is not None:
                options.append(f"--cpus-per-task={cluster.cpus_per_rank}")
            if any(option.startswith("--gpus-per-node=") for option in directives):
                options.append("--gpu-bind=none")
            group = f"_HET_GROUP_{number}" if several else ""
            yield {
                "directives": directives,
                "srun": options,
                "table": [" ".join(entries) for entries in batched(table, _ENTRIES_PER_LINE)],
                "variable": f"ranks_of_{component.name}",
                "hosts": hosts,
                "node_list": f"SLURM_JOB_NODELIST{group}",
            }


def prepare(
    path: Path, overrides: Sequence[str] = (), site: Path | None = None, hetjob: bool = False
) -> Job:
    """Check a recipe and place its ranks.

    site: a file whose keys are merged over `cluster:`. hetjob: disjoint encoders get nodes of their
    own. Raises RecipeError with all problems that `mimo check` finds.
    """
    phased = load_phases(path, overrides, site)
    layouts = phased.each(lambda recipe: check_recipe(recipe, None))
    hetjob = hetjob or phased.phases[0].recipe.cluster.encoder_nodes is not None
    return Job(phased, layouts, place(phased, layouts, hetjob), Path.cwd())


def write(job: Job) -> Path:
    """Write the script and the files it needs into the run folder; return the script."""
    text = job.text
    for folder in (job.launch, job.logs):
        folder.mkdir(parents=True, exist_ok=True)
    (job.launch / "placement.txt").write_text(job.placement_text, encoding="utf-8")
    (job.launch / "recipe.yaml").write_text(job.phased.to_yaml(), encoding="utf-8")
    partial = job.launch / ".job.sh"
    partial.write_text(text, encoding="utf-8")
    partial.chmod(0o755)
    # A job that runs keeps the old file, which its bash is still reading.
    return partial.replace(job.launch / "job.sh")


@cache
def template(name: str) -> Template:
    """Return a script template of this folder; its filter `q` makes a value one word of bash."""
    environment = Environment(
        loader=PackageLoader("mimo.slurm", ""),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        comment_start_string="<#",  # bash has `{#`
        comment_end_string="#>",
    )
    environment.filters["q"] = lambda value: _quoted(str(value))
    return environment.get_template(name)


def _quoted(text: str) -> str:
    # In a list of words a bare comma looks like a mistake, to people and to shellcheck.
    return shlex.quote(text) if "," not in text else f"'{text.replace("'", """'"'"'""")}'"


class Container:
    """The words of a script that run commands in the recipe's container, or without one.

    words: the array `container` of a script. prefix: precedes a command on the first node.
    step_prefix: precedes the command of a rank, after the options of srun.
    """

    def __init__(self, phased: PhasedRecipe, folder: Path) -> None:
        self.words = list[str]()
        self.prefix = self.step_prefix = ""
        self._recipe = phased.phases[0].recipe
        cluster = self._recipe.cluster
        if cluster.container is None:
            return
        image, folders = cluster.container.image, _folders(phased, folder)
        for path in folders:
            if re.search(r"[:,]", path):
                message = f"got {path!r}, but no mount can have ':' or ','; rename it"
                raise RecipeError(self._recipe.problem(("cluster", "container"), message))
        mounts = [*(f"{path}:{path}" for path in folders), *cluster.container.mounts]
        self.prefix = self.step_prefix = '"${container[@]}" '
        if cluster.container.runtime == "pyxis":
            options = {"image": image, "mounts": ",".join(mounts), "workdir": str(folder)}
            self.words = [f"--container-{key}={value}" for key, value in options.items()]
            srun = 'srun --export=ALL --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" '
            self.prefix = f"{srun}{self.prefix}"
        else:
            self.words = ["apptainer", "exec", f"--pwd={folder}"]
            self.words += ["--nv"] if cluster.gpus_per_node else []
            self.words += [*(f"--bind={mount}" for mount in mounts), image]


def _folders(phased: PhasedRecipe, folder: Path) -> list[str]:
    """Return the folders that commands read and write, without those inside of others."""
    named = [str(folder), str(phased.run_dir.parent)]
    for recipe in (phase.recipe for phase in phased.phases):
        data = recipe.data
        named += filter(None, (recipe.init_from, recipe.cluster.log_dir))
        named += filter(None, (data.tokenizer, data.cache_directory))
        for path in (s.path for s in (*data.sources, *data.validation, *data.test)):
            if "://" not in path:
                named.append(os.path.dirname(re.split(r"[*?\[{]", path)[0]))
    paths = {os.path.normpath(folder / path) for path in named}
    return sorted(p for p in paths if not any(p.startswith(f"{other}/") for other in paths))
