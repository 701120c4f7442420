"""Language models of the Qwen3 kind with experts, as in Qwen3-VL-30B-A3B and Qwen3-30B-A3B."""

from functools import partial
from typing import Any

from mimo.families.hf_config import Config
from mimo.families.languages import qwen3
from mimo.families.languages._decoder import PRE_NORMS, QK_NORMS, decoder_weights
from mimo.families.languages._decoder import build as build
from mimo.families.languages._experts import ExpertSettings, expert_sizes, expert_weights


class Settings(ExpertSettings, qwen3.Settings):
    """Recipe keys under ``language.model``. Sizes are numbers of elements."""


def settings_from_hf(config: Config) -> dict[str, Any]:
    """Return settings by key. Raises ValueError, naming the key, for what we do not compute."""
    return qwen3.settings_from_hf(config) | expert_sizes(config)


weights_in_hf = partial(decoder_weights, norms=PRE_NORMS | QK_NORMS, mlp=expert_weights)
