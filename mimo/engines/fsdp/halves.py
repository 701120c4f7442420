"""Split any vision-language model of transformers into two halves: its tower and the rest.

The encoder half runs `get_image_features` and the like. The language half runs the model's own
forward with these results as ``mm_encoder_outputs``. Masks, positions and scales stay transformers'
own code, so a class needs no code here. `mimo.model.gate` compares both halves with the whole model
before a class may train.

Letters: I items, N embeddings, L feature levels, H hidden size.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PretrainedConfig

from mimo.engines.fsdp.context import FsdpContext, Wrapper
from mimo.engines.fsdp.models import build_on_meta
from mimo.ops.segments import to_device

Grid = tuple[int, int, int]
Shape = Literal["tensor", "list"]
FRAMES = {"image": 1, "video": 2, "audio": 0}
"""Frames in an item's grid, by modality; a video may have more."""
MODALITIES = tuple(FRAMES)
_LEVELS = "deepstack_features"
_EMBEDDINGS = ("pooler_output", "last_hidden_state")


class ItemForm(Protocol):
    """The processor's arrays for items of one size; see `data.modalities.transformers`.

    arrays: the arguments of the model's methods by name. Those that depend on the content are on
    meta, and have P numbers in all, `num_values`. num_rows: the item's embeddings.
    """

    @property
    def arrays(self) -> Mapping[str, Tensor]: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def num_values(self) -> int: ...

    def content(self, values: Tensor) -> dict[str, Tensor]:
        """Return the arguments that depend on the content, from an item's values (P, 1)."""
        ...


FormOf = Callable[[str, Grid], ItemForm]
"""A function that returns the form of an item, by its modality and its grid in `PartPlan`."""


@dataclass(frozen=True)
class OutputForm:
    """The form of a tower's output, by modality of the items.

    field: the attribute with the embeddings. embeddings, levels: one tensor for all
    items, or a list with one for each. num_levels: L.
    """

    field: str
    embeddings: Shape
    levels: Shape
    num_levels: int

    @classmethod
    def of(cls, output: Any) -> OutputForm:
        """Return the form of an output. Raises ValueError if it has no embeddings."""
        fields = (name for name in _EMBEDDINGS if getattr(output, name, None) is not None)
        if (field := next(fields, None)) is None:
            raise ValueError(f"its features have none of {', '.join(_EMBEDDINGS)}")
        levels = getattr(output, _LEVELS, None)
        levels = [] if levels is None else levels
        first = levels[0] if len(levels) else ()
        return cls(
            field,
            "tensor" if isinstance(getattr(output, field), Tensor) else "list",
            "tensor" if isinstance(first, Tensor) else "list",
            len(levels),
        )

    def rows(self, output: Any) -> Tensor:
        """Return the embeddings of all items and their levels side by side, (N, (1 + L)·H)."""
        levels = getattr(output, _LEVELS) if self.num_levels else ()
        return torch.cat([_flat(part) for part in (getattr(output, self.field), *levels)], dim=-1)

    def output(self, rows: Tensor, sizes: Sequence[int], width: int) -> Any:
        """Return these rows in the form of the tower's output.

        sizes: number of rows of each item. width: H.
        """
        embeddings, *levels = rows.split(width, dim=-1)[: 1 + self.num_levels]

        def shaped(values: Tensor, shape: Shape) -> Any:
            return values if shape == "tensor" else values.split(list(sizes))

        result = SimpleNamespace(**dict.fromkeys(_EMBEDDINGS, shaped(embeddings, self.embeddings)))
        setattr(result, _LEVELS, [shaped(level, self.levels) for level in levels])
        result.attention_mask = rows.new_ones(len(rows), dtype=torch.bool)
        return result


def _flat(part: Any) -> Tensor:
    tensors = [part] if isinstance(part, Tensor) else part
    return torch.cat([tensor.flatten(0, -2) for tensor in tensors])


def build_whole(config: PretrainedConfig, dtype: torch.dtype, attention: str | None = None) -> Any:
    """Build the whole model by `build_on_meta`.

    attention: implementation of the language half; None for transformers' choice.
    """
    whole = build_on_meta(AutoModelForImageTextToText, config, dtype)
    if attention is not None:
        # Set directly: transformers would look for a package of that name.
        decoder_of(whole).config._attn_implementation = attention
    return whole


def base_of(whole: Any) -> Any:
    """Return the model without its head, which has `get_image_features`."""
    return whole.base_model


def decoder_of(whole: Any) -> Any:
    """Return the language model without its head. Raises ValueError if the class has none."""
    decoder = base_of(whole).get_decoder()
    if decoder is base_of(whole):
        raise ValueError(f"{type(whole).__name__} has no language model apart from its tower")
    return decoder


def language_parameters(whole: Any) -> set[str]:
    """Return the names of the parameters of decoder and head; all others are the encoder's."""
    of_language = {id(param) for param in decoder_of(whole).parameters()}
    if (head := whole.get_output_embeddings()) is not None:
        of_language |= {id(param) for param in head.parameters()}
    named = whole.named_parameters(remove_duplicate=False)
    return {name for name, param in named if id(param) in of_language}


def keep(whole: nn.Module, kept: Callable[[str], bool], parts: Iterable[nn.Module]) -> None:
    """Turn all other parameters, and buffers outside of ``parts``, into plain attributes."""
    inside = {id(module) for part in parts for module in part.modules()}
    for path, module in whole.named_modules():
        prefix = f"{path}." if path else ""
        for name in [n for n in module._parameters if not kept(f"{prefix}{n}")]:
            value = module._parameters.pop(name)
            module.__dict__[name] = None if value is None else value.detach()
        if id(module) not in inside:
            for name in [*module._buffers]:
                module.__dict__[name] = module._buffers.pop(name)


def arguments_of(method: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a method names in its signature."""
    return {name: values[name] for name in inspect.signature(method).parameters if name in values}


@dataclass(frozen=True)
class PreparedItems:
    """Items of a microbatch; without items, a blank one.

    forms: of each item. sizes: number of embeddings of each item; without items, none.
    groups: indices of the items that share a call. modalities, arguments: of each call, the latter
    as far as they do not depend on the content.
    """

    forms: tuple[ItemForm, ...]
    sizes: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    modalities: tuple[str, ...]
    arguments: tuple[dict[str, Tensor], ...]


class EncoderHalf(Wrapper):
    """The tower of any class of transformers, with all parameters outside the language model.

    FSDP2 gathers it as one unit, because lanes may need different numbers of calls.

    form_of: see `FormOf`. blank: an item that a lane without items encodes. num_levels: L, the
    largest of any modality; rows of the others end in zeros. make_rows: (embeddings
    (N, (1 + L)·H), number of embeddings of each item) -> the result of `run`. shares_calls: whether
    one call may encode several items.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        ctx: FsdpContext,
        form_of: FormOf,
        blank: tuple[str, Grid],
        num_levels: int,
        make_rows: Callable[[Tensor, tuple[int, ...]], Any],
        shares_calls: bool = True,
    ) -> None:
        super().__init__(ctx)
        whole = build_whole(config, ctx.stored_dtype)
        others = language_parameters(whole)
        language = {id(module) for module in decoder_of(whole).modules()}
        self.hf_names = {f"whole.{n}": n for n, _ in whole.named_parameters() if n not in others}
        tower = [m for m in whole.modules() if id(m) not in language and not any(m.children())]
        keep(whole, lambda name: name not in others, [*tower, base_of(whole)])
        self.whole: Any = whole
        self.form_of, self.blank, self.make_rows = form_of, blank, make_rows
        self.shares_calls = shares_calls
        self.width = (1 + num_levels) * decoder_of(whole).config.hidden_size
        self.units = []
        if ctx.recompute == "full":
            whole.gradient_checkpointing_enable({"use_reentrant": False})

    def prepare(self, grids: Tensor, copy: Callable[[Tensor], Tensor]) -> PreparedItems:
        """Do all host work for items with these grids (I, 3) int64; in any thread.

        Items share a call if their arguments differ only in the first dimension.
        """
        items = [(modality_of(grid), cast("Grid", tuple(grid))) for grid in grids.tolist()]
        encoded = items or [self.blank]
        forms = [self.form_of(*item) for item in encoded]
        groups: dict[Any, list[int]] = {}
        for number, ((modality, _), form) in enumerate(zip(encoded, forms, strict=True)):
            trailing = tuple((name, array.shape[1:]) for name, array in form.arrays.items())
            alone = None if self.shares_calls else number
            groups.setdefault((modality, trailing, alone), []).append(number)
        arguments = tuple(
            {
                name: self._cast(torch.cat([forms[number].arrays[name] for number in group]))
                for name, array in forms[group[0]].arrays.items()
                if not array.is_meta
            }
            for group in groups.values()
        )
        return PreparedItems(
            forms=tuple(forms),
            sizes=tuple(form.num_rows for form in forms) if items else (),
            groups=tuple(map(tuple, groups.values())),
            modalities=tuple(modality for modality, *_ in groups),
            arguments=to_device(arguments, copy) if any(arguments) else arguments,
        )

    def _cast(self, array: Tensor) -> Tensor:
        return array.to(self.ctx.dtype) if array.is_floating_point() else array

    def run(self, patches: Any, items: Any) -> Any:
        """Encode items and return the result of `make_rows`.

        patches: as `values` takes them. items: `PreparedItems`, or grids (I, 3). Without items, the
        result has 0 embeddings and is still part of the autograd graph.
        """
        if isinstance(items, Tensor):
            items = self.prepare(items, lambda tensor: tensor)
        counts = [form.num_values for form in items.forms]
        if items.sizes:
            values = self.values(patches).flatten().split(counts)
        else:
            device = next(self.parameters()).device
            # Ones, because Idefics-3 drops an item of zeros as padding.
            values = [torch.ones(counts[0], dtype=self.ctx.dtype, device=device)]
        rows: dict[int, Tensor] = {}
        for call, group in enumerate(items.groups):
            group_rows = self._rows(items, call, values)
            # The surplus goes to the last item, so that a wrong count is noticed.
            sizes = [items.forms[number].num_rows for number in group[:-1]]
            ends = [min(end, len(group_rows)) for end in itertools.accumulate(sizes)]
            rows |= zip(group, group_rows.tensor_split(ends), strict=True)
        ordered = [rows[number] for number in range(len(rows))]
        if not items.sizes:
            return self.make_rows(ordered[0][:0].clone(), ())
        return self.make_rows(torch.cat(ordered), tuple(map(len, ordered)))

    def _rows(self, items: PreparedItems, call: int, values: Sequence[Tensor]) -> Tensor:
        each = [items.forms[number].content(values[number]) for number in items.groups[call]]
        content = {
            name: self._cast(torch.cat([arrays[name] for arrays in each])) for name in each[0]
        }
        output = features(self.whole, items.modalities[call], items.arguments[call] | content)
        rows = OutputForm.of(output).rows(output)
        missing = self.width - rows.shape[1]
        assert missing >= 0, f"rows of {rows.shape[1]} numbers, planned with {self.width}"
        return nn.functional.pad(rows, (0, missing))


def features(whole: Any, modality: str, arguments: Mapping[str, Tensor]) -> Any:
    """Return the output of `get_<modality>_features`, with the arguments that it names."""
    method = getattr(base_of(whole), f"get_{modality}_features")
    parameters = inspect.signature(method).parameters
    takes_more = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    options = {"return_dict": True} if takes_more or "return_dict" in parameters else {}
    lists = [n for n, p in parameters.items() if str(p.annotation).startswith("list[int]")]
    values = {
        name: [*map(int, value)] if name in lists else value
        for name, value in arguments_of(method, arguments).items()
    }
    return method(**values, **options)


def modality_of(grid: Sequence[int]) -> str:
    """Return the modality of an item by the frames in its grid: audio has none, an image one."""
    return next(name for name, frames in FRAMES.items() if frames == min(grid[0], 2))
