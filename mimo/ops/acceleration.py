"""What a machine has to make layers fast, and what a module's layers use of it.

Pure but for `this_machine`, and light: recipes are checked with it before anything imports the
engine. Nothing is fused in fp32 or fp64, or on a CPU, where results are checked.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch

from mimo.device import gpu_capability
from mimo.errors import InputError

logger = logging.getLogger(__name__)


TRANSFORMER_ENGINE = "transformer_engine"
WEIGHT_GRADIENT = "weight_gradient"
"""Apex's kernel that adds a weight gradient to a sum in fp32."""

LOADS, NOT_INSTALLED = "loads", "is not installed"

# By kernel, a module, a function of it and, where older versions lack it, a parameter of that. A
# package's name says too little: another flash-attn installs the same one without this function.
_FUNCTIONS = {
    TRANSFORMER_ENGINE: ("transformer_engine.pytorch", "DotProductAttention"),
    "flash_attn_3": ("flash_attn_interface", "flash_attn_varlen_func"),
    "flash_attn_2": ("flash_attn", "flash_attn_varlen_func"),
    "torch_varlen": ("torch.nn.attention.varlen", "varlen_attn", "enable_gqa"),
    WEIGHT_GRADIENT: ("fused_weight_gradient_mlp_cuda", "wgrad_gemm_accum_fp32"),
}


@dataclass(frozen=True)
class Machine:
    """What there is to build layers from.

    capability: of the GPU, such as (9, 0); None without. installed: kernels that are there.
    """

    capability: tuple[int, int] | None
    installed: frozenset[str] = frozenset()


def has_function(module: str, name: str, parameter: str | None = None) -> bool:
    """Whether ``module`` is installed and has a function ``name`` that takes ``parameter``.

    Raises InputError if it is installed but cannot be imported: to go on with slower kernels
    would hide that.
    """
    try:
        function = getattr(importlib.import_module(module), name, None)
        if function is None or parameter is None:
            return function is not None
        return parameter in inspect.signature(function).parameters
    except ModuleNotFoundError as error:
        if error.name is not None and module.startswith(error.name):
            return False
        reason: Exception = error
    except Exception as error:  # wheels of Transformer Engine assert, others raise RuntimeError
        reason = error
    first_line = f"{type(reason).__name__}: {reason}".splitlines()[0]
    package = module.partition(".")[0]
    raise InputError(
        f"{package} is installed but cannot be imported ({first_line}); install a version that "
        f"fits torch {torch.__version__}, as `make gpu` does, or uninstall it"
    )


def kernel_states() -> dict[str, str]:
    """Whether each package of kernels loads in this process: `LOADS`, `NOT_INSTALLED`, or why not.

    It imports them, which may initialise the GPU.
    """
    states = {}
    for kernel, function in _FUNCTIONS.items():
        try:
            states[kernel] = LOADS if has_function(*function) else NOT_INSTALLED
        except InputError as error:
            states[kernel] = str(error)
    return states


@functools.cache
def this_machine() -> Machine:
    """What this process may use. On a GPU it imports the packages, so only ranks call it.

    Raises InputError for a package that is installed but cannot be imported.
    """
    capability = gpu_capability()
    if capability is None:
        return Machine(None)
    found = {name for name, function in _FUNCTIONS.items() if has_function(*function)}
    return Machine(capability, frozenset(found))


@dataclass(frozen=True)
class LayerChoice:
    """transformer_engine: its linears and norms, whose weight gradients are added to the sums of
    DDP as they are made. weight_gradient: Megatron's own linears add theirs so, too.
    fused_activation: Megatron's compiled gated activations.
    """

    transformer_engine: bool
    weight_gradient: bool
    fused_activation: bool
    reason: str


def choose_layers(machine: Machine, dtype: torch.dtype) -> LayerChoice:
    """The best layers for a dtype on a machine."""
    if machine.capability is None:
        return LayerChoice(False, False, False, "no GPU")
    if dtype not in (torch.bfloat16, torch.float16):
        return LayerChoice(False, False, False, f"fused kernels are for 16 bits, not {dtype}")
    te = TRANSFORMER_ENGINE in machine.installed
    reason = f"Transformer Engine is {'' if te else 'not '}installed"
    return LayerChoice(te, WEIGHT_GRADIENT in machine.installed, True, reason)


@functools.cache
def layers_of(dtype: torch.dtype) -> LayerChoice:
    """The choice for this machine, logged once."""
    choice = choose_layers(this_machine(), dtype)
    kind = "Transformer Engine" if choice.transformer_engine else "Megatron"
    logger.info("linears and norms: %s (%s)", kind, choice.reason)
    return choice


_NOT_INSTALLED = "Transformer Engine, but it is not installed; install transformer-engine[pytorch]"


# ---------------------------------------------------------------------------- FP8


@dataclass(frozen=True)
class FP8:
    """A recipe of Transformer Engine for linears in 8 bits.

    megatron: its name there. format: of the numbers; "hybrid" has wider exponents in gradients.
    multiple: of tokens on a rank and of a linear's sizes. lowest, below: compute capabilities.
    """

    megatron: str
    format: str
    multiple: int
    lowest: tuple[int, int]
    below: tuple[int, int]
    devices: str


FP8_RECIPES = {
    "current": FP8("tensorwise", "hybrid", 16, (8, 9), (100, 0), "Ada, Hopper or Blackwell"),
    "block": FP8("blockwise", "e4m3", 128, (9, 0), (10, 0), "Hopper"),
    "mxfp8": FP8("mxfp8", "e4m3", 32, (10, 0), (12, 0), "data-centre Blackwell"),
}
"""By the name that a recipe gives."""


def fp8_multiple(fp8: str) -> int:
    """What the tokens on a rank, and the sizes of a linear on it, must be a multiple of."""
    return 1 if fp8 == "none" else FP8_RECIPES[fp8].multiple


def fp8_flags(fp8: str) -> dict[str, Any]:
    """Megatron's flags for ``train.fp8``."""
    if fp8 == "none":
        return {}
    return {"fp8": FP8_RECIPES[fp8].format, "fp8_recipe": FP8_RECIPES[fp8].megatron}


def fp8_problem(fp8: str, machine: Machine) -> str | None:
    """Why a machine cannot do ``train.fp8``, and what to do; None if it can."""
    if fp8 == "none":
        return None
    wanted = FP8_RECIPES[fp8]
    if machine.capability is None:
        return f"got {fp8}, which needs a GPU, but this machine has none; set it to none"
    if TRANSFORMER_ENGINE not in machine.installed:
        return f"got {fp8}, which needs {_NOT_INSTALLED}, or set it to none"
    work = [n for n, one in FP8_RECIPES.items() if one.lowest <= machine.capability < one.below]
    if fp8 not in work:
        has = ".".join(map(str, machine.capability))
        return (
            f"got {fp8}, which needs {wanted.devices}, but this GPU has compute capability {has}; "
            f"set it to {' or '.join([*work, 'none'])}"
        )
    return None


if __name__ == "__main__":
    for kernel, state in kernel_states().items():
        print(f"{kernel} {state}")
