"""The halves of a model of transformers: samples apart, rows in order, parameters in one half."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mimo.checkpoint.hf.examples import example_samples
from mimo.checkpoint.hf.shrink import build
from mimo.engines.fsdp.context import FsdpContext
from mimo.engines.fsdp.halves import EncoderHalf, OutputForm, build_whole, language_parameters
from mimo.engines.fsdp.language_half import LanguageHalf
from mimo.engines.fsdp.sharding import materialise
from mimo.model.gate import MODALITIES, Examples, compare_halves
from tests.mimo.model.tiny_classes import tiny_config

CTX = FsdpContext(mesh=None, dtype=torch.float32)
# Gated DeltaNet with attention; attention alone; a sparse indexer; bidirectional prefixes.
KINDS = ["qwen3_5", "qwen3_vl", "minimax_m3_vl", "paligemma", "gemma4", "lfm2_vl"]


def examples_of(whole: Any) -> Examples:
    return Examples(whole, example_samples(whole), ["image"])


def language_half(whole: Any, examples: Examples, packing: Any) -> LanguageHalf:
    half = LanguageHalf(
        whole.config,
        CTX,
        packing,
        dict.fromkeys(MODALITIES, "tower"),
        examples.outputs,
        examples.form_of,
        examples.placeholders,
    )
    materialise(half, torch.device("cpu"))
    weights = dict(whole.named_parameters(remove_duplicate=False))
    for name, param in half.named_parameters():
        param.data.copy_(weights[half.hf_names[name]].data)
    return half.eval()


def losses(half: LanguageHalf, examples: Examples, rows: Tensor) -> list[Tensor]:
    """Return the losses of each sample of a lane with all samples."""
    numbers = range(len(examples.samples))
    inputs = half.prepare(examples.lane(numbers), lambda tensor: tensor)
    with torch.no_grad():
        every = half(inputs, {"tower": rows})
    return list(every.split([int(examples.loss_mask(number).sum()) for number in numbers]))


@pytest.mark.parametrize("model_type", KINDS)
def test_a_sample_does_not_change_the_losses_of_its_neighbours(model_type: str) -> None:
    config = tiny_config(model_type)
    whole = build(config)
    examples, verdict = examples_of(whole), compare_halves(config)
    assert not verdict.problem
    half = language_half(whole, examples, verdict.packing)
    num_rows = sum(form.num_rows for form in examples.forms.values())
    form = next(iter(examples.outputs.values()))
    width = whole.config.get_text_config().hidden_size * (1 + form.num_levels)
    rows = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(1))
    before = losses(half, examples, rows)
    ids, text = examples.samples[1].input_ids, examples.samples[0].input_ids[:2]
    ids.copy_(torch.where(torch.arange(len(ids)) % 2 == 0, text[0], text[1]))
    after = losses(half, examples, rows)
    assert not torch.equal(before[1], after[1])
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[2], after[2])


def test_every_parameter_is_in_one_half() -> None:
    config = tiny_config("qwen3_vl_moe")
    whole = build_whole(config, torch.float32)
    names, of_language = {n for n, _ in whole.named_parameters()}, language_parameters(whole)
    examples = examples_of(build(config))
    encoder = EncoderHalf(
        config, CTX, examples.form_of, ("image", (1, 0, 0)), 2, lambda *made: made
    )
    language = language_half(build(config), examples, None)
    assert {*encoder.hf_names.values()} == names - of_language
    assert {*language.hf_names.values()} == names & of_language


def test_rows_of_an_output_and_back_keep_their_order() -> None:
    class Output:
        pooler_output = (torch.arange(6.0).view(3, 2), torch.arange(6.0, 10.0).view(2, 2))
        deepstack_features = (torch.arange(10.0, 20.0).view(5, 2),)

    form = OutputForm.of(Output)
    rows = form.rows(Output)
    made = form.output(rows, [3, 2], 2)
    assert rows.shape == (5, 4)
    pairs = zip(made.pooler_output, Output.pooler_output, strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert torch.equal(made.deepstack_features[0], Output.deepstack_features[0])
