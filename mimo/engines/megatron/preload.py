"""Imports of the engine for a fork server, so that ranks start in a tenth of a second.

Importing Megatron takes about ten seconds; forked ranks inherit it. This file only imports: a
tensor operation before the fork would start thread pools that do not survive it.

Megatron imports Transformer Engine, which reads the device's capability. That initialises CUDA, and
forked ranks could not use it. So where both may be present, each rank imports Megatron itself.
"""

import os
import sys
from importlib.util import find_spec

import torch

torch.set_num_threads(1)

if find_spec("transformer_engine") is not None and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    sys.modules["megatron"] = None  # type: ignore[assignment]  # its import fails from here on
else:
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel.schedules  # noqa: F401
