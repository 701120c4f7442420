"""Every family's language model computes what transformers' text model with a head computes.

fp32 on a CPU, packed segments against one call per segment. Logits differ by at most 1e-5 (they
are of order one), gradients by 1e-5 of their largest element.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mimo.families.languages import gemma3
from tests import lone_module
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo.families.languages.references import (
    LENGTHS,
    NUM_ROWS,
    NUM_TOKENS,
    POSITIONS,
    SETTINGS,
    TOLERANCE,
    Reference,
    compute_reference,
    image_positions,
)

CASES = {
    f"{family} {head} {positions}": (family, head == "tied", positions)
    for family in ("qwen3", "qwen2_5", "qwen3_5", "qwen3_5_moe")
    for head in ("tied", "untied")
    for positions in POSITIONS
} | {"gemma3": ("gemma3", True, "text")}
TP_AND_SP = {"one rank": (1, False), "tp2": (2, False), "tp2 sp": (2, True)}
# Of each family one rank and tp2 sp; for Qwen, one of the two is tied, and one has images.
QUICK = (
    "qwen3 tied images-one rank",
    "qwen3 untied text-tp2 sp",
    "qwen2_5 untied text-one rank",
    "qwen2_5 tied images-tp2 sp",
    "qwen3_5 tied text-one rank",
    "qwen3_5 untied images-tp2 sp",
    "qwen3_5_moe untied images-one rank",
    "qwen3_5_moe tied text-tp2 sp",
    "gemma3-one rank",
    "gemma3-tp2 sp",
)


def run(
    run_ranks: RunRanks,
    case: tuple[str, bool, str],
    reference: Reference,
    logit_gradients: Tensor | None = None,
    tp: int = 1,
    sp: bool = False,
) -> list[dict[str, Any]]:
    """Results of all ranks."""
    family, tied, _ = case
    settings = SETTINGS[family] | ({} if family == "gemma3" else {"tie_word_embeddings": tied})
    return run_ranks(
        lone_module.run_language,
        tp,
        settings,
        NUM_TOKENS,
        reference.weights,
        reference.ids,
        reference.positions,
        LENGTHS,
        logit_gradients,
        tp,
        sp,
        family,
    )


def join(results: list[dict[str, Any]], kind: str) -> Tensor:
    """(T, NUM_ROWS): every rank has as many columns."""
    assert len({part[kind].shape for part in results}) == 1
    return torch.cat([part[kind] for part in results], dim=1)


@pytest.mark.parametrize(
    "name", quick([f"{case}-{ranks}" for ranks in TP_AND_SP for case in CASES], *QUICK)
)
def test_logits_and_every_gradient_equal_those_of_transformers_per_segment(
    run_ranks: RunRanks, name: str
) -> None:
    case, ranks = name.split("-")
    tp, sp = TP_AND_SP[ranks]
    reference = compute_reference(*CASES[case])
    results = run(run_ranks, CASES[case], reference, reference.logit_gradients, tp, sp)
    logits = join(results, "logits")
    assert logits.shape == (sum(LENGTHS), NUM_ROWS)
    assert 0.1 < reference.logits.std() < 10, "an absolute tolerance needs logits of order one"
    torch.testing.assert_close(logits[:, :NUM_TOKENS], reference.logits, rtol=0, atol=TOLERANCE)
    # Padded rows of embedding and head are expected to be exactly zero in the reference.
    gradients = lone_module.join_gradients(results)
    error, name = lone_module.worst_error(gradients, reference.gradients)
    assert error <= TOLERANCE, f"gradient of {name}: error {error:.2e}"


@pytest.mark.parametrize(
    "name", quick(["tied-1", "tied-2", "untied-1", "untied-2"], "untied-1", "tied-2")
)
def test_the_embeddings_output_as_input_gives_the_logits_of_token_ids(
    run_ranks: RunRanks, name: str
) -> None:
    tied, tp = name.startswith("tied"), int(name[-1])
    case = ("qwen3", tied, "images")
    reference = compute_reference(*case)
    results = run(run_ranks, case, reference, tp=tp, sp=tp > 1)
    for kind in ("logits", "embedded"):
        logits = join(results, kind)[:, :NUM_TOKENS]
        torch.testing.assert_close(logits, reference.logits, rtol=0, atol=TOLERANCE)


def test_losses_are_those_of_the_tokens_without_the_padding_of_the_vocabulary(
    run_ranks: RunRanks,
) -> None:
    case = ("qwen3", True, "text")
    reference = compute_reference(*case)
    (result,) = run(run_ranks, case, reference)
    # Padded rows of the head hold 1e3: their logits would outweigh every token's.
    assert (result["logits"][:, NUM_TOKENS:].abs() > 100).any()
    expected = nn.functional.cross_entropy(reference.logits, reference.ids, reduction="none")
    torch.testing.assert_close(result["losses"], expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("num_tokens", "rows"), [(64, 64), (65, 128), (100, 128)])
def test_vocabulary_is_padded_to_a_multiple(num_tokens: int, rows: int) -> None:
    from mimo.families.languages import qwen3

    assert qwen3.Settings(**SETTINGS["qwen3"]).padded_vocab_size(num_tokens) == rows


@given(st.tuples(st.integers(1, 64), st.integers(0, 64), st.integers(0, 64)), st.integers(4, 16))
def test_scaling_down_keeps_the_shares_of_the_rotary_axes(
    section: tuple[int, int, int], channels: int
) -> None:
    from mimo.families.languages._decoder import proportional

    scaled = proportional(section, channels)
    assert sum(scaled) == channels
    for before, after in zip(section, scaled, strict=True):
        assert (before > 0) == (after > 0)
        assert abs(after - before * channels / sum(section)) < 2


def test_blocks_of_rotary_channels_are_another_function_than_interleaved_ones() -> None:
    from mimo.ops.layers import MRope, contiguous_axes, interleaved_axes

    section = SETTINGS["qwen2_5"]["mrope_section"]
    blocks, interleaved = (
        MRope(axes(section), 10_000.0) for axes in (contiguous_axes, interleaved_axes)
    )
    images, text = (POSITIONS[kind]()[:, None] for kind in ("images", "text"))
    torch.testing.assert_close(blocks(text), interleaved(text))
    assert (blocks(images) - interleaved(images)).abs().max() > 0.1
    time, height, width = image_positions().float()
    expected = torch.stack([time] * 2 + [height] * 3 + [width] * 3, dim=1) * blocks.inv_freq
    torch.testing.assert_close(blocks(images)[:, 0, 0, :8], expected)


PUBLISHED_GEMMA3 = {"sliding_window": 1024, "sliding_window_pattern": 6}


@pytest.mark.parametrize(
    ("layers", "kinds"),
    [(5, {"sliding"}), (6, {"sliding", "global"}), (26, {"sliding", "global"})],
)
@given(st.integers(1, 8))
def test_a_scaled_down_gemma3_has_a_layer_of_every_kind_in_every_stage(
    layers: int, kinds: set[str], stages: int
) -> None:
    change = {"num_layers": layers} | PUBLISHED_GEMMA3
    small = gemma3.Settings.model_validate(SETTINGS["gemma3"] | change).scaled_down(stages, tp=2)
    per_stage = small.num_layers // stages
    for stage in range(stages):
        layers_of_stage = small.layer_kinds()[stage * per_stage : (stage + 1) * per_stage]
        assert set(layers_of_stage) == kinds
    assert not list(small.grid_problems(2, stages))


def test_five_layers_of_gemma3_in_six_are_local() -> None:
    change = {"num_layers": 13} | PUBLISHED_GEMMA3
    kinds = gemma3.Settings.model_validate(SETTINGS["gemma3"] | change).layer_kinds()
    assert [n for n, kind in enumerate(kinds) if kind == "global"] == [5, 11]
