"""Two training steps of any class of transformers on a few ranks, compared with the whole model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from transformers.models.gemma4 import modeling_gemma4

from data.batch import GlobalMicrobatch
from data.modalities.processor import WireForm
from mimo.checkpoint.hf.examples import example_samples
from mimo.checkpoint.hf.initial import InitialWeights
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.shrink import build
from mimo.config.schema import Recipe
from mimo.device import Staging
from mimo.engines.contract import Piece
from mimo.engines.draw import adapter_numbers, draw
from mimo.engines.fsdp.halves import arguments_of, language_parameters
from mimo.engines.fsdp.language_half import token_types
from mimo.families.keymap import adapter_names, is_adapter
from mimo.families.registry import trainable_names
from mimo.families.wire import DTYPES
from mimo.model import fsdp
from mimo.model.build import build_model
from mimo.model.decoding import EncoderItems
from mimo.model.gate import MODALITIES, TOLERANCE, Examples, Item, Verdict, whole_gradients
from mimo.model.modules import MimoModel
from mimo.model.recipe_checks import check_recipe
from mimo.model.step_bridges import StepRows
from mimo.model.step_plan import PlannedItems, PlannedMicrobatch, StepPlan
from mimo.parallel.grids import LANGUAGE, Layout
from mimo.parallel.groups import build_topology
from tests.mimo.model.tiny_classes import RATE

_FLOOR = 1e-6  # of the global gradient norm
Microbatches = Sequence[Sequence[Sequence[int]]]
"""The samples of each lane in each microbatch."""
# A lane with text alone, and lanes of unequal lengths.
_MICROBATCHES = (((0, 1), (2,)), ((1,), (0,)))
_BF16 = 2.0  # times the error of transformers' whole model in bf16
_VALUES = WireForm(1)


class Weights:
    """The tensors of a model in memory, as `HFCheckpoint` gives them."""

    def __init__(self, whole: Any) -> None:
        self.tensors = {n: p.detach().clone() for n, p in whole.named_parameters()}

    def part(self, key: str, rows: slice, columns: slice) -> torch.Tensor:
        """Return rows of a tensor, of a matrix only these columns."""
        part = self.tensors[key][rows] if self.tensors[key].dim() else self.tensors[key]
        return part[:, columns] if part.dim() == 2 else part


@dataclass
class Reference:
    """The whole model of transformers, trained by plain SGD.

    is_trainable: of the names of weights and adapters. router_loss: factor of the router's loss.
    adapters: lora_a and lora_b by the name of the weight that they adapt; scales likewise.
    """

    whole: Any
    examples: Examples
    is_trainable: Callable[[str], bool] = lambda name: True
    router_loss: float = 0.0
    adapters: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.weights = dict(self.whole.named_parameters())
        self.frozen = {name: self.weights[name].detach().clone() for name in self.adapters}

    @classmethod
    def of(cls, recipe: Recipe, whole: Any, examples: Examples) -> Reference:
        """Return the reference of a recipe with the adapters that it draws."""
        language = language_parameters(whole)
        rules = {name: trainable_names(recipe, name) for name in recipe.modules}
        adapters, scales = {}, {}
        for name, weight in whole.named_parameters():
            module = "language" if name in language else "vision"
            lora = recipe.module(module).lora
            if lora is None or not lora.adapts(name):
                continue
            (rows, columns), first = weight.shape, torch.zeros(lora.rank, weight.shape[1])
            numbers = adapter_numbers(columns)
            key = f"{recipe.train.seed}:{adapter_names(name)[0]}"
            draw(first, 0, 0, (lora.rank, columns), key, numbers)
            pair = first.to(weight.dtype), weight.new_zeros(rows, lora.rank)
            adapters[name], scales[name] = pair, lora.scale

        def is_trainable(name: str) -> bool:
            weight = f"{name.rpartition('.')[0]}.weight" if is_adapter(name) else name
            return rules["language" if weight in language else "vision"](name)

        text = whole.config.get_text_config()
        factor = text.router_aux_loss_coef if getattr(text, "output_router_logits", 0) else 0.0
        return cls(whole, examples, is_trainable, factor, adapters, scales)

    def tensors(self) -> dict[str, Tensor]:
        """Return all that a run keeps: weights before their adapters' updates, and adapters."""
        tensors = {name: weight.detach() for name, weight in self.weights.items()} | self.frozen
        for name, pair in self.adapters.items():
            tensors |= zip(adapter_names(name), pair, strict=True)
        return tensors

    def gradients(self, microbatches: Microbatches, num_loss_tokens: int) -> dict[str, Tensor]:
        """Return the loss and the gradients of all that trains."""
        total: dict[str, Tensor] = {}
        for numbers in (numbers for lanes in microbatches for numbers in lanes):
            parts = whole_gradients(self.whole, self.examples, numbers)
            if self.router_loss:
                for name, gradient in self._router_gradients(numbers).items():
                    parts[name] = parts[name] + gradient
            for name, gradient in parts.items():
                total[name] = total.get(name, 0.0) + gradient / num_loss_tokens
        for name, (lora_a, lora_b) in self.adapters.items():
            # Of weight + scale · lora_b @ lora_a, by the chain rule.
            gradient = self.scales[name] * total[name]
            pair = lora_b.T @ gradient, gradient @ lora_a.T
            total |= zip(adapter_names(name), pair, strict=True)
        return {k: v for k, v in total.items() if k == "loss" or self.is_trainable(k)}

    def _router_gradients(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        """Return the gradients of the router's loss of one sample, times its loss tokens."""
        (number,) = numbers
        sample = self.examples.samples[number]
        ids = sample.input_ids[None]
        arguments = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        arguments |= token_types(ids, self.examples.placeholders)
        for items in sample.items.values():
            arguments |= {key: torch.cat([item[key] for item in items]) for key in items[0]}
        self.whole.zero_grad()
        named = arguments_of(self.whole.forward, arguments)
        routed = self.whole(**named, labels=ids, use_cache=False)
        plain = self.whole(**named, labels=ids, use_cache=False, output_router_logits=False)
        assert float(routed.loss) > float(plain.loss)
        (int(self.examples.loss_mask(number).sum()) * (routed.loss - plain.loss)).backward()
        return {n: w.grad.clone() for n, w in self.weights.items() if w.grad is not None}

    @torch.no_grad()
    def update(self, gradients: Mapping[str, Tensor]) -> None:
        """Take a step of plain SGD."""
        for name, tensor in self.tensors().items():
            if name in gradients:
                tensor -= RATE * gradients[name]
        for name, (lora_a, lora_b) in self.adapters.items():
            self.weights[name].copy_(self.frozen[name] + self.scales[name] * lora_b @ lora_a)


def take_steps(
    rank: int,
    folder: Path,
    verdict: Verdict,
    cases: Sequence[Sequence[str]] = ((),),
    microbatches: Microbatches = _MICROBATCHES,
) -> list[str]:
    """Train two steps; return by case the first difference from the whole model on this rank.

    cases: overrides of the recipe.
    """
    fsdp.verdict_of = lambda config: verdict  # type: ignore[assignment]
    return [_take_steps(folder, verdict, case, microbatches) for case in cases]


def take_wide_steps(rank: int, *args: Any) -> list[str]:
    """Like `take_steps`, but Gemma 4 computes norms and attention's scores in fp64, not fp32."""
    narrow, forward = Tensor.float, modeling_gemma4.Gemma4RMSNorm.forward
    softmax = torch.nn.functional.softmax

    def norm(module: Any, hidden: Tensor) -> Tensor:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Tensor, "float", lambda x: x if x.dtype == torch.float64 else narrow(x))
            return forward(module, hidden)

    def scores(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        return softmax(x, *args, dtype=None if x.dtype == torch.float64 else dtype, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_gemma4.Gemma4RMSNorm, "forward", norm)
        patch.setattr(torch.nn.functional, "softmax", scores)
        return take_steps(rank, *args)


def _take_steps(
    folder: Path, verdict: Verdict, overrides: Sequence[str], microbatches: Microbatches
) -> str:
    recipe, rank = load_recipe(folder / "recipe.yaml", overrides), dist.get_rank()
    config, precision = transformers.AutoConfig.from_pretrained(folder), recipe.train.precision
    whole = build(config, torch.promote_types(DTYPES[precision], torch.float32))
    # Use a copy in fp32, because Gemma 4's audio tower takes no fp64.
    samples = example_samples(build(config))
    examples = Examples(whole, samples, [*verdict.outputs])
    layout = check_recipe(recipe, dist.get_world_size())
    if layout.language.dp == 1:
        microbatches = [[lane] for lanes in microbatches for lane in lanes]
    form = SimpleNamespace
    processors = {m: form(form=lambda grid, m=m: examples.form_of(m, grid)) for m in MODALITIES}
    fsdp.item_processors = lambda recipe: processors  # type: ignore[assignment]
    first = next(item for items in examples.items for item in items)
    fsdp._BLANK = first.grid[1:]
    weights = InitialWeights(Weights(whole), {})  # type: ignore[arg-type]
    vocabulary = whole.config.get_text_config().vocab_size
    model = build_model(recipe, build_topology(layout), vocabulary, weights)
    if precision == "fp64":
        whole.set_experts_implementation("eager")
        for module in model.modules.values():
            cast("Any", module.whole).whole.set_experts_implementation("eager")
    reference = Reference.of(recipe, whole, examples)
    for _ in range(2):
        plan = plan_of(examples, layout, microbatches)
        loss = torch.as_tensor(run(model, plan, examples, rank, layout, microbatches)).double()
        model.finish_gradients(plan.num_loss_tokens)
        dist.all_reduce(loss)
        expected = reference.gradients(microbatches, plan.num_loss_tokens)
        total = float(expected.pop("loss"))
        error = abs(float(loss) / plan.num_loss_tokens - total) / total
        if precision == "bf16":
            rough = build(config).bfloat16()
            plain = Reference.of(recipe, rough, Examples(rough, samples, [*verdict.outputs]))
            gradients = plain.gradients(microbatches, plan.num_loss_tokens)
            errors = [(gradients[name].float() - part).norm() for name, part in expected.items()]
            usual = (
                torch.stack(errors).norm()
                / torch.stack([*map(torch.norm, expected.values())]).norm()
            )
            error = max(error, relative_error(model, expected)) / float(usual)
            return first_of_ranks(
                ["" if error <= _BF16 else f"bf16 errs {error:.1f} times as much"]
            )
        problems = [gradient_difference(model, expected)]
        problems += [f"loss differs by {error:.1e}"] if error > TOLERANCE else []
        for module in model.modules.values():
            module.update(RATE, 1.0)
        if problem := first_of_ranks(problems):
            return problem
        reference.update(expected)
    after = reference.tensors()
    pieces = [
        (piece, name)
        for name, module in model.modules.items()
        for piece in module.pieces("save", with_optimizer=False)
    ]
    return first_of_ranks([difference(piece, name, after, 0.0) for piece, name in pieces])


def first_of_ranks(problems: Sequence[str]) -> str:
    """Return the first problem of any rank, so that no rank goes on alone."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, next(filter(None, problems), ""))
    return next(filter(None, of_ranks), "")


def gradient_difference(model: MimoModel, expected: Mapping[str, Tensor]) -> str:
    """Describe the first gradient that differs, or a weight that trains though it should not."""
    norm = float(torch.stack([g.double().norm() for g in expected.values()]).norm())
    for name, module in model.modules.items():
        for piece in module.gradients():
            if piece.key.removeprefix(f"{name}.") not in expected:
                return f"{piece.key} trains"
            if problem := difference(piece, name, expected, norm):
                return f"gradient of {problem}"
    return ""


def relative_error(model: MimoModel, expected: Mapping[str, Tensor]) -> float:
    """Return the norm of the errors of this rank's gradients over the norm of its gradients."""
    errors, norms = [], []
    for name, module in model.modules.items():
        for piece in module.gradients():
            part = part_of(piece, expected[piece.key.removeprefix(f"{name}.")])
            errors.append((piece.values - part).norm())
            norms.append(part.norm())
    return float(torch.stack(errors).norm() / torch.stack(norms).norm())


def part_of(piece: Piece, whole: Tensor) -> Tensor:
    """Return the rectangle of a piece."""
    rows, columns = piece.values.shape
    whole = whole.detach().reshape(piece.matrix)
    return whole[piece.row : piece.row + rows, piece.column : piece.column + columns]


def difference(piece: Piece, module: str, expected: Mapping[str, Tensor], norm: float) -> str:
    """Describe how a piece differs from the rectangle of the expected tensor, or return ""."""
    name = piece.key.removeprefix(f"{module}.")
    if name.endswith("k_proj.bias") and piece.values.dtype == torch.float32:
        return ""  # zero in theory, so that fp32 compares rounding
    whole = expected[name]
    part = part_of(piece, whole)
    scale = max(float(whole.abs().max()), _FLOOR * norm)
    error = float((piece.values - part).abs().max()) / scale if part.numel() else 0.0
    return "" if error <= TOLERANCE else f"{piece.key} differs by {error:.1e}"


def plan_of(examples: Examples, layout: Layout, microbatches: Microbatches) -> StepPlan:
    """Plan a step; items go to the tower's lanes in turns."""
    planned = []
    for lanes in microbatches:
        packed = [examples.lane(numbers) for numbers in lanes]
        samples = [number for numbers in lanes for number in numbers]
        lengths = np.array([len(examples.samples[number].input_ids) for number in samples])
        lane = np.repeat(np.arange(len(lanes)), [len(numbers) for numbers in lanes])
        start = np.concatenate([np.cumsum([0, *one.lengths[:-1]]) for one in packed])
        items = [(s, item) for s, number in enumerate(samples) for item in examples.items[number]]
        of_sample = np.array([s for s, _ in items], np.int64)
        rows = [examples.form_of(item.modality, item.grid).num_rows for _, item in items]
        microbatch = GlobalMicrobatch(
            source=np.zeros(len(samples), np.int64),
            sample=np.array(samples),
            lane=lane,
            start=start,
            length=lengths,
            loss_tokens=np.array([int(examples.loss_mask(number).sum()) for number in samples]),
            segment_length=lengths,
            lane_tokens=np.array([sum(one.lengths) for one in packed]),
            packed=True,
            media=MODALITIES,
            item_media=np.array([MODALITIES.index(item.modality) for _, item in items], np.int64),
            item=np.arange(len(items)),
            item_sample=of_sample,
            item_position=start[of_sample] + np.array([item.place for _, item in items], np.int64),
            item_rows=np.array(rows, np.int64),
            item_cost=np.ones(len(items), np.int64),
        )
        number = np.arange(len(items))
        towers = {"vision": PlannedItems(number, number % layout.encoders["vision"].dp)}
        planned.append(PlannedMicrobatch(microbatch, towers))
    parts = [one.samples for one in planned]
    group = len(planned) if "vision" in layout.colocated else 1
    step_rows = StepRows(
        layout, "vision", "replicated", group, parts, [one.runs_of("vision") for one in planned]
    )
    return StepPlan(
        tuple(planned),
        int(sum(part.loss_tokens.sum() for part in parts)),
        int(sum(part.length.sum() for part in parts)),
        1.0,
        {link: step_rows.plans(link, None) for link in layout.links_of("vision")},
    )


def run(
    model: MimoModel,
    plan: StepPlan,
    examples: Examples,
    rank: int,
    layout: Layout,
    microbatches: Microbatches,
) -> float | Tensor:
    """Run all microbatches of a step forward and backward; return this rank's loss."""
    lanes, items = [], {}
    if rank in layout.language.ranks:
        lane = layout.language.coords(rank).dp
        lanes = [examples.lane(numbers[lane]) for numbers in microbatches]
    if "vision" in model.modules:
        lane = layout.encoders["vision"].coords(rank).dp
        every = layout.encoders["vision"].dp
        parts = [encoder_items(examples, m)[lane::every] for m in microbatches]
        if "vision" in layout.colocated:  # encoded in one go
            parts = [[item for part in parts for item in part]]
        items["vision"] = [as_inputs(part) for part in parts]
    staging = Staging(None)
    inputs = model.stage(plan, lanes, items, {}, staging)
    return model.run(plan, inputs, check=True).get(LANGUAGE, 0.0)


def encoder_items(examples: Examples, lanes: Sequence[Sequence[int]]) -> list[Item]:
    """Return the items of a microbatch."""
    return [item for numbers in lanes for number in numbers for item in examples.items[number]]


def as_inputs(items: Sequence[Item]) -> EncoderItems:
    """Return items as the data pipeline gives them."""
    grids = np.array([item.grid for item in items], np.int64).reshape(-1, 3)
    return EncoderItems([(_VALUES, item.values) for item in items], grids)
