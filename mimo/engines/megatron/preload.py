"""What a forkserver imports once so that ranks start in a tenth of a second.

Importing the engine costs about ten seconds; forked ranks inherit it. Only imports happen here:
a tensor operation before the fork would start thread pools that do not survive it.
"""

import megatron.core.distributed
import megatron.core.models.gpt
import megatron.core.optimizer
import megatron.core.pipeline_parallel.schedules  # noqa: F401
import torch

torch.set_num_threads(1)
