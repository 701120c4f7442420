"""Any causal language model of transformers, for text alone and `engine: fsdp` only.

The settings hold its whole configuration. Tensors of a decoder with pre-norms, as Llama's, have our
names, so that adapters fit; others keep the names of transformers.
"""

import functools
import json
from typing import Any, ClassVar

from pydantic import Field

from mimo.families.contracts import ItemRules, LanguageSettings
from mimo.families.hf_config import Config
from mimo.families.keymap import Weight, plain
from mimo.families.languages._decoder import PRE_NORMS, QK_NORMS, decoder_weights, named_sizes
from mimo.families.whole_models import transformers_config_of

_SIZES = {
    "num_hidden_layers": "num_layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "ffn_hidden_size",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "head_size",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tie_word_embeddings",
}
"""Our setting by the configuration's key."""
_BY_LAYER = ("layer_types", "mlp_layer_types")
_NOT_THE_MODEL = ("architectures", "dtype", "text_config", "transformers_version", "_name_or_path")


class Settings(LanguageSettings):
    """Recipe keys under ``language.model``. Sizes are numbers of elements."""

    item_rules: ClassVar = ItemRules(positions="plain", bidirectional=False)
    engines: ClassVar = ("fsdp",)

    config: dict[str, Any] = Field(default={"model_type": "llama"}, max_length=500)
    """The configuration of transformers, without the sizes."""

    def configuration(self) -> dict[str, Any]:
        """Return transformers' configuration of the model with these sizes."""
        sizes = {key: getattr(self, ours) for key, ours in _SIZES.items()}
        # Where kinds of layers are listed, transformers wants one for each layer.
        kinds = {
            key: self.config[key][: self.num_layers]
            for key in _BY_LAYER
            if isinstance(self.config.get(key), list)
        }
        return self.config | kinds | sizes


def settings_from_hf(config: Config) -> dict[str, Any]:
    """Return recipe keys for a text-only model. Raises ValueError for what cannot run."""
    from transformers import PreTrainedConfig  # late: it takes seconds to import

    from mimo.engines.fsdp.models import structure_problems

    text, usual = config["text_config"], PreTrainedConfig().to_dict()
    stored = {ours: text[key] for key, ours in _SIZES.items() if text.get(key) is not None}
    sizes = stored | named_sizes(config)
    configuration = {"model_type": text["model_type"]} | {
        key: value
        for key, value in text.items()
        if key not in {*_SIZES, *_NOT_THE_MODEL} and (key not in usual or usual[key] != value)
    }
    whole = _on_meta(json.dumps(Settings(**sizes, config=configuration).configuration()))
    if problems := list(structure_problems(whole)):
        raise ValueError(f"model_type is {text['model_type']!r}: {'; '.join(problems)}")
    return {**sizes, "config": configuration}


def weights_in_hf(settings: Settings) -> list[Weight]:
    """Return every parameter of the whole model, under our name or else that of transformers."""
    assert settings.vocab_size is not None, "settings from a checkpoint say how many it knows"
    whole = _on_meta(json.dumps(settings.configuration()))
    shapes = {name: tuple(param.shape) for name, param in whole.named_parameters()}
    for norms in (PRE_NORMS, PRE_NORMS | QK_NORMS):
        for bias in (False, True):
            weights = decoder_weights(settings, norms, qkv_bias=bias)
            sources = {source for weight in weights for source in weight.sources}
            # Families have the names of a model with a tower.
            theirs = {source.key.replace("language_model.", ""): source.shape for source in sources}
            if theirs == shapes:
                return weights
    return [plain(name, name, *shape) for name, shape in shapes.items()]


@functools.lru_cache(maxsize=8)
def _on_meta(configuration: str) -> Any:
    import torch

    from mimo.engines.fsdp.models import on_meta

    return on_meta(transformers_config_of(json.loads(configuration)), "sdpa", torch.float32)
