"""The work of passes: FLOPs add up to those of the model, and messages follow from bytes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.model.recipe_checks import check_recipe
from mimo.model.step_plan import PlannedMicrobatch, StepPlan
from mimo.parallel.grids import LANGUAGE
from mimo.plan.forecast import plans
from mimo.plan.rates import Rates
from mimo.plan.work import Passes, StepWork
from tests.mimo import drawings, tiny

PER_FLOP = Rates("", {"": 1.0}, {"": 1.0})
LAYERS = ["language.model.num_layers=4", "train.micro_batch_size=2"]
INTERLEAVED = [*LAYERS, "train.global_batch_size=8", "language.grid={pp: 2, vpp: 2}"]
COLOCATED = ["encoders.vision.placement=colocated", "encoders.vision.grid={}"]
FROZEN = "encoders.vision.freeze=true"
LORA = ["language.lora={rank: 4}", FROZEN]
EXPERTS = "language.model.num_experts=6", "language.model.experts_per_token=2"
SPARSE = ["language.family=qwen3_moe", *EXPERTS]


def work_of(path: Path, *overrides: str, rates: Rates = PER_FLOP) -> tuple[StepWork, StepPlan]:
    recipe = load_recipe(path / "tiny.yaml", overrides)
    layout, dataset = check_recipe(recipe, None), tiny.open_sources(recipe)
    (plan,) = plans(recipe, layout, dataset, 1)
    return StepWork(recipe, layout, dataset, rates), plan


def passes_of(work: StepWork, plan: StepPlan) -> dict[str, Passes]:
    return {n: work.passes(plan, n, work.tokens(plan, n)) for n in work.layout.grids}


def with_padding(planned: PlannedMicrobatch) -> PlannedMicrobatch:
    """Return a microbatch with padding as tokens, and one more sample per lane for the rest."""
    samples = planned.samples
    sums = np.bincount(samples.lane, samples.segment_length, len(samples.lane_tokens))
    length = np.concatenate((samples.segment_length, samples.lane_tokens - sums.astype(int)))
    return replace(planned, samples=replace(samples, length=length))


CASES = {
    "one lane": [],
    "pp2": ["language.grid.pp=2"],
    "pp2 vpp2": INTERLEAVED,
    "lanes": ["language.grid.dp=3", "encoders.vision.grid={dp: 2}"],
    "tp2 sp": ["language.grid={tp: 2, sp: true}", "encoders.vision.grid={tp: 2, dp: 1}"],
    "cp2": ["language.grid={cp: 2, pp: 2}"],
    "encoder pp2": ["encoders.vision.grid={pp: 2, dp: 1}"],
    "colocated": [*COLOCATED, "language.grid.dp=3"],
    "frozen tower": [FROZEN, "language.grid.pp=2"],
    "frozen language": ["language.freeze=true", "language.grid.pp=2"],
    "lora vpp2": [*LORA, *INTERLEAVED],
    "experts": [*SPARSE, "language.grid={pp: 2, dp: 3, ep: 3}"],
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
@pytest.mark.parametrize("draws", [False, True], ids=["reads", "draws"])
def test_flops_of_all_parts_and_lanes_are_those_of_the_model_with_padding(
    folder: Path, overrides: list[str], draws: bool
) -> None:
    if draws:
        folder, overrides = folder / "drawn", [*overrides, drawings.GENERATOR]
    work, plan = work_of(folder, *overrides)
    padded = replace(plan, microbatches=tuple(map(with_padding, plan.microbatches)))
    expected = work.flops.of(padded)
    for name, passes in passes_of(work, plan).items():
        grid = work.layout.grids[name]
        assert passes.forward.shape[1:] == (grid.dp, grid.pp * grid.vpp)
        total = (passes.forward.sum() + passes.backward.sum()) * grid.tp * grid.cp
        assert total == pytest.approx(expected[name], rel=1e-9), name
        of_parts = passes.forward.sum(axis=(0, 1))
        assert of_parts.min() > 0
        np.testing.assert_allclose(of_parts[:-1], of_parts[0] if len(of_parts) > 1 else [])


@pytest.mark.parametrize("module", [LANGUAGE, "vision"])
def test_recomputing_repeats_one_forward_in_the_backward(folder: Path, module: str) -> None:
    key = "language" if module == LANGUAGE else "encoders.vision"
    rates = replace(PER_FLOP, forward={"": 1.0}, backward={"": 1.5}, call=3.0, call_back=7.0)
    times = {}
    for recompute in ("none", "selective", "full"):
        work, plan = work_of(folder, f"{key}.recompute={recompute}")
        passes = passes_of(work, plan)[module]
        times[recompute] = passes.seconds(module, rates)
    forward, backward = times["none"]
    np.testing.assert_allclose(forward, passes.forward + (2 + 1) * 3.0)
    np.testing.assert_allclose(backward, 1.5 * passes.backward + (2 + 1) * 7.0)
    np.testing.assert_allclose(times["full"][0], forward)
    np.testing.assert_allclose(times["full"][1], backward + forward)
    again = (times["selective"][1] - backward) / 1.5
    if module == LANGUAGE:
        lengths = (m.samples.length for m in plan.microbatches)
        pairs = sum((n * (n + 1) // 2).sum() for n in lengths)
        layers, products, heads = 2, 2, 32
        assert again.sum() == pytest.approx(2 * layers * products * heads * pairs)
    np.testing.assert_array_equal(again > 0, passes.forward > 0)
    assert (again < forward).all()


@pytest.mark.parametrize(
    ("group", "counted"), [("1", [3, 3, 3]), ("2", [3, 0, 3]), ("all", [3, 0, 0])]
)
def test_layers_are_called_once_for_microbatches_that_are_encoded_in_one_go(
    folder: Path, group: str, counted: list[int]
) -> None:
    sizes = ["train.global_batch_size=12", "train.micro_batch_size=4"]
    work, plan = work_of(folder, *COLOCATED, f"encoders.vision.encode_group={group}", *sizes)
    of_module = passes_of(work, plan)
    assert of_module["vision"].calls[:, 0, 0].tolist() == counted
    assert of_module[LANGUAGE].calls[:, 0, 0].tolist() == [3, 3, 3]


def test_updates_of_modules_add_up_on_shared_ranks_and_overlap_on_others(folder: Path) -> None:
    per_element = replace(PER_FLOP, element=1.0)
    for overrides, combine in ((COLOCATED, sum), ([], max)):
        work, _ = work_of(folder, *overrides, rates=per_element)
        assert work.tail_seconds({}) == combine(updated for _, updated in work.elements.values())


# ---------------------------------------------------------------------------- messages

SLOW = replace(PER_FLOP, node=1e3, network=1e2, latency=1.0)


def message_seconds(work: StepWork, plan: StepPlan) -> dict[str, float]:
    totals = dict[str, float]()
    for name, passes in passes_of(work, plan).items():
        totals[f"{name} layers"] = float(passes.messages.sum() + passes.gathers.sum())
        totals[f"{name} stages"] = float(work.costs(plan)[name].message.sum())
    return totals


AXES = {
    "tp": ["language.grid={tp: 2, sp: true}"],
    "cp": ["language.grid.cp=2"],
    "pp": ["language.grid.pp=2"],
    "ep": [*SPARSE, "language.grid={dp: 3, ep: 3}"],
    "encoder tp": ["encoders.vision.grid={tp: 2, dp: 1}"],
    "encoder pp": ["encoders.vision.grid={pp: 2, dp: 1}"],
}


@pytest.mark.parametrize("axis", AXES)
def test_an_axis_sends_messages_whose_time_follows_from_the_links(folder: Path, axis: str) -> None:
    work, plan = work_of(folder, *AXES[axis], rates=SLOW)
    module = "vision" if axis.startswith("encoder") else LANGUAGE
    key = f"{module} {'stages' if axis.endswith('pp') else 'layers'}"
    seconds = message_seconds(work, plan)
    assert seconds.pop(key) > 0
    assert not any(seconds.values())
    work, plan = work_of(folder, rates=SLOW)
    assert not any(message_seconds(work, plan).values()), "a rank alone"
    work, plan = work_of(folder, *AXES[axis])
    assert not any(message_seconds(work, plan).values())
    rows = work.costs(plan)["vision"].rows
    assert (rows[~np.isnan(rows)] == 0).all()


def test_tensor_parallel_ranks_gather_and_reduce_around_attention_and_mlp(folder: Path) -> None:
    work, plan = work_of(folder, *AXES["tp"], rates=SLOW)
    messages = passes_of(work, plan)[LANGUAGE].messages
    # Two layers, of four exchanges of half of the fp32 hidden states; two latencies each.
    expected = 2 * 4 * (2 * 1.0 + work.tokens(plan, LANGUAGE) * 32 * 4 / 2 / 1e3)
    np.testing.assert_allclose(messages[:, :, 0], expected)
