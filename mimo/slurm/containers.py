"""The container that ranks run in, as words of a script: options for pyxis, or all of apptainer."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator
from pathlib import Path

from mimo.config.phases import PhasedRecipe
from mimo.config.source import Location
from mimo.errors import RecipeError


class Container:
    """How commands get into the recipe's container, or how they do without one.

    words: the array `container` of a script. alone: what stands before a command on the first node.
    of_step: after the options of srun, before the command of a rank.
    Raises RecipeError for a path that a mount cannot have.
    """

    def __init__(self, phased: PhasedRecipe, folder: Path) -> None:
        self.words = list[str]()
        self.alone = self.of_step = ""
        self._recipe = phased.phases[0].recipe
        cluster = self._recipe.cluster
        if cluster.container is None:
            return
        mounts, image = [*self._mounts(phased, folder)], cluster.container.image
        if image.startswith("-"):
            raise self._refused(("cluster", "container", "image"), image, "begins with '-'")
        self.alone = self.of_step = '"${container[@]}" '
        if cluster.container.runtime == "pyxis":
            options = {"image": image, "mounts": ",".join(mounts), "workdir": str(folder)}
            self.words = [f"--container-{key}={value}" for key, value in options.items()]
            one = 'srun --export=ALL --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" '
            self.alone = f"{one}{self.alone}"
        else:
            self.words = ["apptainer", "exec", f"--pwd={folder}"]
            self.words += ["--nv"] if cluster.gpus_per_node else []
            self.words += [*(f"--bind={mount}" for mount in mounts), image]

    def _mounts(self, phased: PhasedRecipe, folder: Path) -> Iterator[str]:
        """`HOST:CONTAINER`: the folders that the recipe names, then those that it lists."""
        found: list[str] = []
        for key, path in sorted(_folders(phased, folder), key=lambda one: one[1]):
            if any(path == one or path.startswith(f"{one}/") for one in found):
                continue
            if re.search(r"[:,]", path):
                raise self._refused(key, path, "has ':' or ','")
            found.append(path)
            yield f"{path}:{path}"
        assert self._recipe.cluster.container is not None, "only called with a container"
        for index, mount in enumerate(self._recipe.cluster.container.mounts):
            if "," in mount:
                raise self._refused(("cluster", "container", "mounts", index), mount, "has ','")
            yield mount

    def _refused(self, key: Location, given: str, why: str) -> RecipeError:
        message = f"got {given!r}, which {why}, and no container can be told so; rename it"
        return RecipeError(self._recipe.problem(key, message))


def _folders(phased: PhasedRecipe, folder: Path) -> Iterator[tuple[Location, str]]:
    """The folders that commands read and write, with the keys that name them."""
    yield (), str(folder)
    for phase in phased.phases:
        recipe, data, cluster = phase.recipe, phase.recipe.data, phase.recipe.cluster
        named: dict[Location, str | None] = {
            ("init_from",): recipe.init_from,
            ("train", "run_dir"): str(phased.run_dir.parent),
            ("data", "tokenizer"): data.tokenizer,
            ("data", "cache_directory"): data.cache_directory,
            ("cluster", "log_dir"): cluster.log_dir,
            ("cluster", "local_logs"): cluster.local_logs,
        }
        parts = {"sources": data.sources, "validation": data.validation, "test": data.test}
        for part, sources in parts.items():
            for index, source in enumerate(sources):
                if "://" not in source.path:
                    plain = re.split(r"[*?\[{]", source.path)[0]
                    named["data", part, index, "path"] = os.path.dirname(plain)
        for key, path in named.items():
            if path is not None:
                yield key, os.path.normpath(folder / path)
