"""How much each module has to compute in a step, by its plan: forward and backward of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from data.index.reader import plans_of_items
from mimo.config.schema import LANGUAGE, Recipe
from mimo.families.flops import Adapters, flops_per_unit, step_flops
from mimo.families.keymap import is_adapter
from mimo.families.registry import encoder_family, encoder_settings, language_settings
from mimo.model.dataset import Dataset
from mimo.model.step_plan import PlannedMicrobatch, StepPlan


def trainable_names(recipe: Recipe, module: str) -> Callable[[str], bool]:
    """Whether a parameter of a module learns, by its name; see `mimo.model.build`.

    A module with adapters trains only these; an encoder also trains its projector.
    """
    part = recipe.module(module)
    if part.freeze is False and part.lora is None:
        return lambda name: True
    kept = ()
    if part.trains and module != LANGUAGE:
        kept = encoder_family(recipe, module).PROJECTOR
    return lambda name: name.startswith(kept) or (part.trains and is_adapter(name))


class StepFlops:
    """Counts FLOPs of planned steps. tokenizer_size: number of its tokens."""

    def __init__(self, recipe: Recipe, tokenizer_size: int, dataset: Dataset) -> None:
        self._dataset = dataset
        self._language = language_settings(recipe)
        vocab_size = self._language.padded_vocab_size(tokenizer_size)
        self._encoders = {name: encoder_settings(recipe, name) for name in recipe.encoders}
        products = {
            LANGUAGE: self._language.products(vocab_size),
            **{
                name: settings.products(self._language.hidden_size)
                for name, settings in self._encoders.items()
            },
        }
        encoders_learn = any(encoder.trains for encoder in recipe.encoders.values())
        self._per_unit: dict[str, dict[str, float]] = {}
        for name, own in products.items():
            lora = recipe.module(name).lora
            adapters = None if lora is None else Adapters(lora.rank, frozenset(lora.targets))
            self._per_unit[name] = flops_per_unit(
                own,
                trainable_names(recipe, name),
                # Gradients pass through the language model to the rows that encoders made.
                input_needs_gradient=name == LANGUAGE and encoders_learn,
                adapters=adapters,
            )

    def of(self, plan: StepPlan) -> dict[str, float]:
        """FLOPs of a step by module, over all its ranks."""
        found = dict.fromkeys(self._per_unit, 0.0)
        for planned in plan.microbatches:
            samples = planned.samples
            counts = self._language.counts(
                samples.length, samples.item_rows, int(samples.loss_tokens.sum())
            )
            found[LANGUAGE] += step_flops(self._per_unit[LANGUAGE], counts)
            for name, settings in self._encoders.items():
                grids = self._grids(planned, name)
                if len(grids):
                    found[name] += step_flops(self._per_unit[name], settings.counts(grids))
        return found

    def _grids(self, planned: PlannedMicrobatch, encoder: str) -> np.ndarray:
        """(I, 3) grids of an encoder's items in a microbatch, from the index alone."""
        samples, own = planned.samples, planned.encoders[encoder].item
        source = samples.source[samples.item_sample[own]]
        plans = plans_of_items(self._dataset.readers, source, samples.item[own])
        return np.array([part.grid for part in plans], np.int64).reshape(-1, 3)
