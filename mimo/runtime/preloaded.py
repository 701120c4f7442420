"""What the fork server imports: the modules that ranks need, with a check of CUDA after each.

A process that has initialised CUDA must not fork: its children could not use the device.
"""

import atexit
import gc
import os
import signal
import sys
from importlib import import_module

from mimo.runtime.signals import STOP_SIGNALS

MODULES = "MIMO_PRELOAD"  # the environment variable with their names

initialised_cuda: str | None = None
"""The module whose import initialised CUDA; the ones after it were not imported."""

if MODULES in os.environ:  # this is the fork server, and such signals may go to the whole job
    for _signum in STOP_SIGNALS:
        signal.signal(_signum, signal.SIG_IGN)
_names = os.environ.pop(MODULES, "").split()  # ranks and what they start must not inherit it
for _name in _names:
    try:
        import_module(_name)
    except ImportError:  # the ranks will see it, and say so
        continue
    _torch = sys.modules.get("torch")
    if _torch is not None and _torch.cuda.is_initialized():
        initialised_cuda = _name
        break

if _names:
    # Modules that were kept from being imported here: ranks may import them.
    for _name in [name for name, module in sys.modules.items() if module is None]:
        del sys.modules[_name]
    # What was imported stays: no collection of a rank looks through it, and copies its pages.
    gc.freeze()
    atexit.register(gc.unfreeze)  # libraries report what is left over
