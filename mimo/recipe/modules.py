"""The part of a recipe that says what each module is: its family, grid, adapters and media."""

from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    Field,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from mimo import bounds

Recompute = Literal["none", "selective", "full"]
MAX_ENTRIES = 64  # encoders of a model, media of an encoder


class Section(BaseModel):
    """A part of a recipe: nothing unknown, nothing coerced, nothing changed afterwards."""

    model_config = bounds.STRICT


class Grid(Section):
    """Sizes of a module's axes, as numbers of ranks. The module has `tp · cp · pp · dp` ranks."""

    tp: bounds.Ranks = 1
    sp: bool = False
    cp: bounds.Ranks = 1
    pp: bounds.Layers = 1
    vpp: bounds.Layers = 1
    dp: bounds.Ranks | None = None
    rank_offset: bounds.RankOffset | None = None

    @model_validator(mode="after")
    def _sequence_needs_tensor_parallel_ranks(self) -> "Grid":
        if self.sp and self.tp == 1:
            raise ValueError(
                "sp: true shards the sequence over the tp ranks, but tp is 1; "
                "set tp to 2 or more, or remove sp"
            )
        return self


Target = Literal["qkv", "proj", "fc1", "fc2"]


def _targets(targets: tuple[Target, ...]) -> tuple[Target, ...]:
    if not targets or len(set(targets)) < len(targets):
        raise ValueError(f"needs one or more of {', '.join(get_args(Target))}, each once")
    return targets


class LoRA(Section):
    """Low-rank adapters on linears of every transformer layer; what they adapt is frozen.

    `targets`: `qkv` and `proj` of attention, `fc1` and `fc2` of the MLP. Their output is
    multiplied by `alpha` / `rank`.
    """

    rank: bounds.AdapterRank = 16
    alpha: bounds.AdapterScale = 32.0
    # A list in YAML: only the container is converted, not its entries.
    targets: Annotated[tuple[Target, ...], Field(strict=False), AfterValidator(_targets)] = (
        get_args(Target)
    )

    @property
    def scale(self) -> float:
        """What the adapters' output is multiplied by."""
        return self.alpha / self.rank


def _check_adapters_can_learn(freeze: bool | Literal["tower"], lora: LoRA | None) -> None:
    if freeze is True and lora is not None:
        raise ValueError(
            "freeze: true lets nothing learn, but lora adds adapters that learn; remove freeze "
            "(lora freezes the weights that it adapts) or remove lora"
        )


class Language(Section):
    """The language model; `model` holds the family's own settings, which the family checks.

    `lora`: only its adapters learn; embeddings, norms, head and the layers' own weights do not.
    """

    family: bounds.Word = "qwen3"
    grid: Grid = Grid()
    freeze: bool = False
    lora: LoRA | None = None
    learning_rate: bounds.LearningRate | None = None
    recompute: Recompute = "none"
    model: dict[str, Any] = {}

    @model_validator(mode="after")
    def _adapters_can_learn(self) -> "Language":
        _check_adapters_can_learn(self.freeze, self.lora)
        return self

    @property
    def trains(self) -> bool:
        """Whether any of its weights are updated."""
        return not self.freeze


def _number_or(word: str, number: Any, value: Any) -> Any:
    """`value` if it is `word` or a valid `number`; pydantic alone would report two errors."""
    if value != word or not isinstance(value, str):
        try:
            return TypeAdapter(number).validate_python(value, strict=True)
        except ValidationError as error:
            reason = error.errors()[0]["msg"].removeprefix("Input ")
            raise ValueError(
                f"needs '{word}' or a number of microbatches; a number {reason}"
            ) from None
    return value


def _run_ahead(value: Any) -> int | Literal["auto"]:
    return _number_or("auto", bounds.Microbatches, value)


def _freeze(value: Any) -> bool | Literal["tower"]:
    if isinstance(value, bool) or value == "tower":
        return value
    raise ValueError("needs true, false or 'tower' (all but the projector)")


def _encode_group(value: Any) -> int | Literal["all"]:
    return _number_or("all", bounds.Batch, value)


def _item_text(value: str) -> str:
    from data import item_text_problem  # here: the package loads numpy

    problem = item_text_problem(value)
    if problem:
        raise ValueError(problem)
    return value


class MediaTokens(Section):
    """How items of a media stand in the text.

    `placeholder`: the token that stands for each row of such an item.
    `template_token`: what the chat template writes for each such part; null for the placeholder.
    `item_text`: what stands for an item in the text, `{placeholder}` where the rows go.
    """

    placeholder: bounds.Word
    template_token: bounds.Word | None = None
    item_text: Annotated[str, Field(max_length=4096), AfterValidator(_item_text)] = "{placeholder}"


class Encoder(Section):
    """An encoder with its projector.

    `freeze`: `true` keeps all of its weights, `tower` all but the projector's.
    `lora`: only the adapters in the tower and the projector learn, as also with `freeze: tower`.
    `media`: the type of content part that it encodes, such as `image` or `video`, whose
    `placeholder`, `template_token` and `item_text` are as of `MediaTokens`.
    `other_media`: the types that it encodes with the same weights, and how each stands in the text.
    `run_ahead`: microbatches encoded before the first gradient, where ranks are disjoint.
    `encode_group`: microbatches encoded in one go, where ranks are colocated.
    """

    family: bounds.Word
    media: bounds.Word = "image"
    placeholder: bounds.Word = "<|image_pad|>"
    template_token: bounds.Word | None = None
    item_text: Annotated[str, Field(max_length=4096), AfterValidator(_item_text)] = "{placeholder}"
    placement: Literal["disjoint", "colocated"] = "disjoint"
    grid: Grid = Grid()
    freeze: Annotated[bool | Literal["tower"], PlainValidator(_freeze)] = False
    lora: LoRA | None = None
    learning_rate: bounds.LearningRate | None = None
    recompute: Recompute = "none"
    other_media: Annotated[dict[bounds.Word, MediaTokens], Field(max_length=MAX_ENTRIES)] = {}
    run_ahead: Annotated[
        int | Literal["auto"], PlainValidator(_run_ahead, bounds.Microbatches | Literal["auto"])
    ] = "auto"
    encode_group: Annotated[
        int | Literal["all"], PlainValidator(_encode_group, bounds.Batch | Literal["all"])
    ] = "all"
    model: dict[str, Any] = {}

    @model_validator(mode="after")
    def _adapters_can_learn(self) -> "Encoder":
        _check_adapters_can_learn(self.freeze, self.lora)
        return self

    @property
    def trains(self) -> bool:
        """Whether any of its weights are updated."""
        return self.freeze is not True

    @property
    def own_tokens(self) -> MediaTokens:
        """How items of its own `media` stand in the text."""
        return MediaTokens(
            placeholder=self.placeholder,
            template_token=self.template_token,
            item_text=self.item_text,
        )

    @property
    def media_tokens(self) -> dict[str, MediaTokens]:
        """How each media that it encodes stands in the text, its own `media` first."""
        return {self.media: self.own_tokens, **self.other_media}
