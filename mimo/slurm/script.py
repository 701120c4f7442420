"""The batch script of a job: what a person would write for SLURM, from recipe and placement.

Whatever comes from a recipe is quoted where bash reads it, and refused where SLURM reads a line
that knows no quotes. `python -m pytest tests/mimo/slurm` compares whole scripts.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from jinja2 import Environment, PackageLoader, StrictUndefined, Template

from mimo.checkpoint.hf.recipes import load_phases
from mimo.config.cluster import Cluster
from mimo.config.phases import PhasedRecipe
from mimo.config.schema import Recipe
from mimo.errors import InputError, RecipeError, StartError
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import Layout
from mimo.slurm.containers import Container
from mimo.slurm.elastic import fit
from mimo.slurm.explain import explain
from mimo.slurm.placement import Component, Placement, place

Form = Literal["fixed", "heterogeneous", "elastic"]
"""Nodes of one kind and number, of two kinds, or of one kind and as many as there are."""

_ENTRIES_PER_LINE = 12
# Options of sbatch that the layout or the script decide.
_OURS = (
    *("array", "chdir", "dependency", "distribution", "error", "gpus-per-node", "job-name"),
    *("nodes", "no-requeue", "ntasks", "ntasks-per-node", "open-mode", "output", "parsable"),
    *("mincpus", "requeue", "signal", "test-only", "wait", "wrap"),
)


@dataclass(frozen=True)
class Job:
    """A recipe on its nodes. folder: the absolute one that the recipe's paths begin in.

    least_nodes: with fewer than the placement's, down to so many, an elastic job begins as well.
    bin: the folder of the `mimo` that nodes without a container or a venv of the recipe run.
    """

    phased: PhasedRecipe
    layouts: Sequence[Layout]
    placement: Placement
    folder: Path
    least_nodes: int | None = None
    bin: Path = Path(sys.executable).parent

    @property
    def recipe(self) -> Recipe:
        """That of the first phase; all have the same machines."""
        return self.phased.phases[0].recipe

    @property
    def cluster(self) -> Cluster:
        """The machines."""
        return self.recipe.cluster

    @property
    def name(self) -> str:
        """Of the run."""
        return self.phased.run_dir.name

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / self.phased.run_dir

    @property
    def launch(self) -> Path:
        """The folder of the script and of all that is about jobs."""
        return self.run / "launch"

    @property
    def logs(self) -> Path:
        """The folder of what jobs and ranks print."""
        given = self.cluster.log_dir
        return self.launch if given is None else self.folder / given / self.name

    @property
    def placement_text(self) -> str:
        """Which rank is where, and what crosses nodes."""
        return explain(self.phased, self.layouts, self.placement)

    @property
    def text(self) -> str:
        """The script. Raises RecipeError for what no script can say."""
        venv = self.cluster.venv
        bin = self.bin if venv is None else self.folder / venv / "bin"
        inside = self.cluster.container is not None
        return template("job.sh.j2").render(
            job=self,
            cluster=self.cluster,
            script=json.dumps(str(self.launch / "job.sh")),
            components=[*self._components()],
            container=Container(self.phased, self.folder),
            path=None if inside else bin,
            mimo=shlex.quote(str(bin / "mimo")) if inside and venv is not None else "mimo",
        )

    def directives(self, number: int = 0) -> Iterator[str]:
        """What SLURM is asked for: for all of the job's nodes, or for one component of several."""
        cluster, component = self.cluster, self.placement.components[number]
        encoders = cluster.encoder_nodes if component.name == "encoders" else None
        gpus, partition, constraint = cluster.gpus_per_node, cluster.partition, cluster.constraint
        if encoders is not None:
            gpus = gpus if encoders.gpus_per_node is None else encoders.gpus_per_node
            partition, constraint = encoders.partition or partition, encoders.constraint
        num_nodes = str(len(component.nodes))
        room = {"ntasks-per-node": max(map(len, component.nodes))}
        if self.least_nodes is not None:
            if self.least_nodes < len(component.nodes):
                num_nodes = f"{self.least_nodes}-{num_nodes}"
            # With tasks per node, SLURM keeps the number of tasks of a job's first start, and puts
            # it into the queue again for no fewer nodes.
            room = {"mincpus": cluster.places_per_node * (cluster.cpus_per_rank or 1)}
        asked = {
            "nodes": num_nodes,
            **room,
            "gpus-per-node": gpus or None,
            "cpus-per-task": cluster.cpus_per_rank,
            "mem": cluster.memory_per_node,
            "partition": partition,
            "account": cluster.account,
            "qos": cluster.qos,
            "constraint": constraint,
            "reservation": cluster.reservation,
            "time": cluster.time_limit,
        }
        yield from (f"--{key}={value}" for key, value in asked.items() if value is not None)
        if cluster.exclusive:
            yield "--exclusive"
        yield f"--signal=USR1@{cluster.signal_seconds}"
        yield "--requeue"
        for index, option in enumerate(cluster.options):
            name = option.removeprefix("--").partition("=")[0]
            if any(own.startswith(name) for own in _OURS):  # SLURM takes beginnings for the whole
                message = f"got {option!r}, which `mimo launch` decides itself; remove it"
                raise RecipeError(self.recipe.problem(("cluster", "options", index), message))
            yield option

    def output(self, name: str) -> Iterator[str]:
        """Where a script's own output goes. Raises RecipeError if SLURM cannot read the path."""
        path = f"{str(self.logs).replace('%', '%%')}/{name}"
        if not path.isprintable() or re.search(r"""["'\\#]""", path):
            given = self.cluster.log_dir is not None
            message = (
                f"jobs would write to {path!r}, but SLURM reads no path with quotes, '\\', '#' or "
                f"line breaks; set cluster.log_dir to another folder"
            )
            key = ("cluster", "log_dir") if given else ("train", "run_dir")
            raise RecipeError(self.recipe.problem(key, message))
        yield f'--output="{path}"'
        yield "--open-mode=append"

    def _components(self) -> Iterator[dict[str, Any]]:
        """For each component of the job: its directives, options of srun, and table of nodes."""
        placement, cluster = self.placement, self.cluster
        several = len(placement.components) > 1
        for number, component in enumerate(placement.components):
            directives = [*self.directives(number)]
            if number == 0:
                output = self.output("job_%j.out")
                directives = [f"--job-name={self.name}", *output, *directives]
            hosts = f"hosts_{component.name}"
            options = [f"--het-group={number}"] if several else []
            table = [*_table(component)]
            if self.least_nodes is None:
                num_ranks = sum(map(len, component.nodes))
                options.append(f"--nodes={len(component.nodes)} --ntasks={num_ranks}")
                if _is_in_order(component):
                    options[-1] += f" --ntasks-per-node={len(component.nodes[0])}"
                    options[-1] += " --distribution=block"
                    table = []
            else:
                options.append(f'--nodes="$(sort -u "$launch/{hosts}" | wc -l)"')
                options.append(f'--ntasks="$(wc -l <"$launch/{hosts}")"')
            if table:
                options.append(f'--distribution=arbitrary --nodelist="$launch/{hosts}"')
            if cluster.cpus_per_rank is not None:
                options.append(f"--cpus-per-task={cluster.cpus_per_rank}")
            if any(one.startswith("--gpus-per-node=") for one in directives):
                options.append(f"--gpu-bind={cluster.gpu_binding}")
            yield {
                "directives": directives,
                "srun": options,
                "table": [
                    " ".join(table[first : first + _ENTRIES_PER_LINE])
                    for first in range(0, len(table), _ENTRIES_PER_LINE)
                ],
                "variable": f"ranks_of_{component.name}",
                "hosts": hosts,
                "node_list": f"SLURM_JOB_NODELIST_HET_GROUP_{number}"
                if several
                else "SLURM_JOB_NODELIST",
            }


def prepare(
    path: Path,
    overrides: Sequence[str] = (),
    site: Path | None = None,
    form: Form = "fixed",
) -> Job:
    """Check a recipe and place its ranks. site: a file whose keys lie over `cluster:`.

    Raises RecipeError with all problems, as `mimo check` finds them.
    """
    phased = load_phases(path, overrides, None if site is None else {"cluster": site})
    layouts = phased.each(lambda recipe: check_recipe(recipe, None))
    if form == "fixed" and phased.phases[0].recipe.cluster.encoder_nodes is not None:
        form = "heterogeneous"
    placement = place(phased, layouts, form == "heterogeneous")
    least = None
    if form == "elastic":
        least = _least_nodes(phased, len(placement.nodes))
    return Job(phased, layouts, placement, Path.cwd(), least)


def _least_nodes(phased: PhasedRecipe, most: int) -> int:
    """The fewest nodes for which there is a layout."""
    with TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(phased.to_yaml(), encoding="utf-8")

        def fits(num_nodes: int) -> bool:
            try:
                fit(recipe, (), num_nodes)
            except (RecipeError, StartError):
                raise
            except InputError:
                return False
            return True

        return bisect_left(range(1, most), True, key=fits) + 1


def write(job: Job) -> Path:
    """Write the script and what it needs to the run's folder; returns the script."""
    text = job.text
    for folder in (job.launch, job.logs):
        folder.mkdir(parents=True, exist_ok=True)
    (job.launch / "placement.txt").write_text(job.placement_text, encoding="utf-8")
    (job.launch / "recipe.yaml").write_text(job.phased.to_yaml(), encoding="utf-8")
    partial = job.launch / ".job.sh"
    partial.write_text(text, encoding="utf-8")
    partial.chmod(0o755)
    return partial.replace(job.launch / "job.sh")  # one that bash reads now stays as it is


@cache
def template(name: str) -> Template:
    """One of the scripts beside this file; its filter `q` makes a value one word of bash."""
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


def _table(component: Component) -> Iterator[str]:
    """RANKSxNODE for each run of neighbouring ranks on one node, in the order of ranks."""
    node_of = sorted((rank, node) for node, ranks in enumerate(component.nodes) for rank in ranks)
    for node, ranks in groupby(node for _, node in node_of):
        yield f"{len([*ranks])}x{node}"


def _is_in_order(component: Component) -> bool:
    """Whether SLURM's own order, all nodes alike, is the one that is wanted."""
    ranks = [rank for node in component.nodes for rank in node]
    return len({len(node) for node in component.nodes}) == 1 and ranks == sorted(ranks)
