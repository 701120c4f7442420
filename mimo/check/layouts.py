"""The layouts that `mimo verify` runs: the recipe's, shrunk, or the built-in matrix.

The matrix is applied to a recipe's families and settings; only the layout keys come from it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mimo.check.scale import scale_recipe
from mimo.check.shrink import cover, lane_ratio, parallel_axes, place
from mimo.config.schema import Recipe
from mimo.config.source import YamlSource
from mimo.errors import InputError, RecipeError
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout

_COLOCATED = "colocated"
_SECOND = "second"  # the name of an encoder that a cell needs and the recipe lacks
_OPTIONS = {
    "frozen encoder": ("encoders.{first}.freeze=true",),
    "frozen language": ("language.freeze=true",),
    "adapters": ("language.lora={{}}", "encoders.{first}.lora={{}}"),
    "language adapters": ("language.lora={{}}", "encoders.{first}.freeze=true"),
    "only the projector learns": ("language.freeze=true", "encoders.{first}.freeze=tower"),
    "recompute": ("language.recompute=full", "encoders.{first}.recompute=full"),
    "selective recompute": ("language.recompute=selective",),
    "replicated": ("bridge.delivery=replicated",),
    "blocks of lanes": ("bridge.block_ranks=1",),
    "overlap": ("train.overlap_grad_reduce=true",),
    "groups of 3": ("encoders.{first}.encode_group=3",),
    "unpacked": (
        "data.packing=false",
        "data.tokens_per_microbatch=null",
        "data.rows_per_microbatch=null",
    ),
    "distributed optimizer": ("train.optimizer=adam", "train.distributed_optimizer=true"),
    "gathered late": ("train.overlap_grad_reduce=true", "train.overlap_param_gather=true"),
    "clipped": ("train.clip_grad_norm=0.5",),
    "kept gathered": (
        "language.reshard_after_forward=false",
        "encoders.{first}.reshard_after_forward=false",
    ),
    "reduced each time": (
        "language.reduce_gradients=microbatch",
        "encoders.{first}.reduce_gradients=microbatch",
    ),
}
# Values that a cell starts from, whatever the recipe says.
_RESET = {
    **{"freeze": False, "lora": None, "recompute": "none"},
    **{"reshard_after_forward": True, "reduce_gradients": "step"},
}
_RESET_ENCODER = {**_RESET, "run_ahead": "auto", "encode_group": "all"}
_RESET_TRAIN = ("overlap_grad_reduce", "overlap_param_gather", "distributed_optimizer")


class Cell(NamedTuple):
    """One layout to compare with one rank."""

    name: str
    recipe: Recipe
    layout: Layout


class Cells(NamedTuple):
    """The layouts of one command. notes: how they were chosen, for the report."""

    cells: list[Cell]
    notes: list[str]


@dataclass(frozen=True)
class SweepCell:
    """Grids in shorthand: `tp2 sp pp2`, `dp3`, `colocated tp2`; "" is one rank.

    `fsdp` is the engine, megatron without it; `replicate2` is the grid's dp_replicate.
    second: the grid of a second encoder, if the cell has one.
    """

    language: str
    encoder: str
    options: tuple[str, ...] = ()
    second: str | None = None

    @property
    def encoders(self) -> list[str]:
        """The grids of one or two encoders, in shorthand."""
        return [self.encoder, *([] if self.second is None else [self.second])]

    @property
    def name(self) -> str:
        """For example `dp3 → tp2 dp2 · recompute`."""
        encoders = " + ".join(grid or "1 rank" for grid in self.encoders)
        return " · ".join([f"{encoders} → {self.language or '1 rank'}", *self.options])


SWEEP = (
    # Lane ratios: equal, fan-in, fan-out, and those that do not divide.
    SweepCell("", ""),
    SweepCell("dp2", "dp2", ("overlap",)),
    SweepCell("", "dp3"),
    SweepCell("dp3", ""),
    SweepCell("dp2", "dp3", ("clipped",)),
    SweepCell("dp3", "dp2", ("recompute",)),
    SweepCell("pp2 dp2", "dp4", ("blocks of lanes",)),
    # Tensor and sequence parallelism, on either side.
    SweepCell("tp2", "dp2"),
    SweepCell("tp2 sp", ""),
    SweepCell("tp2 sp", "tp2", ("recompute",)),
    SweepCell("tp2 sp dp2", "dp3"),
    SweepCell("tp2 sp dp2", "tp2 dp2", ("replicated",)),
    SweepCell("tp4 sp", "tp2"),
    # Pipelines, also interleaved, and encoders with several stages.
    SweepCell("pp2", "dp2"),
    SweepCell("pp3", "dp2", ("selective recompute",)),
    SweepCell("pp3", "pp2"),
    SweepCell("pp2 vpp2", ""),
    SweepCell("tp2 sp pp2 vpp2", "dp3"),
    SweepCell("tp2 sp pp2", "tp2 dp2", ("recompute",)),
    SweepCell("pp2 dp2", "dp3", ("overlap",)),
    # Colocated encoders.
    SweepCell("dp2", "colocated"),
    SweepCell("tp2 sp", "colocated"),
    SweepCell("tp2 dp2", "colocated tp2", ("groups of 3",)),
    SweepCell("tp2 sp dp2", "colocated", ("recompute",)),
    SweepCell("pp2 vpp2", "colocated tp2"),
    SweepCell("tp2 sp pp2 dp2", "colocated tp2"),
    # Context parallelism, packed and as a batch.
    SweepCell("cp2", "dp2"),
    SweepCell("cp2 dp2", "dp3"),
    SweepCell("tp2 cp2 sp", "tp2 sp", ("recompute",)),
    SweepCell("tp2 cp2", "dp3", ("replicated",)),
    SweepCell("cp2 pp2 vpp2", "dp2"),
    SweepCell("tp2 cp2 pp2", "colocated tp2"),
    SweepCell("tp2 cp2 sp dp2", "colocated", ("recompute",)),
    SweepCell("tp2 cp2 sp", "dp2", ("unpacked",)),
    SweepCell("cp2", "dp2", second="colocated"),
    # Batches instead of packed sequences.
    SweepCell("dp2", "", ("unpacked",)),
    SweepCell("tp2 sp pp2", "dp3", ("unpacked", "recompute")),
    # A distributed optimizer.
    SweepCell("dp2", "dp3", ("distributed optimizer",)),
    SweepCell("cp2 pp2", "dp2", ("distributed optimizer", "gathered late")),
    SweepCell("tp2 sp pp2", "dp2", ("distributed optimizer", "clipped")),
    SweepCell("tp2 sp dp2", "colocated tp2 sp", ("distributed optimizer",)),
    # Frozen parts.
    SweepCell("pp3", "dp2", ("only the projector learns",)),
    SweepCell("cp2", "pp2", ("only the projector learns",)),
    SweepCell("dp2", "dp2", ("frozen encoder",)),
    SweepCell("tp2 sp pp2", "dp2", ("frozen language",)),
    SweepCell("tp2 pp2", "colocated", ("frozen encoder",)),
    SweepCell("pp3", "", ("frozen language",)),
    # Only adapters are trained, those of both modules or of the language model.
    SweepCell("tp2 sp pp2", "dp2", ("adapters",)),
    SweepCell("tp2 cp2", "colocated", ("adapters", "recompute")),
    SweepCell("pp2 vpp2", "tp2", ("adapters", "overlap")),
    SweepCell("tp2 sp", "dp2", ("language adapters", "recompute")),
    # Two encoders: disjoint, colocated, and one of each.
    SweepCell("tp2 sp dp2", "dp3", second=""),
    SweepCell("tp2 pp2", "colocated tp2", second="colocated"),
    SweepCell("tp2 sp", "dp3", ("recompute",), second="colocated"),
    SweepCell("pp2 vpp2 dp2", "colocated", second="dp2"),
    # The modules of transformers on both sides.
    SweepCell("fsdp dp2", "fsdp dp2", ("clipped",)),
    SweepCell("fsdp tp2", "fsdp"),
    SweepCell("fsdp tp2 sp", "fsdp dp2", ("recompute",)),
    SweepCell("fsdp tp2 sp dp2", "fsdp dp3"),
    SweepCell("fsdp dp4 replicate2", "fsdp dp2", ("kept gathered",)),
    SweepCell("fsdp dp2 replicate2", "fsdp dp4 replicate2", ("reduced each time",)),
    SweepCell("fsdp dp2", "fsdp dp3", ("unpacked",)),
    SweepCell("fsdp tp2 sp dp2", "colocated fsdp"),
    SweepCell(
        "fsdp tp2 dp2",
        "colocated fsdp",
        ("groups of 3", "selective recompute", "reduced each time"),
    ),
    SweepCell("fsdp tp2 sp", "fsdp dp2", ("replicated",)),
    SweepCell("fsdp tp2 sp dp2", "fsdp dp2", ("frozen encoder",)),
    SweepCell("fsdp dp3", "fsdp dp2", ("only the projector learns",)),
    SweepCell("fsdp tp2 sp", "fsdp dp2", ("frozen language", "recompute")),
    SweepCell("fsdp dp2", "colocated fsdp", ("frozen language",)),
    SweepCell("fsdp tp2 sp dp2", "fsdp dp2", ("adapters",)),
    SweepCell("fsdp tp2", "colocated fsdp", ("language adapters",)),
    # The modules of transformers on one side only.
    SweepCell("pp2", "fsdp dp2"),
    SweepCell("tp2 sp pp2", "fsdp dp3", ("recompute",)),
    SweepCell("pp2 dp2", "colocated fsdp"),
    SweepCell("cp2", "colocated fsdp", ("overlap",)),
    SweepCell("fsdp tp2 sp", "dp2"),
    SweepCell("fsdp tp2 sp dp2", "colocated tp2", ("recompute",)),
    SweepCell("fsdp dp2", "pp2", ("distributed optimizer",)),
)


def recipe_cells(recipe: Recipe, num_ranks: int | None, max_ranks: int, full: bool) -> Cells:
    """Return the recipe's layout, shrunk to ``max_ranks`` or in full size. Raises InputError."""
    layout, title = check_recipe(recipe, num_ranks), "the recipe's layout"
    if full:
        return Cells([Cell(title, recipe, layout)], [describe(layout)])
    try:
        covered = cover(layout, max_ranks)
    except ValueError as error:
        raise InputError(f"--max-ranks {max_ranks}: {error}; give more ranks") from error
    notes = [f"the recipe: {describe(layout)}"]
    small = covered.parts[0]
    if small.layout == layout:
        return Cells([Cell(title, recipe, layout)], notes)
    if len(small.axes) == len(parallel_axes(layout)):
        notes.append(f"run here:   {describe(small.layout)}")
        return Cells([Cell(f"{title}, shrunk", recipe, small.layout)], notes)
    notes.append(f"with all its axes it needs more than {max_ranks} ranks; run here:")
    notes += [f"  {part.name}: {describe(part.layout)}" for part in covered.parts]
    notes += [
        f"  not run together: {'.'.join(first)} and {'.'.join(second)}"
        for first, second in covered.uncovered
    ]
    return Cells([Cell(part.name, recipe, part.layout) for part in covered.parts], notes)


def sweep_cells(recipe: Recipe, max_ranks: int, precision: str) -> Cells:
    """Return the layouts of the built-in matrix. Raises InputError for an unusable recipe."""
    check_recipe(recipe, None)
    cells: list[Cell] = []
    left_out: dict[str, list[str]] = {}  # by reason
    refused = []
    with tempfile.TemporaryDirectory(prefix="mimo-verify-") as folder:
        for shorthand in SWEEP:
            cell, reason = Cell(shorthand.name, *sweep_recipe(recipe, shorthand)), ""
            if cell.layout.world_size > max_ranks:
                reason = f"they need more than {max_ranks} ranks"
            elif precision == "fp64" and cell.recipe.train.distributed_optimizer:
                # The cell exists to test that optimizer.
                reason = "the engine's distributed optimizer has no fp64"
            else:
                try:
                    scale_recipe(cell.recipe, cell.layout, Path(folder), precision)
                except RecipeError as error:
                    reason = "; ".join(error.problems)
                    refused.append(reason)
            if reason:
                left_out.setdefault(reason, []).append(cell.name)
            else:
                cells.append(cell)
    if not cells and refused:
        raise RecipeError(*dict.fromkeys(refused))
    if not cells:
        raise InputError(f"--max-ranks {max_ranks}: every layout of the sweep needs more ranks")
    notes = [f"{len(cells)} layouts of the built-in matrix"]
    notes += [f"left out: {', '.join(names)}: {why}" for why, names in left_out.items()]
    unused = list(recipe.encoders)[2:]
    if unused:
        notes.append(f"the matrix has two encoders at most; not run: {', '.join(unused)}")
    return Cells(cells, notes)


def sweep_recipe(recipe: Recipe, cell: SweepCell) -> tuple[Recipe, Layout]:
    """Return the recipe with a cell's encoders and options, and the cell's layout."""
    if not recipe.encoders:
        raise RecipeError("encoders: the sweep needs a recipe with at least one encoder")
    names = [*recipe.encoders, _SECOND][: len(cell.encoders)]
    data = recipe.model_dump(mode="json")
    # An added encoder has a modality of its own.
    added = {"media": f"{_SECOND} media", "placeholder": f"<|{_SECOND}_pad|>"}
    added |= {"template_token": None, "other_media": {}}
    first = data["encoders"][names[0]]
    data["encoders"] = {
        name: {**data["encoders"].get(name, first | added), **_RESET_ENCODER} for name in names
    }
    data["language"] |= _RESET
    data["language"]["engine"] = _grid(LANGUAGE, cell.language).engine
    for name, text in zip(names, cell.encoders, strict=True):
        data["encoders"][name]["engine"] = _grid(name, text).engine
    data["bridge"] |= {"delivery": "sharded", "block_ranks": 512}
    data["data"]["packing"] = True
    data["train"] |= dict.fromkeys(_RESET_TRAIN, False) | {"precision": "fp32"}
    source = YamlSource(Path("sweep"), data)
    for override in (text for option in cell.options for text in _OPTIONS[option]):
        source.override(override.format(first=names[0]))
    assert not source.problems, source.problems
    swept = Recipe.model_validate(source.data)
    return swept, _sweep_layout(cell, names, swept.bridge.block_ranks == 1)


def _sweep_layout(cell: SweepCell, names: Sequence[str], in_blocks: bool) -> Layout:
    language, encoders = _grid(LANGUAGE, cell.language), {}
    shorthands = dict(zip(names, cell.encoders, strict=True))
    colocated = [name for name, text in shorthands.items() if text.startswith(_COLOCATED)]
    for name, text in shorthands.items():
        grid = _grid(name, text)
        lanes = language.size // grid.tp if name in colocated else grid.dp
        encoders[name] = replace(grid, dp=lanes)
    return place(language, encoders, colocated, in_blocks)


def _grid(module: str, text: str) -> GridSpec:
    words = text.split()
    sizes: Any = {a: int(n) for a, n in re.findall(r"\b(tp|cp|pp|vpp|dp)(\d+)", text)}
    copies = re.search(r"replicate(\d+)", text)
    return GridSpec(
        module,
        sp="sp" in words,
        engine="fsdp" if "fsdp" in words else "megatron",
        dp_replicate=int(copies[1]) if copies else 1,
        **sizes,
    )


def describe(layout: Layout) -> str:
    """Return one line with all grids of a layout and the kinds of its lane ratios."""
    parts = []
    for name, grid in layout.encoders.items():
        placement = " colocated" if name in layout.colocated else ""
        ratio = lane_ratio(grid.dp, layout.language.dp)
        parts.append(f"{name}{placement} {_axes(grid)} ({ratio} lanes)")
    parts.append(f"language {_axes(layout.language)}")
    return f"{' → '.join(parts)} = {layout.world_size} ranks"


def _axes(grid: GridSpec) -> str:
    words = ["fsdp"] * (grid.engine == "fsdp") + [f"tp{grid.tp}"] * (grid.tp > 1) + ["sp"] * grid.sp
    for axis in ("cp", "pp", "vpp", "dp"):
        words += [f"{axis}{getattr(grid, axis)}"] * (getattr(grid, axis) > 1)
    words += [f"replicate{grid.dp_replicate}"] * (grid.dp_replicate > 1)
    return " ".join(words) or "1 rank"
