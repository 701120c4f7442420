"""The layouts that `mimo verify` runs: the recipe's, shrunk, or the built-in matrix.

The matrix is applied to a recipe's families and settings; only the layout keys come from it.
"""

import re
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from mimo.check.scale import MULTI_RANK_KEYS, scale_recipe
from mimo.check.shrink import cover, lane_ratio, place
from mimo.config.schema import Recipe
from mimo.config.source import YamlSource
from mimo.errors import InputError, RecipeError
from mimo.families.registry import language_settings
from mimo.model.recipe_checks import check_recipe
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout

_COLOCATED, _NONE = "colocated", "none"
_SECOND = "second"  # the name of an encoder that a cell needs and the recipe lacks
# Overrides. `encoder` and `generator`: the first of its kind; `each`: both and the language model.
_OPTIONS = {
    "frozen encoder": ("encoder.freeze=true",),
    "frozen language": ("language.freeze=true",),
    "frozen generator": ("generator.freeze=true",),
    "adapters": (
        "language.lora={}",
        "encoder.lora={}",
        "generator.lora={targets: ['*.to_q', '*.to_out.0']}",
    ),
    "language adapters": ("language.lora={}", "encoder.freeze=true"),
    "only the projector learns": ("language.freeze=true", "encoder.freeze=tower"),
    "prompt": ("generator.condition=prompt",),
    "recompute": ("each.recompute=full",),
    "selective recompute": ("language.recompute=selective",),
    "replicated": ("bridge.delivery=replicated",),
    "blocks of lanes": ("bridge.block_ranks=1",),
    "overlap": ("train.overlap_grad_reduce=true",),
    "groups of 3": ("encoder.encode_group=3",),
    "unpacked": (
        "data.packing=false",
        "data.tokens_per_microbatch=null",
        "data.rows_per_microbatch=null",
    ),
    "distributed optimizer": ("train.optimizer=adam", "train.distributed_optimizer=true"),
    "gathered late": ("train.overlap_grad_reduce=true", "train.overlap_param_gather=true"),
    "router losses": ("language.model.balance_loss=0.3", "language.model.z_loss=0.1"),
    "pooled losses": ("language.model.balance_loss=0.3", "language.model.pool_layers=true"),
    "clipped": ("train.clip_grad_norm=0.5",),
    "kept gathered": ("each.reshard_after_forward=false",),
    "reduced each time": ("each.reduce_gradients=microbatch",),
}
# Values that a cell starts from, whatever the recipe says.
_RESET = {"freeze": False, "lora": None, "recompute": "none"}
_RESET |= {"reshard_after_forward": True, "reduce_gradients": "step"}
_RESET_ENCODER = {**_RESET, "run_ahead": "auto", "encode_group": "all"}


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
    encoder: `none` for a cell without encoders. second: the grid of a second encoder, if the cell
    has one. generator: of a generator, if it has one.
    """

    language: str
    encoder: str
    options: tuple[str, ...] = ()
    second: str | None = None
    generator: str | None = None

    @property
    def needs_experts(self) -> bool:
        return re.search(r"\bet?p\d", self.language) is not None

    @property
    def encoders(self) -> list[str]:
        if self.encoder == _NONE:
            return []
        return [self.encoder, *([] if self.second is None else [self.second])]

    @property
    def name(self) -> str:
        """For example `dp3 → tp2 dp2 · recompute` or, with a generator, `none → tp2 → dp2`."""
        encoders = " + ".join(grid or "1 rank" for grid in self.encoders) or _NONE
        after = [] if self.generator is None else [self.generator or "1 rank"]
        grids = " → ".join([encoders, self.language or "1 rank", *after])
        return " · ".join([grids, *self.options])


# Encoders → language model · options, and encoders → language model → generator · options.
_SWEEP = """
# Lane ratios: equal, fan-in, fan-out, and those that do not divide.
1 rank → 1 rank | dp2 → dp2 · overlap | dp3 → 1 rank | 1 rank → dp3 | dp3 → dp2 · clipped |
dp2 → dp3 · recompute | dp4 → pp2 dp2 · blocks of lanes
# Tensor and sequence parallelism, on either side.
dp2 → tp2 | 1 rank → tp2 sp | tp2 → tp2 sp · recompute | dp3 → tp2 sp dp2 |
tp2 dp2 → tp2 sp dp2 · replicated | tp2 → tp4 sp
# Pipelines, also interleaved, and encoders with several stages.
dp2 → pp2 | dp2 → pp3 · selective recompute | pp2 → pp3 | 1 rank → pp2 vpp2 |
dp3 → tp2 sp pp2 vpp2 | tp2 dp2 → tp2 sp pp2 · recompute | dp3 → pp2 dp2 · overlap
# Colocated encoders.
colocated → dp2 | colocated → tp2 sp | colocated tp2 → tp2 dp2 · groups of 3 |
colocated → tp2 sp dp2 · recompute | colocated tp2 → pp2 vpp2 | colocated tp2 → tp2 sp pp2 dp2
# Context parallelism, packed and as a batch.
dp2 → cp2 | dp3 → cp2 dp2 | tp2 sp → tp2 cp2 sp · recompute | dp3 → tp2 cp2 · replicated |
dp2 → cp2 pp2 vpp2 | colocated tp2 → tp2 cp2 pp2 | colocated → tp2 cp2 sp dp2 · recompute |
dp2 → tp2 cp2 sp · unpacked | dp2 + colocated → cp2
# Batches instead of packed sequences.
1 rank → dp2 · unpacked | dp3 → tp2 sp pp2 · unpacked · recompute
# Experts that ranks share out or split, where the recipe's language model has some.
dp3 → dp2 ep2 · clipped | dp2 → dp4 ep4 · router losses | 1 rank → tp2 ep2 · recompute |
dp2 → tp2 sp ep2 dp2 · router losses | 1 rank → tp2 etp2 | dp2 → tp2 sp etp2 ep2 dp2 |
dp2 → cp2 ep2 · router losses | tp2 → pp2 dp2 ep2 · overlap |
dp3 → pp2 vpp2 dp2 ep2 · router losses · recompute | colocated tp2 → tp2 sp ep2 pp2 |
colocated → tp2 cp2 ep4 · router losses | dp2 → dp2 ep2 · distributed optimizer |
colocated → tp2 sp dp2 ep2 · distributed optimizer · gathered late |
dp2 → tp2 sp ep2 · language adapters · recompute | dp2 → tp2 cp2 ep2 · pooled losses |
dp3 → tp2 sp ep2 dp2 · pooled losses · recompute | 1 rank → dp2 ep2 |
colocated → dp4 ep4 · recompute | colocated → cp2 dp2 ep4 · recompute |
dp2 → cp2 pp2 vpp2 ep2 | colocated → tp2 sp pp2 vpp2 ep2 · router losses |
colocated → tp2 cp2 sp ep2 etp2 | colocated → tp4 sp ep2 etp2 · router losses |
dp2 → tp2 sp etp2 · recompute | colocated → pp2 dp2 etp2 | dp2 → dp2 ep2 · frozen language |
dp2 → tp2 sp ep2 · unpacked · recompute | dp2 + colocated → dp2 ep2 · router losses
# A distributed optimizer.
dp3 → dp2 · distributed optimizer | dp2 → cp2 pp2 · distributed optimizer · gathered late |
dp2 → tp2 sp pp2 · distributed optimizer · clipped |
colocated tp2 sp → tp2 sp dp2 · distributed optimizer
# Frozen parts.
dp2 → pp3 · only the projector learns | pp2 → cp2 · only the projector learns |
dp2 → dp2 · frozen encoder | dp2 → tp2 sp pp2 · frozen language |
colocated → tp2 pp2 · frozen encoder | 1 rank → pp3 · frozen language
# Only adapters are trained, those of both modules or of the language model.
dp2 → tp2 sp pp2 · adapters | colocated → tp2 cp2 · adapters · recompute |
tp2 → pp2 vpp2 · adapters · overlap | dp2 → tp2 sp · language adapters · recompute
# Two encoders: disjoint, colocated, and one of each.
dp3 + 1 rank → tp2 sp dp2 | colocated tp2 + colocated → tp2 pp2 |
dp3 + colocated → tp2 sp · recompute | colocated + dp2 → pp2 vpp2 dp2
# The modules of transformers on both sides.
fsdp dp2 → fsdp dp2 · clipped | fsdp → fsdp tp2 | fsdp dp2 → fsdp tp2 sp · recompute |
fsdp dp3 → fsdp tp2 sp dp2 | fsdp dp2 → fsdp dp4 replicate2 · kept gathered |
fsdp dp4 replicate2 → fsdp dp2 replicate2 · reduced each time | fsdp dp3 → fsdp dp2 · unpacked |
colocated fsdp → fsdp tp2 sp dp2 |
colocated fsdp → fsdp tp2 dp2 · groups of 3 · selective recompute · reduced each time |
fsdp dp2 → fsdp tp2 sp · replicated | fsdp dp2 → fsdp tp2 sp dp2 · frozen encoder |
fsdp dp2 → fsdp dp3 · only the projector learns |
fsdp dp2 → fsdp tp2 sp · frozen language · recompute | colocated fsdp → fsdp dp2 · frozen language |
fsdp dp2 → fsdp tp2 sp dp2 · adapters | colocated fsdp → fsdp tp2 · language adapters
# The modules of transformers on one side only.
fsdp dp2 → pp2 | fsdp dp3 → tp2 sp pp2 · recompute | colocated fsdp → pp2 dp2 |
colocated fsdp → cp2 · overlap | dp2 → fsdp tp2 sp | colocated tp2 → fsdp tp2 sp dp2 · recompute |
pp2 → fsdp dp2 · distributed optimizer |
# Generators: lane ratios, and parallelism of the language model.
1 rank → dp2 → 1 rank | dp2 → dp2 → dp2 · clipped | 1 rank → dp2 → dp3 · recompute |
1 rank → 1 rank → dp2 | dp2 → tp2 → dp3 | 1 rank → tp2 sp → dp2 |
dp2 → cp2 → dp2 | dp2 → tp2 cp2 sp → dp2 · replicated | dp2 → pp2 → dp2 · recompute |
dp3 → pp2 vpp2 → dp2 | dp2 → tp2 sp pp2 → dp2 · prompt | dp2 → dp2 → dp2 · blocks of lanes
# Generators without and with a colocated encoder, and colocated ones.
none → dp2 → dp3 · prompt | none → tp2 sp → 1 rank | colocated → dp2 → dp2 |
colocated tp2 → tp2 sp pp2 → dp2 | dp2 → dp2 → colocated | none → tp2 → colocated · prompt |
colocated → tp2 sp → colocated · recompute | 1 rank → tp2 sp dp2 → colocated | dp2 → cp2 → colocated
# Generators with frozen parts, adapters, batches and a distributed optimizer.
dp2 → dp2 → dp2 · frozen language | none → pp2 → dp2 · frozen language · prompt |
none → tp2 sp → colocated · frozen language | dp2 → tp2 → dp2 · frozen generator |
dp2 → tp2 sp → dp2 · adapters | colocated → dp2 → colocated · adapters |
1 rank → dp2 → dp4 replicate2 · unpacked | none → tp2 sp → colocated · unpacked · recompute |
dp2 → tp2 sp → dp2 · distributed optimizer
# Generators whose conditions come from a model of transformers.
fsdp dp2 → fsdp dp2 → dp2 · reduced each time | fsdp → fsdp tp2 sp → dp3 · recompute |
colocated fsdp → fsdp tp2 sp → colocated · prompt | fsdp dp2 → fsdp tp2 → dp2 · frozen language
"""


def _parse(name: str) -> SweepCell:
    grids, *options = name.split(" · ")
    encoders, language, *after = grids.replace("1 rank", "").split(" → ")
    first, *second = encoders.split(" + ")
    generator = after[0] if after else None
    return SweepCell(language, first, tuple(options), second[0] if second else None, generator)


_LINES = (line for line in _SWEEP.splitlines() if line and not line.startswith("#"))
SWEEP = tuple(_parse(name) for line in _LINES for name in line.removesuffix(" |").split(" | "))
"""The built-in matrix."""


def recipe_cells(recipe: Recipe, max_ranks: int, full: bool) -> Cells:
    """Return the recipe's layout, shrunk to ``max_ranks`` or in full size. Raises InputError."""
    layout, title = check_recipe(recipe, None), "the recipe's layout"
    if full:
        return Cells([Cell(title, recipe, layout)], [describe(layout)])
    try:
        covered = cover(layout, max_ranks)
    except ValueError as error:
        raise InputError(f"--max-ranks {max_ranks}: {error}; give more ranks") from error
    notes = [f"the recipe: {describe(layout)}"]
    if len(covered.parts) == 1:
        small = covered.parts[0].layout
        if small != layout:
            title += ", shrunk"
            notes.append(f"run here:   {describe(small)}")
        return Cells([Cell(title, recipe, small)], notes)
    notes.append(f"with all its axes it needs more than {max_ranks} ranks; run here:")
    notes += [f"  {part.name}: {describe(part.layout)}" for part in covered.parts]
    pairs = (map(".".join, pair) for pair in covered.uncovered)
    notes += [f"  not run together: {' and '.join(pair)}" for pair in pairs]
    return Cells([Cell(part.name, recipe, part.layout) for part in covered.parts], notes)


def sweep_cells(recipe: Recipe, max_ranks: int, precision: str) -> Cells:
    """Return the layouts of the built-in matrix. Raises InputError for an unusable recipe."""
    check_recipe(recipe, None)
    if not recipe.encoders and not recipe.generators:
        raise RecipeError("encoders: the sweep needs a recipe with an encoder or a generator")
    cells: list[Cell] = []
    left_out: dict[str, list[str]] = {}  # by reason
    has_experts = language_settings(recipe).routers[0] > 0
    refused = []
    with tempfile.TemporaryDirectory(prefix="mimo-verify-") as folder:
        for shorthand in SWEEP:
            draws = shorthand.generator is not None
            if shorthand.needs_experts and not has_experts:
                continue
            if (shorthand.encoders and not recipe.encoders) or (draws and not recipe.generators):
                continue
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
    unused = {"two encoders": [*recipe.encoders][2:], "one generator": [*recipe.generators][1:]}
    for most, names in unused.items():
        notes += [f"the matrix has {most} at most; not run: {', '.join(names)}"] if names else []
    return Cells(cells, notes)


def sweep_recipe(recipe: Recipe, cell: SweepCell) -> tuple[Recipe, Layout]:
    """Return the recipe with a cell's modules and options, and the cell's layout."""
    names = [*recipe.encoders, _SECOND][: len(cell.encoders)]
    generators = [] if cell.generator is None else [*recipe.generators][:1]
    shorthands = {LANGUAGE: cell.language, **dict(zip(names, cell.encoders, strict=True))}
    # Generators have one engine, which the shorthand leaves out.
    shorthands |= dict.fromkeys(generators, f"{cell.generator} fsdp")
    grids = {name: _grid(name, text) for name, text in shorthands.items()}
    data = recipe.model_dump(mode="json")
    # An added encoder has a modality of its own.
    added = {"media": f"{_SECOND} media", "placeholder": f"<|{_SECOND}_pad|>"}
    added |= {"template_token": None, "other_media": {}}
    first = next(iter(data["encoders"].values()), {})
    data["encoders"] = {name: data["encoders"].get(name, first | added) for name in names}
    for name in names:
        data["encoders"][name] |= _RESET_ENCODER | {"engine": grids[name].engine}
    data["generators"] = {name: data["generators"][name] | _RESET for name in generators}
    data["language"] |= _RESET | {"engine": grids[LANGUAGE].engine}
    data["bridge"] |= {"delivery": "sharded", "block_ranks": 512}
    data["data"]["packing"] = True
    data["train"] |= dict.fromkeys(MULTI_RANK_KEYS, False) | {"precision": "fp32"}
    source = YamlSource(Path("sweep"), data)
    sections = {"encoder": [f"encoders.{name}" for name in names[:1]]}
    sections["generator"] = [f"generators.{name}" for name in generators]
    sections["each"] = [LANGUAGE, *sections["encoder"], *sections["generator"]]
    for override in (text for option in cell.options for text in _OPTIONS[option]):
        kind, _, setting = override.partition(".")
        for section in sections.get(kind, [kind]):
            source.override(f"{section}.{setting}")
    assert not source.problems, source.problems
    swept, language = Recipe.model_validate(source.data), grids.pop(LANGUAGE)
    colocated = [name for name in grids if shorthands[name].startswith(_COLOCATED)]
    for name in colocated:
        grids[name] = replace(grids[name], dp=language.size // grids[name].tp)
    in_blocks = swept.bridge.block_ranks == 1
    return swept, place(language, grids, colocated, in_blocks, generators)


def _grid(module: str, text: str) -> GridSpec:
    words = text.split()
    sizes: Any = {a: int(n) for a, n in re.findall(r"\b(e?tp|cp|v?pp|dp|ep|replicate)(\d+)", text)}
    return GridSpec(
        module,
        sp="sp" in words,
        engine="fsdp" if "fsdp" in words else "megatron",
        dp_replicate=sizes.pop("replicate", 1),
        **sizes,
    )


def describe(layout: Layout) -> str:
    """Return one line with all grids of a layout and the kinds of its lane ratios."""
    parts = []
    for name, grid in layout.grids.items():
        placement = " colocated" if name in layout.colocated else ""
        ratio = lane_ratio(grid.dp, layout.language.dp)
        lanes = "" if name == LANGUAGE else f" ({ratio} lanes)"
        parts.append(f"{name}{placement} {_axes(grid)}{lanes}")
    return f"{' → '.join(parts)} = {layout.world_size} ranks"


def _axes(grid: GridSpec) -> str:
    words = ["fsdp"] * (grid.engine == "fsdp") + [f"tp{grid.tp}"] * (grid.tp > 1) + ["sp"] * grid.sp
    for axis in ("cp", "pp", "vpp", "dp", "ep", "etp"):
        words += [f"{axis}{getattr(grid, axis)}"] * (getattr(grid, axis) > 1)
    words += [f"replicate{grid.dp_replicate}"] * (grid.dp_replicate > 1)
    return " ".join(words) or "1 rank"
