"""Families of generators against the modules of diffusers that they run."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mimo.engines.fsdp.context import FsdpContext
from mimo.engines.fsdp.generator import GeneratorModel
from mimo.engines.fsdp.models import _parameters_on_meta
from mimo.families.flops import flops_per_unit, step_flops
from mimo.families.flow import pack, unpack
from tests.generators.families import FAMILIES, build, draw_items, settings_of

GRID = (2, 3)
LENGTHS = torch.tensor([5, 3, 1])


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


def gradients(transformer: nn.Module, loss: Tensor) -> dict[str, Tensor | None]:
    transformer.zero_grad()
    loss.backward()
    return {name: param.grad for name, param in transformer.named_parameters()}


def assert_close(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max().clamp(min=1e-6)


def test_qwen_image_predicts_what_its_module_says() -> None:
    family, transformer = build("qwen_image")
    tokens, times, condition = draw_items(3, GRID, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    expected = transformer(
        hidden_states=tokens,
        encoder_hidden_states=condition,
        encoder_hidden_states_mask=mask,
        timestep=times,
        img_shapes=[[(1, *GRID)]] * 3,
    ).sample
    actual = family.predict(transformer, tokens, times, condition, LENGTHS, GRID)
    assert torch.equal(actual, expected)


def test_qwen_image_needs_no_mask_for_conditions_of_one_length() -> None:
    family, transformer = build("qwen_image")
    tokens, times, condition = draw_items(2, GRID, 5)
    masks: list[Any] = []
    transformer.register_forward_pre_hook(
        lambda _, __, kwargs: masks.append(kwargs["encoder_hidden_states_mask"]), with_kwargs=True
    )
    for lengths in ([5, 5], [5, 4]):
        lengths_B = torch.tensor(lengths)
        family.predict(transformer, tokens, times, condition, lengths_B, GRID)
    assert masks[0] is None
    assert masks[1].sum(1).tolist() == [5, 4]


def test_lumina_predicts_the_opposite_of_its_module_at_the_opposite_time() -> None:
    family, transformer = build("lumina2")
    tokens, times, condition = draw_items(3, GRID, 5)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    image = tokens.view(3, 2, 3, 3, 2, 2).permute(0, 3, 1, 4, 2, 5).reshape(3, 3, 4, 6)
    expected = transformer(
        hidden_states=image,
        timestep=1 - times,
        encoder_hidden_states=condition,
        encoder_attention_mask=mask,
    ).sample
    actual = family.predict(transformer, tokens, times, condition, LENGTHS, GRID)
    assert_close(unpack(actual, GRID), -expected)


def test_rows_beyond_an_items_length_have_no_effect_and_no_gradient(family: str) -> None:
    module, transformer = build(family)
    tokens, times, condition = draw_items(3, GRID, 5)
    condition.requires_grad_()
    velocity = module.predict(transformer, tokens, times, condition, LENGTHS, GRID)
    velocity.square().sum().backward()
    for item, length in enumerate(LENGTHS):
        grad = condition.grad
        assert grad is not None
        assert grad[item, length:].abs().max() == 0 if length < 5 else True
        assert grad[item, :length].abs().sum(-1).min() > 0
        alone = module.predict(
            transformer,
            tokens[item : item + 1],
            times[item : item + 1],
            condition[item : item + 1, :length],
            LENGTHS[item : item + 1],
            GRID,
        )
        assert_close(velocity[item], alone[0])


@pytest.mark.parametrize("rows", [0, 4])
def test_items_without_a_condition_are_finite_and_alike(family: str, rows: int) -> None:
    module, transformer = build(family)
    tokens, times, condition = draw_items(2, GRID, rows)
    condition.requires_grad_()
    lengths = torch.zeros(2, dtype=torch.int64)
    velocity = module.predict(transformer, tokens, times, condition, lengths, GRID)
    grads = gradients(transformer, velocity.square().mean())
    assert all(grad is None or grad.isfinite().all() for grad in grads.values())
    assert condition.grad is not None
    assert not condition.grad.any()
    other = module.predict(transformer, tokens, times, condition + 1, lengths, GRID)
    assert torch.equal(velocity, other)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float64, 1e-5)], ids=str
)
def test_a_forward_in_other_dtypes_is_close_to_fp32(
    family: str, dtype: torch.dtype, tolerance: float
) -> None:
    module, transformer = build(family)
    tokens, times, condition = draw_items(3, GRID, 5)
    # Qwen-Image's module rounds times to its dtype, which turns their embedding by radians.
    times = times.to(dtype).float()
    expected = module.predict(transformer, tokens, times, condition, LENGTHS, GRID)
    _, other = build(family, dtype)
    actual = module.predict(other, tokens.to(dtype), times, condition.to(dtype), LENGTHS, GRID)
    assert actual.dtype == dtype
    assert_close(actual.float(), expected, tolerance)


def test_recomputed_blocks_give_the_same_gradients(family: str) -> None:
    module, transformer = build(family, torch.float64)
    items = [draw_items(2, grid, 5, seed) for seed, grid in enumerate(((2, 3), (4, 1)))]

    def loss() -> Tensor:
        total = torch.zeros(())
        for (tokens, times, condition), grid in zip(items, ((2, 3), (4, 1)), strict=True):
            inputs = (tokens.double(), times, condition.double(), LENGTHS[:2], grid)
            total = total + module.predict(transformer, *inputs).square().mean()
        return total

    expected = gradients(transformer, loss())
    ctx = FsdpContext(None, torch.float64, recompute="full")
    units = module.units(transformer)
    GeneratorModel(transformer, units, module.predict, lambda squares, _: squares, ctx)
    runs = Counter[int]()
    for number, unit in enumerate(units):
        leaf = next(child for child in unit.modules() if not [*child.children()])
        leaf.register_forward_hook(lambda *_, number=number: runs.update([number]))
    actual = gradients(transformer, loss())
    assert runs == dict.fromkeys(range(len(units)), 2 * len(items)), "all run again, once"
    for name, grad in expected.items():
        other = actual[name]
        assert (grad is None) == (other is None), name
        if grad is not None and other is not None:
            assert_close(other, grad)


def test_only_the_end_of_qwen_images_text_stream_has_no_gradient() -> None:
    """Engines sum gradients of all ranks, and must know which never come."""
    for family in FAMILIES:
        module, transformer = build(family)
        tokens, times, condition = draw_items(3, GRID, 5)
        velocity = module.predict(transformer, tokens, times, condition, LENGTHS, GRID)
        grads = gradients(transformer, velocity.square().mean())
        without = {name for name, grad in grads.items() if grad is None}
        last = "transformer_blocks.1"
        parts = ("attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")
        names = {f"{last}.{part}.{kind}" for part in parts for kind in ("weight", "bias")}
        assert without == (names if family == "qwen_image" else set())


def test_tables_of_positions_have_values_when_parameters_are_on_meta(family: str) -> None:
    module, settings = settings_of(family)
    _, whole = build(family)
    with _parameters_on_meta():
        transformer = module.build(settings)
    assert all(param.is_meta for param in transformer.parameters())
    assert not [*transformer.buffers()]
    transformer.load_state_dict(whole.state_dict(), assign=True)
    tokens, times, condition = draw_items(3, GRID, 5)
    inputs = (tokens, times, condition, LENGTHS, GRID)
    assert torch.equal(module.predict(transformer, *inputs), module.predict(whole, *inputs))


def test_units_are_the_modules_that_diffusers_does_not_split(family: str) -> None:
    module, transformer = build(family)
    (block,) = transformer._no_split_modules
    blocks = [part for part in transformer.modules() if type(part).__name__ == block]
    order = []
    for unit in module.units(transformer):
        unit.register_forward_hook(lambda part, _, __: order.append(part))
    tokens, times, condition = draw_items(3, GRID, 5)
    module.predict(transformer, tokens, times, condition, LENGTHS, GRID)
    assert order == module.units(transformer)
    assert {*map(id, order)} == {*map(id, blocks)}


@pytest.mark.parametrize("groups", [1, 2])
def test_weights_are_the_modules_parameters(family: str, groups: int) -> None:
    changes: dict[str, Any] = {"num_query_groups": groups} if family == "lumina2" else {}
    for width in (32, 2048):
        axes = (4, 6, 6) if width == 32 else (256, 384, 384)
        changes |= {"hidden_size": width, "axes_dims_rope": axes}
        module, settings = settings_of(family, **changes)
        with torch.device("meta"):
            transformer = module.build(settings)
        expected = {name: tuple(param.shape) for name, param in transformer.named_parameters()}
        sources = {weight.name: weight.sources for weight in module.weights(settings)}
        assert {name: source.shape for name, (source,) in sources.items()} == expected
        assert all(name == source.key for name, (source,) in sources.items())


def test_fresh_weights_by_name_are_those_that_the_module_begins_with(family: str) -> None:
    """Biases are 0 or drawn by the class; other vectors are norms' and begin at 1."""
    module, settings = settings_of(family)
    for name, param in module.build(settings).named_parameters():
        if param.ndim == 1 and not name.endswith(".bias"):
            assert (param == 1).all(), name


def test_every_matrix_has_a_product_of_its_shape(family: str) -> None:
    module, settings = settings_of(family)
    shapes = {p.parameter: p.shape for p in settings.products() if p.parameter is not None}
    for weight in module.weights(settings):
        (source,) = weight.sources
        if len(source.shape) > 1:
            assert shapes.pop(weight.name) == source.shape
    assert not shapes


def test_flops_are_those_that_pytorch_counts(family: str) -> None:
    module, transformer = build(family)
    _, settings = settings_of(family)
    tokens, times, condition = draw_items(3, GRID, 5)
    lengths = torch.full((3,), 5)
    with FlopCounterMode(display=False) as counter:
        module.predict(transformer, tokens, times, condition, lengths, GRID)
    counts = settings.counts(np.array([[1, *GRID]] * 3), np.array([5, 5, 5]))
    per_unit = flops_per_unit(settings.products(), lambda name: False)
    assert step_flops(per_unit, counts) == counter.get_total_flops()


def test_scaled_down_settings_run_on_the_tiny_language_models_width(family: str) -> None:
    _, settings = settings_of(family, in_channels=64, autoencoder="/nowhere")
    module, _ = settings_of(family)
    small = settings.scaled_down(1, 1)
    assert small == module.Settings(**small.model_dump())
    assert [*small.problems(32)] == []
    assert small.token_pixels == 2
    assert small.max_pixels == 64
    module.build(small)
    assert [*small.grid_problems(1, 1)] == []
    assert len([*small.grid_problems(2, 1)]) == 1


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen_image", {"axes_dims_rope": (4, 6, 8)}, "axes_dims_rope"),
        ("qwen_image", {"axes_dims_rope": (5, 5, 6)}, "axes_dims_rope"),
        ("qwen_image", {"ffn_hidden_size": 100}, "ffn_hidden_size 100 must be 128"),
        ("qwen_image", {"norm_eps": 1e-5}, "norm_eps"),
        ("lumina2", {"num_query_groups": 3}, "num_query_groups 3"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    family: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        settings_of(family, **changes)


def test_settings_that_do_not_fit_the_rest_name_their_keys() -> None:
    _, settings = settings_of("qwen_image", condition_size=16, in_channels=20)
    assert [key for key, _ in settings.problems(32)] == ["condition_size", "in_channels"]
    _, settings = settings_of("qwen_image", autoencoder="/nowhere")
    ((key, message),) = settings.problems(24)
    assert key == "autoencoder"
    assert "/nowhere/config.json: no such file" in message


def test_more_rows_than_positions_are_refused() -> None:
    module, transformer = build("lumina2")
    tokens, times, condition = draw_items(1, GRID, 20)
    with pytest.raises(ValueError, match=r"need \(21, 2, 3\) positions, but axes_lens"):
        module.predict(transformer, tokens, times, condition, torch.tensor([20]), GRID)


def test_importing_a_family_imports_neither_torch_nor_diffusers() -> None:
    names = ", ".join(f"generators.{family}" for family in FAMILIES)
    code = (
        f"import sys, {names}; print({{'torch', 'diffusers', 'transformers'}} & {{*sys.modules}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.slow
def test_importing_diffusers_prints_nothing() -> None:
    code = "from generators import _shared; _shared.diffusers_class('QwenImageTransformer2DModel')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")


def test_tokens_are_in_the_order_of_qwen_images_pipeline() -> None:
    pipeline: Any = importlib.import_module("diffusers").QwenImagePipeline
    images = torch.randn(2, 16, 4, 6)
    tokens = pipeline._pack_latents(images, 2, 16, 4, 6)
    assert torch.equal(pack(images), tokens)
    assert torch.equal(unpack(tokens, GRID), images)
    frames = pipeline._unpack_latents(tokens, 4 * 8, 6 * 8, 8)
    assert torch.equal(unpack(tokens, GRID), frames[:, :, 0])
