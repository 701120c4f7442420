"""Decide whether a class of transformers may train in two halves, for `mimo parity` and training.

A tiny copy of the model, with every kind of its layers, computes loss and gradients whole and in
two halves, on this process's CPU, in seconds. The verdict is cached by the copy's configuration,
the version of transformers and the code, so a class is compared once.
"""

import hashlib
import inspect
import itertools
import json
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
import transformers
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence

from data.batch import PackedLane
from data.index.remote import default_cache_directory
from data.modalities.transformers import ItemForm
from mimo.checkpoint.hf import examples as example_inputs
from mimo.checkpoint.hf import shrink as shrinking
from mimo.checkpoint.hf.examples import Sample, concatenate, example_samples, placeholder
from mimo.checkpoint.hf.shrink import build, shrink
from mimo.engines.fsdp import halves, language_half, models
from mimo.engines.fsdp.context import FsdpContext
from mimo.engines.fsdp.halves import (
    FRAMES,
    MODALITIES,
    EncoderHalf,
    Grid,
    OutputForm,
    arguments_of,
    base_of,
    features,
)
from mimo.engines.fsdp.language_half import LanguageHalf, Placeholders, token_types
from mimo.engines.fsdp.sharding import materialise

TOLERANCE = 1e-5
_FLOOR = 1e-6  # of the global gradient norm: some gradients are zero in theory

Packing = Literal["causal", "items"]


@dataclass(frozen=True)
class Verdict:
    """The result for a class. problem: why it cannot train, with the first difference, or "".

    packing: how samples of a lane are packed; None if they are padded to a batch. outputs: the form
    of the tower's output by modality. shares_calls: see `EncoderHalf`.
    """

    problem: str
    packing: Packing | None = None
    outputs: dict[str, OutputForm] = field(default_factory=dict)
    shares_calls: bool = True


UNSAFE = shrinking.TABLES["unsafe"]
"""Classes that are refused although their tiny copy agrees, with the reason."""


def verdict_of(config: Any, cache: Path | None = None) -> Verdict:
    """Return the verdict on a configuration, cached in ``cache`` or the machine's data cache."""
    if config.model_type in UNSAFE:
        return Verdict(UNSAFE[config.model_type])
    tiny = shrink(config)
    parts = [_code(), transformers.__version__, tiny.to_dict()]
    text = json.dumps(parts, default=str, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = (default_cache_directory() if cache is None else cache) / "verdicts"
    path = folder / f"{config.model_type}-{transformers.__version__}-{digest}.json"
    if path.is_file():
        stored = json.loads(path.read_text(encoding="utf-8"))
        outputs = {name: OutputForm(**form) for name, form in stored.pop("outputs").items()}
        return Verdict(**stored, outputs=outputs)
    verdict = compare_halves(tiny)
    if verdict.problem:
        return verdict  # not kept: a package may be missing
    folder.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{uuid.uuid4().hex}")
    partial.write_text(json.dumps(asdict(verdict)), encoding="utf-8")
    partial.rename(path)
    return verdict


def _code() -> str:
    """Return the code that a verdict depends on."""
    modules = (sys.modules[__name__], example_inputs, halves, language_half, models, shrinking)
    return "".join(map(inspect.getsource, modules))


def compare_halves(tiny: Any) -> Verdict:
    """Compare both halves of a tiny model with the whole, with as many modalities as agree.

    Some classes encode audio only inside the forward, or take no videos beside images.
    """
    verdict = Verdict("it has no features of images, videos or audio")
    try:
        whole = build(tiny)
        samples = example_samples(whole)
    except Exception as error:  # whatever a class's own code raises
        return Verdict(_described(error))
    present = [m for m in MODALITIES if any(sample.items.get(m) for sample in samples)]
    for count in range(len(present), 0, -1):
        verdict = _compare(whole, samples, present[:count])
        if not verdict.problem:
            break
    return verdict


def _compare(whole: Any, samples: Sequence[Sample], modalities: Sequence[str]) -> Verdict:
    try:
        inputs = Examples(whole, samples, modalities)
        reference = whole_gradients(whole, inputs)
    except Exception as error:  # as above
        return Verdict(_described(error))

    def problem(packing: Packing | None, shares_calls: bool) -> str:
        try:
            return first_difference(reference, half_gradients(whole, inputs, packing, shares_calls))
        except Exception as error:  # as above
            return _described(error)

    shares_calls = True
    if first := problem(None, shares_calls):
        # The processor may join items along another dimension than the first.
        shares_calls = False
        if problem(None, shares_calls):
            return Verdict(first)
    packings = (packing for packing in get_args(Packing) if not problem(packing, shares_calls))
    return Verdict("", next(packings, None), inputs.outputs, shares_calls)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@dataclass(frozen=True)
class Item:
    """An item of a sample. place: index of its first placeholder. values: (P, 1)."""

    place: int
    modality: str
    grid: Grid
    values: Tensor


class Examples:
    """Samples for a tiny model, with items of some modalities; a grid holds the item's number.

    outputs: the form of the tower's output, by modality. forms: of all items. items: by sample.
    """

    def __init__(
        self, whole: Any, samples: Sequence[Sample], modalities: Sequence[str] = MODALITIES
    ) -> None:
        self.placeholders, dtype = placeholders_of(whole.config), next(whole.parameters()).dtype
        left_out = [i for m, i in self.placeholders.ids.items() if m not in modalities]
        self.samples = [
            Sample(
                sample.input_ids[~torch.isin(sample.input_ids, torch.tensor(left_out))],
                {
                    m: [{name: _cast(value, dtype) for name, value in i.items()} for i in items]
                    for m, items in sample.items.items()
                    if m in modalities
                },
            )
            for sample in samples
        ]
        self.outputs: dict[str, OutputForm] = {}
        self.forms: dict[tuple[str, Grid], ItemForm] = {}
        self.items = [sorted(self._items(whole, s), key=lambda i: i.place) for s in self.samples]

    def _items(self, whole: Any, sample: Sample) -> Iterable[Item]:
        for modality, items in sample.items.items():
            method = getattr(base_of(whole), f"get_{modality}_features")
            token = self.placeholders.ids[modality]
            places = (sample.input_ids == token).nonzero().flatten().tolist()
            for item in items:
                output = features(whole, modality, item)
                pixels = next(iter(arguments_of(method, item)))
                form = self.outputs.setdefault(modality, OutputForm.of(output))
                rows = len(form.rows(output))
                arrays = {**item, pixels: torch.empty_like(item[pixels], device="meta")}
                grid = (FRAMES[modality], len(self.forms), 0)
                self.forms[modality, grid] = ItemForm(arrays, "", (rows,))
                yield Item(places[0], modality, grid, item[pixels].reshape(-1, 1))
                places = places[rows:]

    def form_of(self, modality: str, grid: Grid) -> ItemForm:
        return self.forms[modality, grid]

    def loss_mask(self, number: int) -> Tensor:
        """Return (L,) bool: whether each token of a sample predicts a text token."""
        ids = self.samples[number].input_ids
        is_text = ~torch.isin(ids, torch.tensor([*self.placeholders.ids.values()]))
        return torch.cat([is_text[1:], torch.tensor([False])])

    def lane(self, numbers: Sequence[int]) -> PackedLane:
        ids = [self.samples[number].input_ids for number in numbers]
        lengths = tuple(map(len, ids))
        starts = itertools.accumulate(lengths, initial=0)
        items = [
            (start + item.place, item)
            for start, number in zip(starts, numbers, strict=False)
            for item in self.items[number]
        ]
        return PackedLane(
            input_ids=torch.cat(ids).numpy(),
            labels=torch.cat([of_sample.roll(-1) for of_sample in ids]).numpy(),
            loss_mask=torch.cat([self.loss_mask(n) for n in numbers]).float().numpy(),
            position_ids=np.zeros((3, sum(lengths)), np.int64),
            lengths=lengths,
            real_lengths=lengths,
            items=tuple((at, self.forms[i.modality, i.grid].num_rows) for at, i in items),
            parts=tuple((i.modality, i.grid) for _, i in items),
        )


def _cast(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def placeholders_of(config: Any) -> Placeholders:
    """Return the ids of the placeholders in a configuration."""
    ids = {m: token for m in MODALITIES if (token := placeholder(config, m)) is not None}
    padding = getattr(config.get_text_config(), "pad_token_id", None)
    return Placeholders(ids, padding if padding is not None and padding >= 0 else 0)


def whole_gradients(
    whole: Any, examples: Examples, numbers: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """Return loss and gradients of the whole model, summed over samples ``numbers``; None: all."""
    numbers = range(len(examples.samples)) if numbers is None else numbers
    samples = [examples.samples[number] for number in numbers]
    ids = pad_sequence([s.input_ids for s in samples], True, examples.placeholders.padding)
    mask = pad_sequence([torch.ones_like(s.input_ids) for s in samples], True)
    arguments = {"input_ids": ids, "attention_mask": mask}
    arguments |= token_types(ids, examples.placeholders)
    for modality in MODALITIES:
        items = [item for sample in samples for item in sample.items.get(modality, ())]
        arguments |= concatenate(items) if items else {}
    whole.zero_grad()
    logits = whole(**arguments_of(whole.forward, arguments), use_cache=False).logits
    losses = []
    for row, number, sample in zip(logits, numbers, samples, strict=True):
        at = examples.loss_mask(number).nonzero().flatten()
        losses.append(cross_entropy(row[at], sample.input_ids[at + 1], reduction="sum"))
    loss = torch.stack(losses).sum()
    loss.backward()
    return {"loss": loss.detach()} | _gradients(whole.named_parameters())


def half_gradients(
    whole: Any, examples: Examples, packing: Packing | None, shares_calls: bool = True
) -> dict[str, Tensor]:
    """Return loss and gradients of two halves with the weights of ``whole``, over all samples."""
    ctx = FsdpContext(mesh=None, dtype=next(whole.parameters()).dtype)
    numbers = range(len(examples.samples))
    items = [item for number in numbers for item in examples.items[number]]
    blank = items[0].modality, items[0].grid
    levels = max(form.num_levels for form in examples.outputs.values())
    encoder = EncoderHalf(
        whole.config, ctx, examples.form_of, blank, levels, lambda rows, counts: rows, shares_calls
    )
    language = LanguageHalf(
        whole.config,
        ctx,
        packing,
        encoders=dict.fromkeys(MODALITIES, "tower"),
        outputs=examples.outputs,
        form_of=examples.form_of,
        placeholders=examples.placeholders,
    )
    weights = dict(whole.named_parameters(remove_duplicate=False))
    for half in (encoder, language):
        materialise(half, torch.device("cpu"))
        for name, param in half.named_parameters():
            param.data.copy_(weights[half.hf_names[name]].data)
        half.eval()
    rows = encoder(
        torch.cat([item.values for item in items]), torch.tensor([i.grid for i in items])
    )
    leaf = rows.detach().requires_grad_()
    inputs = language.prepare(examples.lane(numbers), lambda tensor: tensor)
    loss = language(inputs, {"tower": leaf}).sum()
    loss.backward()
    rows.backward(leaf.grad)
    named = [(h.hf_names[n], p) for h in (encoder, language) for n, p in h.named_parameters()]
    return {"loss": loss.detach()} | _gradients(named)


def _gradients(named: Iterable[tuple[str, Any]]) -> dict[str, Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in named}


def first_difference(reference: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> str:
    """Describe the first of loss and gradients that differs, in the model's order, or return ""."""
    if missing := reference.keys() - got.keys():
        return f"no half has {min(missing)}"
    norm = sum(value.double().square().sum() for name, value in reference.items() if name != "loss")
    floor = _FLOOR * float(torch.as_tensor(norm).sqrt())
    for name, value in reference.items():
        scale = max(float(value.abs().max()), floor)
        error = float((got[name] - value).abs().max()) / scale
        if not error <= TOLERANCE:
            return f"{name} differs by {error:.1e}"
    return ""
