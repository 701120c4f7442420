"""Both engines compute from the same folder what transformers does, and what the other does."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimo.check.parity import Parity, ParityRunner, main, on_engine, other_side, verdict
from mimo.check.points import INPUTS, LOGITS
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.errors import InputError
from tests.cases import quick
from tests.mimo.check.test_parity import check as check_equal
from tests.mimo.check.test_verify_fsdp import forget_heads_of_other_ranks

pytestmark = pytest.mark.usefixtures("run_ranks")  # which starts the fork server

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "gemma3")
TP2 = ["language.grid.tp=2", "language.grid.sp=true"]
LAYOUTS = {
    "one rank": [],
    "tp2 sp": TP2,
    "dp2": ["language.grid.dp=2"],
    "hybrid": ["language.grid.dp=2", "language.grid.dp_replicate=2"],
    "disjoint": ["encoders.vision.placement=disjoint", *TP2],
}
PP2 = ["language.grid.pp=2"]


def check(parity: Parity, family: str) -> None:
    check_equal(parity, family)
    assert len(parity.step.gradients) == parity.total


@pytest.mark.parametrize("layout", quick(LAYOUTS, "tp2 sp"))
@pytest.mark.parametrize("family", quick(FAMILIES, "gemma3"))
def test_under_fsdp_every_point_loss_and_gradient_is_that_of_transformers(
    family: str, layout: str, runners: dict[str, ParityRunner]
) -> None:
    check(runners[family].run([*on_engine("fsdp"), *LAYOUTS[layout]]), family)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_engines_agree_on_every_point_and_gradient_whatever_their_layouts(
    family: str, runners: dict[str, ParityRunner]
) -> None:
    megatron, fsdp = [*on_engine("megatron"), *PP2], [*on_engine("fsdp"), *TP2]
    parity = runners[family].run(fsdp, against=megatron)
    check(parity, family)
    points = [result.point for result in parity.points]
    assert points[: len(INPUTS) + 1] == [*INPUTS, "vision.embedding"]
    layers = [f"language.layers.{number}" for number in (1, 2, 3)]
    assert points[-5:] == [*layers, "language.norm", LOGITS]
    check(runners[family].run([*on_engine("megatron"), *TP2], against=on_engine("fsdp")), family)


@pytest.mark.slow
def test_an_encoder_of_one_engine_serves_a_language_model_of_the_other(
    runners: dict[str, ParityRunner],
) -> None:
    check(runners["qwen3_vl"].run(["encoders.vision.engine=fsdp", *PP2]), "qwen3_vl")
    check(runners["qwen3_vl"].run(["language.engine=fsdp", *TP2]), "qwen3_vl")


# --------------------------------------------------------- what is broken is named


def shift_layer_two() -> None:
    """Under fsdp the output of layer 2 is a little larger."""
    from mimo.engines.fsdp import language

    init = language.LanguageModel.__init__

    def broken(model: language.LanguageModel, *args: object) -> None:
        init(model, *args)  # type: ignore[arg-type]
        model.units[2].register_forward_hook(lambda *args: 1.001 * args[-1])  # type: ignore[operator]

    language.LanguageModel.__init__ = broken  # type: ignore[method-assign]


@pytest.mark.slow
def test_the_first_layer_that_differs_between_engines_is_named(
    runners: dict[str, ParityRunner],
) -> None:
    megatron, fsdp = on_engine("megatron"), [*on_engine("fsdp"), *TP2]
    parity = runners["qwen3_vl"].run(fsdp, fault=shift_layer_two, against=megatron)
    assert parity.first is not None
    assert parity.first.point == "language.layers.2"
    assert parity.first.where in {"language, rank 0", "language, rank 1"}
    assert "first diverging module: language.layers.2 on language" in verdict(parity)


@pytest.mark.slow
def test_a_gradient_that_is_not_summed_is_named_where_the_forward_is_right(
    runners: dict[str, ParityRunner],
) -> None:
    parity = runners["qwen3_vl"].run(
        [*on_engine("fsdp"), *TP2[:1]], fault=forget_heads_of_other_ranks
    )
    assert parity.first is None
    assert parity.step.first is not None
    wrong = {name for name, errors in parity.step.gradients.items() if max(errors) > 0.1}
    assert len(wrong) == 8
    assert all(name.endswith(("q_layernorm.weight", "k_layernorm.weight")) for name in wrong)


# ------------------------------------------------------------------- the command line


@pytest.mark.slow
def test_the_command_compares_two_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_tiny(TinyCheckpoint("gemma3"), tmp_path / "x")
    assert main(tmp_path / "x", [], None, None, "fsdp", "megatron language.grid.cp=2") == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].startswith("equal: ")


@pytest.mark.parametrize("words", ["deepspeed", "", "megatron 'language.grid.pp=2"])
def test_another_side_that_is_no_engine_is_refused(words: str) -> None:
    with pytest.raises(InputError, match="give transformers, or an engine"):
        other_side(words)


def test_an_axis_that_fsdp_lacks_is_refused_on_either_side(
    runners: dict[str, ParityRunner],
) -> None:
    fsdp = [*on_engine("fsdp"), *PP2]
    with pytest.raises(InputError, match=r"grid\.pp"):
        runners["gemma3"].prepare(fsdp)
    with pytest.raises(InputError, match=r"grid\.pp"):
        runners["gemma3"].prepare(on_engine("megatron"), fsdp)
