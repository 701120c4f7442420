"""The built-in matrix of layouts: one line each, on up to eight ranks.

They are applied to a recipe's families and settings; only the layout keys come from the matrix.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mimo.errors import RecipeError
from mimo.layout.grids import LANGUAGE, GridSpec, Layout
from mimo.recipe.schema import Recipe
from mimo.recipe.source import YamlSource
from mimo.verify.shrink import place

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
}
# The matrix alone decides these.
_RESET = (
    "language.freeze=false",
    "language.lora=null",
    "language.recompute=none",
    "bridge.delivery=sharded",
    "train.overlap_grad_reduce=false",
    "train.overlap_param_gather=false",
    "data.packing=true",
    "train.distributed_optimizer=false",
    "train.precision=fp32",
)
_RESET_ENCODER = (
    "freeze=false",
    "lora=null",
    "recompute=none",
    "run_ahead=auto",
    "encode_group=all",
)


@dataclass(frozen=True)
class SweepCell:
    """Grids in shorthand: `tp2 sp pp2`, `dp3`, `colocated tp2`; "" is one rank.

    second: the grid of a second encoder, if the cell has one.
    """

    language: str
    encoder: str
    options: tuple[str, ...] = ()
    second: str | None = None

    @property
    def name(self) -> str:
        """For example `dp3 → tp2 dp2 · recompute`."""
        encoders = [self.encoder, *([] if self.second is None else [self.second])]
        lanes = " + ".join(text or "1 rank" for text in encoders)
        return " · ".join([f"{lanes} → {self.language or '1 rank'}", *self.options])


SWEEP = (
    # Lane ratios: equal, fan-in, fan-out, and those that do not divide.
    SweepCell("", ""),
    SweepCell("dp2", "dp2", ("overlap",)),
    SweepCell("", "dp3"),
    SweepCell("dp3", ""),
    SweepCell("dp2", "dp3", ("clipped",)),
    SweepCell("dp3", "dp2", ("recompute",)),
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
    # Only adapters learn, those of both modules or of the language model.
    SweepCell("tp2 sp pp2", "dp2", ("adapters",)),
    SweepCell("tp2 cp2", "colocated", ("adapters", "recompute")),
    SweepCell("pp2 vpp2", "tp2", ("adapters", "overlap")),
    SweepCell("tp2 sp", "dp2", ("language adapters", "recompute")),
    # Two encoders: disjoint, colocated, and one of each.
    SweepCell("tp2 sp dp2", "dp3", second=""),
    SweepCell("tp2 pp2", "colocated tp2", second="colocated"),
    SweepCell("tp2 sp", "dp3", ("recompute",), second="colocated"),
    SweepCell("pp2 vpp2 dp2", "colocated", second="dp2"),
)


def sweep_recipe(recipe: Recipe, cell: SweepCell) -> tuple[Recipe, Layout]:
    """The recipe with a cell's encoders and options, and the cell's layout.

    Raises RecipeError for a recipe without an encoder.
    """
    names = _encoder_names(recipe, cell)
    source = YamlSource(Path("sweep"), recipe.model_dump(mode="json"))
    encoders = source.data["encoders"]
    if _SECOND in names and _SECOND not in encoders:
        # Its data are a separate media, whatever the first encoder's is.
        own = {"media": f"{_SECOND} media", "placeholder": f"<|{_SECOND}_pad|>"}
        own |= {"template_token": None, "other_media": {}}
        encoders[_SECOND] = {**encoders[names[0]], **own}
    source.data["encoders"] = {name: encoders[name] for name in names}
    reset = [f"encoders.{name}.{key}" for name in names for key in _RESET_ENCODER]
    options = [text.format(first=names[0]) for option in cell.options for text in _OPTIONS[option]]
    for override in (*_RESET, *reset, *options):
        source.override(override)
    assert not source.problems, source.problems
    return Recipe.model_validate(source.data), _layout(cell, names)


def _encoder_names(recipe: Recipe, cell: SweepCell) -> Sequence[str]:
    if not recipe.encoders:
        raise RecipeError("encoders: the sweep needs a recipe with at least one encoder")
    first, *others = recipe.encoders
    return [first] if cell.second is None else [first, (others or [_SECOND])[0]]


def _layout(cell: SweepCell, names: Sequence[str]) -> Layout:
    """Disjoint encoders first, then the language model."""
    language = GridSpec(LANGUAGE, **grid_sizes(cell.language))
    texts = [cell.encoder] if cell.second is None else [cell.encoder, cell.second]
    encoders, colocated = {}, []
    for name, text in zip(names, texts, strict=True):
        grid = GridSpec(name, **grid_sizes(text.removeprefix(_COLOCATED)))
        if text.startswith(_COLOCATED):
            colocated.append(name)
            grid = replace(grid, dp=language.size // grid.tp)
        encoders[name] = grid
    disjoint = [name for name in names if name not in colocated]
    return place(language, encoders, colocated, [*disjoint, LANGUAGE])


def grid_sizes(text: str) -> dict[str, Any]:
    """`"tp2 sp"` -> `{"tp": 2, "sp": True}`."""
    sizes: dict[str, Any] = {}
    for word in text.split():
        if word == "sp":
            sizes["sp"] = True
            continue
        match = re.fullmatch(r"(tp|cp|pp|vpp|dp)(\d+)", word)
        assert match is not None, f"{word!r} in {text!r} is no axis with a size"
        sizes[match[1]] = int(match[2])
    return sizes
