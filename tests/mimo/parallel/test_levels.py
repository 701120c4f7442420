"""Which stage needs which level, and how far an encoder must run ahead for it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimo.check.scale import scale_recipe
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import RecipeError
from mimo.parallel.build import build_layout
from mimo.parallel.grids import Link, links_of, minimum_run_ahead
from tests.mimo import tiny

SIZE = st.integers(1, 4)


@given(pp=SIZE, vpp=SIZE, per_chunk=SIZE, data=st.data())
def test_each_level_goes_to_the_chunk_that_owns_its_layer(
    pp: int, vpp: int, per_chunk: int, data: st.DataObject
) -> None:
    # Interleaved: part after part of the layers goes to stage after stage, then once more round.
    owner = {}
    layer = 0
    for chunk in range(vpp):
        for stage in range(pp):
            for _ in range(per_chunk):
                owner[layer] = (stage, chunk)
                layer += 1
    levels = data.draw(st.integers(0, layer))
    places = [(0, 0), *(owner[n] for n in range(levels))]
    links = links_of("vision", pp, vpp, layer, levels)
    assert [link.stage for link in links] == sorted({stage for stage, _ in places})
    assert links[0].levels[0] == 0
    got = {
        level: (link.stage, chunk)
        for link in links
        for level, chunk in zip(link.levels, link.chunks, strict=True)
    }
    assert got == dict(enumerate(places))


def test_levels_for_two_chunks_of_a_stage_share_its_link() -> None:
    links = links_of("vision", pp=2, vpp=2, num_layers=4, num_levels=3)
    assert links == (
        Link("vision", 0, levels=(0, 1, 3), chunks=(0, 0, 1)),
        Link("vision", 1, levels=(2,), chunks=(0,)),
    )
    assert [link.name for link in links] == ["vision (levels 0, 1, 3)", "vision (levels 2)"]
    assert Link("vision").name == "vision"


def test_an_encoder_without_levels_has_one_link_to_the_first_stage(tmp_path: Path) -> None:
    tiny.write_samples(tmp_path)
    layout = build_layout(load_recipe(tiny.write_recipe(tmp_path), ["language.grid.pp=2"]))
    assert layout.links_of("vision") == (Link("vision", 0, (0,), (0,)),)


# ------------------------------------------------------- run-ahead, by playing it through

Event = tuple[str, int, int, int]  # (what, stage, chunk, microbatch)


def schedule(
    pp: int, vpp: int, microbatches: int, stage: int, language_ahead: int
) -> Iterator[tuple[str, int, int]]:
    """The order of one stage: ("forward" or "backward", chunk, microbatch)."""
    order = [
        (chunk, m)
        for first in range(0, microbatches, pp)
        for chunk in range(vpp)
        for m in range(first, min(first + pp, microbatches))
    ]
    behind = pp - 1 - stage
    warmup = behind + language_ahead if vpp == 1 else 2 * behind + (vpp - 1) * pp
    warmup = min(warmup, len(order))
    for chunk, m in order[:warmup]:
        yield "forward", chunk, m
    for n in range(len(order)):
        if warmup + n < len(order):
            yield "forward", *order[warmup + n]
        chunk, m = order[n]
        yield "backward", vpp - 1 - chunk, m


def finishes(
    pp: int,
    vpp: int,
    microbatches: int,
    links: tuple[Link, ...],
    ahead: int,
    has_generator: bool = False,
    language_ahead: int = 0,
) -> bool:
    """Whether encoder, stages and generator all end, each waiting for what it needs.

    ahead: of the encoder. language_ahead: of the language model, for the generator.
    """
    done: set[Event] = set()

    def encoder() -> Iterator[list[Event]]:
        for m in range(microbatches + ahead):
            if m < microbatches:
                yield []
                done.add(("rows", 0, 0, m))
            if m >= ahead:
                answers = [("backward", k.stage, min(k.chunks), m - ahead) for k in links]
                yield answers

    def language(stage: int) -> Iterator[list[Event]]:
        for what, chunk, m in schedule(pp, vpp, microbatches, stage, language_ahead):
            part, needs = chunk * pp + stage, []
            if what == "forward":
                if part > 0:
                    needs.append(("forward", (part - 1) % pp, (part - 1) // pp, m))
                if any(k.stage == stage and chunk in k.chunks for k in links):
                    needs.append(("rows", 0, 0, m))
            elif part < pp * vpp - 1:
                needs.append(("backward", (part + 1) % pp, (part + 1) // pp, m))
            elif has_generator:
                needs.append(("drawn", 0, 0, m))
            yield needs
            done.add((what, stage, chunk, m))

    def generator() -> Iterator[list[Event]]:
        for m in range(microbatches * has_generator):
            yield [("forward", pp - 1, vpp - 1, m)]
            done.add(("drawn", 0, 0, m))

    stages = [language(stage) for stage in range(pp)]
    parties = [encoder(), *stages, generator()]
    waiting: list[list[Event] | None] = [next(party, None) for party in parties]
    moved = True
    while moved:
        moved = False
        for n, party in enumerate(parties):
            needs = waiting[n]
            if needs is not None and done.issuperset(needs):
                waiting[n] = next(party, None)
                moved = True
    return all(needs is None for needs in waiting)


def layouts_with_links() -> Iterator[tuple[int, int, int, tuple[Link, ...]]]:
    """(pp, vpp, microbatches, links): every prefix of the parts of a pipeline needs a level."""
    for pp, vpp in itertools.product(range(1, 6), range(1, 5)):
        if pp == 1 < vpp:
            continue
        counts = range(1, 4 * pp + 1) if vpp == 1 else range(pp, 4 * pp + 1, pp)
        for microbatches, levels in itertools.product(counts, range(pp * vpp + 1)):
            links = links_of("vision", pp, vpp, pp * vpp, levels)
            yield pp, vpp, microbatches, links


def test_the_least_run_ahead_is_enough_for_all_receiving_stages_and_one_less_is_not() -> None:
    for pp, vpp, microbatches, links in layouts_with_links():
        needed = minimum_run_ahead(pp, vpp, microbatches)
        what = f"pp {pp}, vpp {vpp}, {microbatches} microbatches, {links}"
        assert finishes(pp, vpp, microbatches, links, needed), what
        assert needed == 0 or not finishes(pp, vpp, microbatches, links, needed - 1), what


def test_a_generator_costs_encoders_a_microbatch_of_run_ahead_and_never_deadlocks() -> None:
    for pp, vpp, microbatches, links in layouts_with_links():
        ahead = int(vpp == 1)  # `Layout.ahead`
        needed = minimum_run_ahead(pp, vpp, microbatches, ahead)
        assert vpp > 1 or needed == min(pp, microbatches - 1)
        assert vpp == 1 or needed == minimum_run_ahead(pp, vpp, microbatches)
        sizes, what = (pp, vpp, microbatches, links), f"pp {pp}, vpp {vpp}, {microbatches}, {links}"
        assert finishes(*sizes, needed, True, ahead), what
        assert needed == 0 or not finishes(*sizes, needed - 1, True, ahead), what
        # Nor does the language model have to run ahead at all.
        assert finishes(*sizes, minimum_run_ahead(pp, vpp, microbatches), True, 0), what


# ---------------------------------------------------------------------- bad recipes

LEVELS = (
    "encoders.vision={family: qwen3_vl, model: {num_layers: 4, hidden_size: 16, "
    "ffn_hidden_size: 24, num_attention_heads: 2, deepstack_visual_indexes: [0, 1, 3]}}"
)


def test_more_levels_than_layers_are_refused_with_both_numbers(tmp_path: Path) -> None:
    recipe = load_recipe(tiny.write_recipe(tmp_path), [LEVELS])
    expected = (
        r"encoders\.vision\.model: emits 3 feature levels, .* language\.model\.num_layers is 2"
    )
    with pytest.raises(RecipeError, match=expected):
        build_layout(recipe)


@pytest.mark.parametrize("grid", ["{pp: 2}", "{pp: 2, vpp: 2}"])
def test_a_scaled_down_recipe_needs_levels_on_both_stages(tmp_path: Path, grid: str) -> None:
    recipe = load_recipe(
        tiny.write_recipe(tmp_path),
        [
            LEVELS,
            "language.model.num_layers=8",
            f"language.grid={grid}",
            "train.micro_batch_size=3",
        ],
    )
    scaled = scale_recipe(recipe, build_layout(recipe), tmp_path, "fp32")
    links = build_layout(scaled.recipe).links_of("vision")
    assert [link.stage for link in links] == [0, 1]
    assert sum(len(link.levels) for link in links) == 4  # the embeddings and three levels
