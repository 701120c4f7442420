"""`mimo convert to-hf --adapter`: the trained adapters, as a folder that peft loads.

The base model is the folder that the recipe starts from. If our linear holds several of theirs,
each gets our `lora_a` and its rows of `lora_b`. An encoder's projector is trained beside the
adapters; its modules are written whole, as peft's `modules_to_save`.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from mimo.checkpoint.hf.initial import initial_weights, whole_tensor
from mimo.checkpoint.hf.trained import TrainedModel, open_trained
from mimo.checkpoint.reading import shards_of
from mimo.config.modules import LoRA
from mimo.config.schema import LANGUAGE
from mimo.errors import InputError
from mimo.families.hf_config import new_folder, write_json
from mimo.families.keymap import adapter_names
from mimo.families.registry import encoder_family
from mimo.runtime.progress import counter_of

_PREFIX = "base_model.model."
_COMPARED_BYTES = 10**9


def convert_adapter(run: Path, target: Path, average: bool = False) -> None:
    """Write the folder ``target``: ``adapter_config.json`` and ``adapter_model.safetensors``.

    run: a run or checkpoint folder. The Hugging Face folder that it started from must still be
    there: every weight is compared with it. average: write the moving average. Raises InputError
    without adapters, or if other weights than adapters and a projector's were trained.
    """
    trained = open_trained(run, average)
    adapted = [weight.weight for weight in trained.weights if weight.lora]
    problem = None
    if trained.generator is not None:
        problem = "its model has a generator, which peft's form has no place for"
    elif not adapted:
        problem = "its recipe has no lora, so there is no adapter to write"
    elif any(weight.sources[0].stacked for weight in adapted):
        problem = "its experts have adapters, which peft's form has no place for"
    if problem is not None:
        way_out = "leave --adapter out to write the whole model"
        raise InputError(f"{trained.checkpoint}: {problem}; {way_out}")
    with new_folder(target) as folder:
        tensors, loras = _adapters(trained)
        changed = _changed_modules(trained)
        parents = tuple(f"{module}." for module in changed)
        saved = sorted(module for module in changed if not module.startswith(parents))
        tensors |= _tensors_of(trained, saved)
        config = folder / "adapter_config.json"
        # Absolute: a relative one would be looked up from wherever it is loaded.
        base = str(Path(trained.recipe.init_from or "").absolute())
        usual = next(iter(loras.values()))
        settings = {
            "peft_type": "LORA",
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": usual.rank,
            "lora_alpha": usual.alpha,
            "rank_pattern": {m: lora.rank for m, lora in loras.items() if lora.rank != usual.rank},
            "alpha_pattern": {
                m: lora.alpha for m, lora in loras.items() if lora.alpha != usual.alpha
            },
            # Whole paths: a tower's linears may be called like those of the language model.
            "target_modules": sorted(loras),
            "modules_to_save": saved or None,
        }
        write_json(config, settings)
        weights = folder / "adapter_model.safetensors"
        save_file(tensors, weights, metadata={"format": "pt"})
        shutil.copymode(config, weights)  # else only its owner may read it
    trained.print_left_out()


def _adapters(trained: TrainedModel) -> tuple[dict[str, Tensor], dict[str, LoRA]]:
    """Return the adapters' matrices under peft's keys, and the LoRA settings by adapted module."""
    ours = trained.read(trained.weights, only_adapters=True)
    tensors: dict[str, Tensor] = {}
    loras: dict[str, LoRA] = {}
    for weight in trained.weights:
        if weight.lora is None:
            continue
        a_key, b_key = adapter_names(weight.key)
        for source, lora_b in weight.weight.split(ours[b_key]).items():
            module = source.key.rpartition(".")[0]
            # Tensors of a file must not share memory.
            tensors[f"{_PREFIX}{module}.lora_A.weight"] = ours[a_key].clone()
            tensors[f"{_PREFIX}{module}.lora_B.weight"] = lora_b
            loras[module] = weight.lora
    return tensors, loras


def _tensors_of(trained: TrainedModel, modules: list[str]) -> dict[str, Tensor]:
    """Return every tensor of modules in transformers, under peft's keys."""
    prefixes = tuple(f"{module}." for module in modules)
    weights = [w for w in trained.weights if w.weight.sources[0].key.startswith(prefixes)]
    ours = trained.read(weights)
    return {
        _PREFIX + key: tensor.contiguous()
        for weight in weights
        for key, tensor in weight.weight.unpack(ours[weight.key]).items()
    }


def _changed_modules(trained: TrainedModel) -> set[str]:
    """Return the modules in transformers whose weights differ from the base model's.

    The recipe knows only its own phase. Raises InputError for a module that is no projector.
    """
    base = initial_weights(trained.recipe)
    assert base is not None, "the recipe starts from the folder"
    modules: set[str] = set()
    others: list[str] = []
    sizes = ((weight, weight.num_bytes) for weight in trained.weights)
    shards = list(shards_of(sizes, _COMPARED_BYTES))
    with counter_of("comparisons", len(shards)) as advance:
        for shard in shards:
            ours = trained.read(shard)
            for weight in shard:
                rows, dtype = weight.tensor.shape[0], weight.tensor.dtype
                theirs = whole_tensor(weight.weight, rows, base.checkpoint, dtype)
                if torch.equal(ours.pop(weight.key), theirs):
                    continue
                module = weight.key.partition(".")[0]
                if module != LANGUAGE and weight.weight.name.startswith(
                    encoder_family(trained.recipe, module).PROJECTOR
                ):
                    modules |= {s.key.rpartition(".")[0] for s in weight.weight.sources}
                else:
                    others.append(weight.key)
            advance()
    if others:
        raise InputError(
            f"{trained.checkpoint}: {len(others)} other weights than adapters and projectors were "
            f"trained, such as {others[0]}, and an adapter folder lacks them; leave --adapter out"
        )
    return modules
