"""Tiny checkpoints of all families compute in every kind of layout what transformers computes.

Pictures of odd sizes, several to a sample, one and none; fp32; every gradient is compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mimo.check import parity as parity_module
from mimo.check.compare import INPUTS, LOGITS, Comparison, Difference
from mimo.check.parity import ParityRunner, main, on_engine
from mimo.checkpoint.hf.architectures import ARCHITECTURES
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.errors import InputError
from tests.cases import quick, quick_values
from tests.mimo.check.test_verify_fsdp import forget_heads_of_other_ranks

pytestmark = pytest.mark.usefixtures("run_ranks")  # which starts the fork server

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3")  # of both engines
TP2 = ["language.grid.tp=2", "language.grid.sp=true"]
PP2 = ["language.grid.pp=2"]
LAYOUTS = {
    "one rank": [],
    "tp2 sp": TP2,
    "pp2": PP2,
    "cp2": ["language.grid.cp=2"],
    "disjoint": ["encoders.vision.placement=disjoint"],
}
LAYOUTS_OF_FSDP = {
    "tp2 sp": TP2,
    "hybrid": ["language.grid.dp=2", "language.grid.dp_replicate=2"],
    "disjoint": ["encoders.vision.placement=disjoint", *TP2],
}
LAYOUTS_OF_EXPERTS = {
    "one rank": [],
    "ep4": ["language.grid={dp: 2, cp: 2, ep: 4}"],
    "tp2 sp ep2": ["language.grid={tp: 2, sp: true, ep: 2}"],
    "tp2 etp2": ["language.grid={tp: 2, etp: 2}"],
    "disjoint, tp2 ep4": [
        "encoders.vision.placement=disjoint",
        "language.grid={tp: 2, dp: 2, ep: 4}",
    ],
    "pp2 vpp2 ep2": ["language.grid={pp: 2, vpp: 2, dp: 2, ep: 2}"],
    "fsdp dp2": [*on_engine("fsdp"), "language.grid.dp=2"],
}
CASES_OF_EXPERTS = {
    f"{family}, {name}": (family, LAYOUTS_OF_EXPERTS[name])
    for family, names in {
        "qwen3_vl_moe": ("one rank", "tp2 sp ep2", "tp2 etp2", "disjoint, tp2 ep4", "fsdp dp2"),
        "qwen3_5_moe": ("one rank", "ep4", "tp2 etp2", "pp2 vpp2 ep2"),
    }.items()
    for name in names
}
# What else a layout may do to the order of tokens, patches and rows.
OTHER_LAYOUTS = {
    "gemma3": ["language.grid.tp=2", "language.grid.cp=2", "language.grid.sp=true"],
    "qwen2_5_vl": [
        "encoders.vision.placement=disjoint",
        "encoders.vision.grid.tp=2",
        "encoders.vision.grid.sp=true",
        "language.grid.dp=2",
        "bridge.delivery=replicated",
    ],
    "qwen3_5": ["language.grid.tp=2", "language.grid.cp=2", "language.grid.dp=2"],
    "qwen3_vl": [
        "encoders.vision.placement=disjoint",
        "encoders.vision.grid.pp=2",
        "language.grid.pp=2",
        "language.grid.vpp=2",
    ],
}


def check(comparison: Comparison, family: str) -> None:
    assert comparison.first is None, str(comparison.first)
    errors = {name: point.error for name, point in comparison.points.items()}
    assert all(errors[point] == 0 for point in INPUTS)
    assert errors[LOGITS] <= 1e-5
    assert comparison.worst("weights") == 0, "weights change on their way in"
    assert 0 < comparison.worst("gradients") <= 1e-5
    points = {"vision.embedding", "vision.blocks.3", "vision.rows", "language.layers.3"}
    if family.startswith("qwen3_vl"):
        points |= {"vision.level 0", "vision.level 1"}
    assert points <= errors.keys()


def first(comparison: Comparison) -> Difference:
    assert comparison.first is not None
    return comparison.first


@pytest.mark.parametrize("layout", quick(LAYOUTS, "one rank"))
@pytest.mark.parametrize("family", quick((*FAMILIES, "qwen3_5"), "qwen3_vl"))
def test_every_point_loss_and_gradient_is_that_of_transformers(
    family: str, layout: str, runners: dict[str, ParityRunner]
) -> None:
    check(runners[family].run(LAYOUTS[layout]), family)


@pytest.mark.parametrize("layout", quick(LAYOUTS_OF_FSDP, "tp2 sp"))
@pytest.mark.parametrize("family", quick(FAMILIES, "gemma3"))
def test_under_fsdp_every_point_loss_and_gradient_is_that_of_transformers(
    family: str, layout: str, runners: dict[str, ParityRunner]
) -> None:
    check(runners[family].run([*on_engine("fsdp"), *LAYOUTS_OF_FSDP[layout]]), family)


@pytest.mark.parametrize(
    "case",
    quick_values(CASES_OF_EXPERTS, "qwen3_vl_moe, tp2 sp ep2", "qwen3_5_moe, pp2 vpp2 ep2"),
)
def test_with_experts_every_point_loss_and_gradient_is_that_of_transformers(
    case: tuple[str, list[str]], runners: dict[str, ParityRunner]
) -> None:
    family, overrides = case
    check(runners[family].run(overrides), family)


@pytest.mark.slow
def test_an_encoder_of_one_engine_serves_a_language_model_of_the_other(
    runners: dict[str, ParityRunner],
) -> None:
    check(runners["qwen3_vl"].run(["encoders.vision.engine=fsdp", *PP2]), "qwen3_vl")
    check(runners["qwen3_vl"].run(["language.engine=fsdp", *TP2]), "qwen3_vl")
    check(runners["qwen3_5"].run(["encoders.vision.engine=fsdp", *TP2]), "qwen3_5")


@pytest.mark.slow
def test_the_largest_gradients_of_a_large_model_are_left_out_with_a_note(
    runners: dict[str, ParityRunner],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    total = len(runners["qwen3_vl"].run([]).gradients)
    assert not capsys.readouterr().out
    monkeypatch.setattr(parity_module, "_GRADIENT_ELEMENTS", 10_000)
    compared = len(runners["qwen3_vl"].run([]).gradients)
    assert 0 < compared < total
    printed = capsys.readouterr().out
    assert printed == f"only the {compared} smallest of {total} gradients are compared\n"


@pytest.mark.parametrize("family", quick(OTHER_LAYOUTS, "gemma3"))
def test_layouts_of_several_kinds_at_once_are_equal_too(
    family: str, runners: dict[str, ParityRunner]
) -> None:
    check(runners[family].run(OTHER_LAYOUTS[family]), family)


# --------------------------------------------------------- what is broken is named


ROTARY = "language.model.rotary_base=20000.0"
# Overrides that make a model another one, and the first module that can tell.
BROKEN = {
    "rotary base of the language model": ("qwen2_5_vl", [ROTARY], "language.layers.0"),
    "rotary base of global layers": ("gemma3", [ROTARY], "language.layers.1"),
    "sliding window": ("gemma3", ["language.model.sliding_window=4"], "language.layers.0"),
    "norm epsilon of the tower": (
        "qwen3_vl",
        ["encoders.vision.model.norm_eps=0.01"],
        "vision.blocks.0",
    ),
    "windows of the tower": (
        "qwen2_5_vl",
        ["encoders.vision.model.full_attention_layers=[3]"],
        "vision.blocks.1",
    ),
    "mean of pixels": ("gemma3", ["encoders.vision.model.image_mean=[0.4, 0.5, 0.5]"], "pixels"),
}


@pytest.mark.slow  # the next test finds settings that are as wrong
@pytest.mark.parametrize("what", BROKEN)
def test_a_setting_that_is_wrong_is_found_where_it_first_matters(
    what: str, runners: dict[str, ParityRunner]
) -> None:
    family, overrides, expected = BROKEN[what]
    difference = first(runners[family].run(overrides))
    assert (difference.name, difference.what) == (expected, "activation")


# What an importer might overlook: family, by module the settings, and the first module that tells.
OVERLOOKED = {
    "image mean": ("qwen3_vl", {"vision": ["image_mean"]}, "pixels"),
    "image deviation": ("gemma3", {"vision": ["image_std"]}, "pixels"),
    "rotary base of the tower": ("qwen2_5_vl", {"vision": ["rotary_base"]}, "vision.blocks.0"),
    "norm epsilon of the language model": (
        *("qwen3_vl", {"language": ["norm_eps"]}),
        "language.layers.0",
    ),
    "rotary base of local layers": (
        *("gemma3", {"language": ["local_rotary_base"]}),
        "language.layers.0",
    ),
    "all of Gemma": (
        "gemma3",
        {"vision": ["image_mean", "image_std"], "language": ["norm_eps", "local_rotary_base"]},
        "pixels",
    ),
    "all of Qwen": (
        "qwen2_5_vl",
        {
            "vision": ["image_mean", "image_std", "rotary_base", "tokens_per_second"],
            "language": ["norm_eps"],
        },
        "pixels",
    ),
}


@pytest.mark.parametrize("what", quick(OVERLOOKED, "all of Gemma"))
def test_a_setting_that_the_importer_overlooks_is_found(
    what: str, runners: dict[str, ParityRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    family, overlooked, expected = OVERLOOKED[what]
    for module, keys in overlooked.items():
        overlook(monkeypatch, family, module, keys)
    assert first(runners[family].run()).name == expected


def overlook(
    monkeypatch: pytest.MonkeyPatch, family: str, module: str, keys: Sequence[str]
) -> None:
    """The importer leaves settings of a module out, as if the checkpoint did not say them."""
    architecture = ARCHITECTURES[family]
    kind = architecture.language_family() if module == "language" else architecture.encoder_family()
    real = kind.settings_from_hf

    def without(*args: Any) -> dict[str, Any]:
        settings = real(*args)
        assert set(keys) <= settings.keys()
        return {key: value for key, value in settings.items() if key not in keys}

    monkeypatch.setattr(kind, "settings_from_hf", without)


def change_one_weight() -> None:
    """One number of the MLP in layer 2 is not the checkpoint's, on whatever rank holds it."""
    import mimo.model.build as build

    load = build.load_weights

    def changed(chunk, vp_stage, groups, checkpoint, weights) -> None:  # type: ignore[no-untyped-def]
        load(chunk, vp_stage, groups, checkpoint, weights)
        for layer in getattr(chunk.decoder, "layers", ()) if hasattr(chunk, "decoder") else ():
            if layer.layer_number == 3:
                layer.mlp.linear_fc2.weight.data[0, 0] += 0.1

    build.load_weights = changed


@pytest.mark.parametrize("layout", quick(["one rank", "pp2"], "pp2"))
def test_a_weight_that_is_wrong_is_found_in_its_layer_and_on_its_rank(
    layout: str, runners: dict[str, ParityRunner]
) -> None:
    comparison = runners["qwen3_vl"].run(LAYOUTS[layout], fault=change_one_weight)
    assert first(comparison).name == "language.layers.2"
    assert first(comparison).where == f"language, rank {1 if layout == 'pp2' else 0}"
    assert comparison.worst("weights") > 0.01


def test_gradients_that_are_wrong_are_found_where_the_forward_is_right(
    runners: dict[str, ParityRunner],
) -> None:
    assert first(runners["qwen3_vl"].run(fault=double_gradients)).what == "gradient"


@pytest.mark.slow
def test_a_gradient_that_is_not_summed_is_named_where_the_forward_is_right(
    runners: dict[str, ParityRunner],
) -> None:
    overrides = [*on_engine("fsdp"), *TP2[:1]]
    comparison = runners["qwen3_vl"].run(overrides, fault=forget_heads_of_other_ranks)
    assert first(comparison).what == "gradient"
    wrong = {name for name, errors in comparison.gradients.items() if max(errors) > 0.1}
    assert len(wrong) == 8
    assert all(name.endswith(("q_layernorm.weight", "k_layernorm.weight")) for name in wrong)


def double_gradients() -> None:
    """Every gradient is twice what it should be."""
    from mimo.engines.megatron.module import MegatronModule

    finish: Any = MegatronModule.finish_gradients
    MegatronModule.finish_gradients = lambda self, tokens: finish(self, tokens / 2)  # type: ignore[method-assign]


# ------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("override", ["train.precision=bf16", "data.packing=false", "name=x"])
def test_overrides_that_parity_decides_itself_are_refused(
    override: str, runners: dict[str, ParityRunner]
) -> None:
    with pytest.raises(InputError, match="parity takes layouts and sizes only"):
        runners["gemma3"].run([override])


def test_an_axis_that_fsdp_lacks_is_refused(runners: dict[str, ParityRunner]) -> None:
    with pytest.raises(InputError, match=r"grid\.pp"):
        runners["gemma3"].run([*on_engine("fsdp"), *PP2])


def test_a_folder_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        ParityRunner(tmp_path / "nothing", tmp_path).run([])


# ------------------------------------------------------------------- the command line


@pytest.mark.parametrize("epsilon", quick(["3.0e-4", "0.01"], "0.01"))
def test_the_command_prints_a_table_and_ends_with_1_where_something_differs(
    epsilon: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(TinyCheckpoint("qwen3_vl", dtype="bfloat16", shard_size="500KB"), tmp_path / "x")
    overrides = [f"language.model.norm_eps={epsilon}"]
    code = main(tmp_path / "x", overrides, 1e-5, tmp_path / "errors.json")
    printed = capsys.readouterr().out
    report = json.loads((tmp_path / "errors.json").read_text())
    comparison = report["comparison"]
    points = [*comparison["points"]]
    assert points[0] == "tokens"
    assert points[-1] == LOGITS
    assert all(point in printed for point in points)
    assert len(comparison["gradients"]) > 50
    if epsilon == "3.0e-4":  # the checkpoint's own
        assert (code, report["passed"]) == (0, True)
        assert printed.splitlines()[-1].startswith("equal: ")
    else:
        assert (code, report["passed"]) == (1, False)
        assert comparison["first"]["name"] == "language.layers.0"
        assert "first:   step 1: activation of language.layers.0 at [" in printed
