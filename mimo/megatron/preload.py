"""What a forkserver imports once so that ranks start in a tenth of a second.

Importing the engine costs about ten seconds; forked ranks inherit it. Only imports happen here:
a tensor operation before the fork would start thread pools that do not survive it.
"""

import logging
import warnings

import torch

# Says on every machine without a GPU that there is none.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

with warnings.catch_warnings():
    # Megatron warns about each optional package that is missing; what we use instead is logged.
    warnings.simplefilter("ignore")
    import megatron.core.dist_checkpointing
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel.schedules  # noqa: F401

torch.set_num_threads(1)
