"""What is wrong with a recipe's keys, in the terms of a recipe."""

import re
from collections.abc import Callable, Iterator
from typing import Any, cast, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from mimo.config.source import Location, removed
from mimo.errors import nearest, shown, suggestion

PHASES = "phases"
"""The key of a file with several recipes, which `mimo.config.phases` takes apart."""


_OTHER_NAMES = {  # of our keys, in other trainers
    "init_from": "model_name_or_path pretrained_model_name_or_path",
    "data.sequence_length": "max_length max_seq_length max_seq_len seq_length seq_len cutoff_len "
    "model_max_length",
    "data.tokenizer": "tokenizer_name_or_path",
    "language.grid.tp": "tensor_parallel_size tensor_model_parallel_size",
    "language.grid.pp": "pipeline_parallel_size pipeline_model_parallel_size",
    "language.recompute": "gradient_checkpointing activation_checkpointing",
    "train.clip_grad_norm": "max_grad_norm gradient_clipping clip_grad",
    "train.global_batch_size": "batch_size gradient_accumulation_steps grad_accum_steps",
    "train.learning_rate": "lr max_lr",
    "train.log_every": "logging_steps log_interval",
    "train.micro_batch_size": "per_device_train_batch_size",
    "train.optimizer": "optim",
    "train.precision": "bf16 fp16 dtype torch_dtype mixed_precision",
    "train.run_dir": "output_dir",
    "train.save_every": "save_steps save_interval",
    "train.schedule": "lr_scheduler_type lr_decay_style",
    "train.steps": "max_steps num_steps train_iters epochs num_epochs num_train_epochs",
    "train.validate_every": "eval_steps eval_interval",
    "train.warmup_steps": "warmup_ratio warmup_iters lr_warmup_iters",
}
KEY_OF = {name: key for key, names in _OTHER_NAMES.items() for name in names.split()}
"""Our keys by the names that people type from habit."""
_VALUE_OF = {"bfloat16": "bf16", "float32": "fp32", "float64": "fp64", "adamw": "adam"}


def descriptions(
    error: ValidationError,
    problem: Callable[[Location, str], str],
    model: type[BaseModel],
    base: Location = (),
    skipped: str | None = None,
) -> Iterator[str]:
    """One line for each of pydantic's findings about ``model``, in the terms of a recipe.

    problem: makes a line of a location and a message. base: where the model's keys are. skipped: a
    type of pydantic's errors that gets no line.
    """
    for details in error.errors():
        if details["type"] == skipped:
            continue
        own: Location = tuple(details["loc"])
        if own and own[-1] == "[key]":
            own = own[:-1]
        message = _message(details, own, model, is_recipe=not base)
        if details["type"] == "string_type" and own != details["loc"]:
            message = f"a key is a string; got {shown(details['input'])}"
        yield problem((*base, *own), message)


def _message(
    details: ErrorDetails, location: Location, model: type[BaseModel], is_recipe: bool
) -> str:
    if details["type"] == "extra_forbidden":
        if is_recipe and (instead := removed(location)) is not None:
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
    given = details["input"]
    hint = ""
    if details["type"] == "literal_error" and isinstance(given, str):
        choices = re.findall(r"'([^']*)'", message)
        match = _VALUE_OF.get(given.lower()) or nearest(given, choices)
        hint = f"; did you mean '{match}'?" if match in choices else ""
    return f"{message}; got {shown(given)}{hint}"


def _section_at(location: Location, recipe: type[BaseModel]) -> type[BaseModel] | None:
    """The model that describes the mapping at `location`, found by walking the annotations."""
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
    found = (_first_section(argument) for argument in get_args(annotation))
    return next((section for section in found if section is not None), None)
