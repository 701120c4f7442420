"""`mimo convert to-hf --adapter`: what a run with LoRA has learned, as a folder that peft loads.

The base model is the folder that the recipe starts from. Where our linear holds several of theirs,
each gets our `lora_a` and its own rows of `lora_b`. An encoder's projector learns beside the
adapters; its modules go along whole, as peft's `modules_to_save`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mimo.checkpoint.hf.export import TrainedModel, open_trained
from mimo.checkpoint.hf.folder import new_folder
from mimo.checkpoint.hf.initial import initial_weights, whole_tensor
from mimo.config.modules import LoRA
from mimo.config.schema import LANGUAGE
from mimo.errors import InputError, RecipeError
from mimo.families.hf_config import write_json
from mimo.families.registry import encoder_family
from mimo.runtime.progress import counter_of

_PREFIX = "base_model.model."
_COMPARED_BYTES = 10**9
_LISTED = 10


def convert_adapter(run: Path, target: Path, average: bool = False) -> None:
    """Write the folder ``target``: ``adapter_config.json`` and ``adapter_model.safetensors``.

    run: a run or checkpoint folder whose model started from a Hugging Face checkpoint, which must
    still be there: every weight is compared with it, so that nothing learned is lost. average:
    write the moving average of what learned.

    Raises InputError for a checkpoint without adapters, and RecipeError where the folder it started
    from does not fit or where other weights have learned than adapters and a projector's.
    """
    trained = open_trained(run, average)
    if not any(one.adapter for one in trained.weights):
        raise InputError(
            f"{trained.checkpoint}: its recipe has no lora, so there is no adapter to write; leave "
            f"--adapter out to write the whole model"
        )
    with new_folder(target) as folder:
        tensors, loras = _adapters(trained)
        saved = _outermost(_changed_modules(trained))
        tensors |= _whole_modules(trained, saved)
        config = folder / "adapter_config.json"
        # Absolute: a relative one would be looked up from wherever it is loaded.
        base = str(Path(trained.recipe.init_from or "").absolute())
        write_json(config, _config(base, loras, saved))
        weights = folder / "adapter_model.safetensors"
        save_file(tensors, weights, metadata={"format": "pt"})
        shutil.copymode(config, weights)  # else only its owner may read it
    trained.tell_what_is_left_out()


def _adapters(trained: TrainedModel) -> tuple[dict[str, Tensor], dict[str, LoRA]]:
    """The adapters' matrices under peft's keys, and by adapted module in transformers its sizes."""
    ours = trained.read(trained.weights, only_adapters=True)
    tensors: dict[str, Tensor] = {}
    loras: dict[str, LoRA] = {}
    for one in trained.weights:
        if one.adapter is None:
            continue
        for source, lora_b in one.weight.split(ours[one.adapter.lora_b]).items():
            module = _owner(source.key)
            # Tensors of a file must not share memory.
            tensors[f"{_PREFIX}{module}.lora_A.weight"] = ours[one.adapter.lora_a].clone()
            tensors[f"{_PREFIX}{module}.lora_B.weight"] = lora_b
            loras[module] = one.adapter.lora
    return tensors, loras


def _whole_modules(trained: TrainedModel, modules: list[str]) -> dict[str, Tensor]:
    """Every tensor of modules in transformers, under peft's keys."""
    inside = tuple(f"{module}." for module in modules)
    weights = [one for one in trained.weights if one.weight.sources[0].key.startswith(inside)]
    ours = trained.read(weights)
    return {
        _PREFIX + key: tensor.contiguous()
        for one in weights
        for key, tensor in one.weight.unpack(ours[one.key]).items()
    }


def _config(base: str, loras: dict[str, LoRA], saved: list[str]) -> dict[str, Any]:
    """As peft's `LoraConfig`. loras: by adapted module; saved: modules that are written whole."""
    usual = next(iter(loras.values()))
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": usual.rank,
        "lora_alpha": _number(usual.alpha),
        "rank_pattern": {m: own.rank for m, own in loras.items() if own.rank != usual.rank},
        "alpha_pattern": {
            m: _number(own.alpha) for m, own in loras.items() if own.alpha != usual.alpha
        },
        # Whole paths: a tower's linears may be called like those of the language model.
        "target_modules": sorted(loras),
        "modules_to_save": saved or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
    }


def _number(alpha: float) -> int | float:
    return int(alpha) if alpha.is_integer() else alpha


def _owner(key: str) -> str:
    """The module in transformers that a tensor belongs to."""
    return key.rpartition(".")[0]


def _outermost(modules: Iterable[str]) -> list[str]:
    found: list[str] = []
    for module in sorted(modules):
        if not any(module.startswith(f"{other}.") for other in found):
            found.append(module)
    return found


def _changed_modules(trained: TrainedModel) -> set[str]:
    """The modules in transformers whose own weights differ from those of the base model.

    Which weights learned depends on all phases of a run, not on its last recipe alone. Raises
    RecipeError where they are none of a projector's.
    """
    folder = trained.recipe.init_from
    if folder is None or not Path(folder).is_dir():
        raise InputError(
            f"{trained.checkpoint}: init_from is {folder or 'not given'}, and no folder is there; "
            f"adapters are written beside the model that they adapt, so put it back (or leave "
            f"--adapter out to write the whole model)"
        )
    base = initial_weights(trained.recipe)
    assert base is not None, "the recipe starts from the folder"
    modules: set[str] = set()
    others: list[str] = []
    shards = list(trained.shards(_COMPARED_BYTES))
    with counter_of("comparisons", len(shards)) as advance:
        for shard in shards:
            ours = trained.read(shard)
            for one in shard:
                rows = one.shape[0]
                theirs = whole_tensor(one.weight, rows, base.checkpoint, one.dtype)
                if torch.equal(ours.pop(one.key), theirs):
                    continue
                module = one.key.partition(".")[0]
                if module != LANGUAGE and one.weight.name.startswith(
                    encoder_family(trained.recipe, module).PROJECTOR
                ):
                    modules |= {_owner(source.key) for source in one.weight.sources}
                else:
                    others.append(one.key)
            advance()
    if others:
        raise RecipeError(
            f"{trained.checkpoint}: other weights than adapters and projectors were trained, and "
            f"an adapter folder would lack them; leave --adapter out to write the whole model:",
            *(f"  {key}" for key in others[:_LISTED]),
            *([f"  and {len(others) - _LISTED} more"] if len(others) > _LISTED else []),
        )
    return modules
