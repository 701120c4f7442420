"""The recipe: reading, validation, and messages in the words of a recipe.

`read_recipe` reads a YAML file and overrides (`train.steps=20`) into frozen models. Unknown keys,
wrong types and values out of range are collected and raised together, each with file and line.
`mimo.parallel.build` checks what depends on the number of ranks.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, cast, get_args

from pydantic import BaseModel, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import ErrorDetails

from mimo.config import bounds
from mimo.config.cluster import Cluster
from mimo.config.modules import MAX_ENTRIES, Encoder, Generator, Language, Section
from mimo.config.source import (
    KEY_OF,
    PHASES,
    REMOVED,
    Location,
    YamlSource,
    as_yaml,
    dotted,
    read_yaml,
)
from mimo.config.training import Bridge, Data, Train
from mimo.errors import RecipeError, nearest, shown, suggestion

LANGUAGE = "language"
"""The name of the language model's module; all others are encoders and generators."""
_RESERVED_NAMES = {LANGUAGE, "ema", "optimizer"}  # in checkpoints


class Recipe(Section):
    """One training run."""

    name: bounds.RunName
    """Name of the run and of its folder."""
    init_from: bounds.PathText | None = None
    """Folder or Hub id (`org/name`) of a Hugging Face checkpoint to start from; it also gives
    families, sizes, tokenizer and placeholders that the recipe leaves out."""
    language: Language = Language()
    """The language model."""
    encoders: Annotated[dict[bounds.ModuleName, Encoder], Field(max_length=MAX_ENTRIES)] = {}
    """The encoders by a name of your choice. With `init_from`, the first that gives no family, or
    the folder's, is the folder's tower; the others begin with fresh weights."""
    generators: Annotated[dict[bounds.ModuleName, Generator], Field(max_length=MAX_ENTRIES)] = {}
    """The generators by a name of your choice, one for each modality that the model answers
    with."""
    bridge: Bridge = Bridge()
    """How embeddings travel from encoders to the language model, and hidden states to
    generators."""
    data: Data
    """Samples, tokenizer and packing."""
    train: Train
    """The optimisation, and what is written when."""
    cluster: Cluster = Cluster()
    """The machines of a job, for `mimo launch`."""

    _source: YamlSource | None = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _module_names_are_distinct(self) -> "Recipe":
        for section in ("encoders", "generators"):
            for name in _RESERVED_NAMES & getattr(self, section).keys():
                raise ValueError(f"{section}.{name}: this name is reserved; choose another")
        for name in self.encoders.keys() & self.generators.keys():
            raise ValueError(f"generators.{name}: an encoder has this name; choose another")
        return self

    @model_validator(mode="after")
    def _tokens_can_be_counted(self) -> "Recipe":
        longest, samples = self.data.sequence_length, self.train.micro_batch_size
        if self.data.tokens_per_microbatch is not None and samples != 1:
            raise ValueError(
                f"train.micro_batch_size {samples}, but data.tokens_per_microbatch packs what "
                f"fits; set train.micro_batch_size: 1, or remove data.tokens_per_microbatch"
            )
        if longest * samples > bounds.MAX_MICROBATCH_TOKENS:
            raise ValueError(
                f"train.micro_batch_size {samples} · data.sequence_length {longest} makes "
                f"{longest * samples} tokens of a microbatch, but at most "
                f"{bounds.MAX_MICROBATCH_TOKENS} can be counted; lower one of them"
            )
        return self

    @model_validator(mode="after")
    def _rates_rise_before_they_fall(self) -> "Recipe":
        train, slowest = self.train, max(self.modules, key=self.warmup_steps)
        longest = self.warmup_steps(slowest)
        if train.schedule == "wsd" and longest + train.last_decay_steps > train.steps:
            is_shared = self.module(slowest).warmup_steps is None
            owner = "train" if is_shared else dotted(self.key_of(slowest))
            raise ValueError(
                f"{owner}.warmup_steps {longest} + train.decay_steps {train.last_decay_steps} "
                f"exceed train.steps {train.steps}; lower one of them"
            )
        return self

    def warmup_steps(self, module: str) -> int:
        steps = self.module(module).warmup_steps
        return self.train.warmup_steps if steps is None else steps

    @property
    def longest_microbatch(self) -> int:
        """Most tokens of a lane's microbatch."""
        tokens = self.data.sequence_length * self.train.micro_batch_size
        return self.data.tokens_per_microbatch or tokens

    def module(self, name: str) -> Language | Encoder | Generator:
        return self.modules[name]

    @property
    def modules(self) -> dict[str, Language | Encoder | Generator]:
        return {LANGUAGE: self.language, **self.encoders, **self.generators}

    def key_of(self, module: str) -> Location:
        """Where the recipe describes the module of this name."""
        if module == LANGUAGE:
            return (LANGUAGE,)
        return ("generators" if module in self.generators else "encoders", module)

    @property
    def trains_before_language(self) -> bool:
        """Whether gradients pass through the language model: encoders train, or queries do."""
        guests = self.generators.values()
        return any(e.trains for e in self.encoders.values()) or any(g.num_queries for g in guests)

    @property
    def trains_before_generators(self) -> bool:
        """Whether gradients leave the generators."""
        return self.language.trains or self.trains_before_language

    def trains(self, module: str) -> bool:
        """Whether a module has weights to update, the queries of generators included."""
        has_queries = any(g.num_queries for g in self.generators.values())
        return self.module(module).trains or (module == LANGUAGE and has_queries)

    @property
    def run_dir(self) -> Path:
        return Path(self.train.run_dir) / self.name

    @property
    def path(self) -> Path | None:
        return None if self._source is None else self._source.path

    def problem(self, location: Location, message: str) -> str:
        """Format an error about the value at `location`, with file and line if known."""
        if self._source is not None:
            return self._source.problem(location, message)
        return f"{dotted(location)}: {message}"

    def to_yaml(self) -> str:
        """The resolved recipe with its defaults, as YAML that `read_recipe` reads back."""
        return as_yaml(self.model_dump(mode="json"))


Fill = Callable[[dict[str, Any]], Iterable[tuple[Location, str]]]
"""Complete a recipe's plain data in place; yield the location and message of every problem."""


def read_recipe(path: Path, overrides: Sequence[str], fill: Fill) -> Recipe:
    """Read a recipe without phases. Raises RecipeError with a line for each error."""
    source = read_yaml(Path(path), overrides)
    if PHASES in source.data:
        message = "a recipe without phases is needed here; give the recipe of one phase"
        raise RecipeError(*source.problems, source.problem((PHASES,), message))
    return parse_recipe(source, fill)


def parse_recipe(source: YamlSource, fill: Fill) -> Recipe:
    """Validate the recipe that `source` holds. Raises RecipeError like `read_recipe`."""
    check_keys(source)
    problems = [*source.problems, *(source.problem(*problem) for problem in fill(source.data))]
    try:
        recipe = Recipe.model_validate(source.data)
    except ValidationError as error:
        raise RecipeError(*problems, *descriptions(error, source.problem, Recipe)) from error
    recipe._source = source
    if problems:
        raise RecipeError(*problems)
    return recipe


def check_keys(source: YamlSource) -> None:
    """Raise RecipeError for unknown keys before the folder of `init_from` is read, in seconds."""
    try:
        if "init_from" in source.data:
            Recipe.model_validate(source.data)
    except ValidationError as error:
        if any(details["type"] == "extra_forbidden" for details in error.errors()):
            lines = descriptions(error, source.problem, Recipe, skipped="missing")
            raise RecipeError(*source.problems, *lines) from error


# -------------------------------------------------------------------- messages

_VALUE_OF = {"bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "adamw": "adam"}


def descriptions(
    error: ValidationError,
    problem: Callable[[Location, str], str],
    model: type[BaseModel],
    base: Location = (),
    skipped: str | None = None,
) -> Iterator[str]:
    """Yield a line for each of pydantic's errors about `model`, in the words of a recipe.

    problem: formats location and message. base: the keys' location. skipped: error type to omit.
    """
    for details in error.errors():
        # A default that follows from a wrong setting is no error of its own.
        if details["type"] in (skipped, "default_factory_not_called"):
            continue
        location: Location = tuple(details["loc"])
        if location and location[-1] == "[key]":
            location = location[:-1]
        message = _message(details, location, model, is_recipe=not base)
        if details["type"] == "string_type" and location != details["loc"]:
            message = f"a key is a string; got {shown(details['input'])}"
        yield problem((*base, *location), message)


def _message(
    details: ErrorDetails, location: Location, model: type[BaseModel], is_recipe: bool
) -> str:
    if details["type"] == "extra_forbidden":
        if is_recipe and (instead := REMOVED.get(location)) is not None:
            return f"this key was removed; {instead}"
        section = _section_at(location[:-1], model)
        choices = [*section.model_fields] if section is not None else []
        choices += [PHASES] if is_recipe and section is model else []
        if is_recipe and (key := KEY_OF.get(str(location[-1]))) is not None:
            *place, name = key.split(".")
            field = cast("type[BaseModel]", _section_at(tuple(place), model)).model_fields[name]
            meant = name if name in choices else key
            return (
                f"unknown key; did you mean '{meant}'? ({' '.join(str(field.description).split())})"
            )
        return f"unknown key; {suggestion(str(location[-1]), choices)}"
    if details["type"] == "missing":
        return "this key is required"
    message = details["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if isinstance(details["input"], dict) and details["type"] == "value_error":
        return message
    value, hint = details["input"], ""
    if details["type"] == "literal_error" and isinstance(value, str):
        choices = re.findall(r"'([^']*)'", message)
        match = _VALUE_OF.get(value.lower()) or nearest(value, choices)
        hint = f"; did you mean '{match}'?" if match in choices else ""
    return f"{message}; got {shown(value)}{hint}"


def _section_at(location: Location, recipe: type[BaseModel]) -> type[BaseModel] | None:
    """The model of the mapping at `location`, found by walking the annotations."""
    section: type[BaseModel] | None = recipe
    in_container = False
    for part in location:
        if in_container:
            in_container = False
            continue
        if section is None or part not in section.model_fields:
            return None
        annotation = section.model_fields[str(part)].annotation
        in_container = not isinstance(annotation, type) or not issubclass(annotation, BaseModel)
        section = _first_section(annotation)
    return section


def _first_section(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    sections = (_first_section(argument) for argument in get_args(annotation))
    return next((section for section in sections if section is not None), None)
