"""The fast kernels of a machine, and the choice of them for layers and their attention.

Every choice is a pure function of the request, the dtype and a `Machine`, so all are tested without
a GPU; only `this_machine` looks at the hardware. Light to import, because recipes are checked with
it before an engine is imported. No layer is fused in fp32 or fp64, or on a CPU.
"""

import functools
import importlib
import inspect
import logging
from dataclasses import dataclass, replace
from typing import Any

import torch

from mimo.device import gpu_capability
from mimo.errors import InputError

logger = logging.getLogger(__name__)

TRANSFORMER_ENGINE = "transformer_engine"
SDPA = "sdpa"
FLA = "flash_linear_attention"

LOADS, NOT_INSTALLED = "loads", "is not installed"

# By kernel: a module, a function and perhaps a parameter that older versions lack. The package's
# name is not enough: another flash-attn installs the same one without this function.
_FUNCTIONS = {
    TRANSFORMER_ENGINE: ("transformer_engine.pytorch", "DotProductAttention"),
    "flash_attn_3": ("flash_attn_interface", "flash_attn_varlen_func"),
    "flash_attn_2": ("flash_attn", "flash_attn_varlen_func"),
    "torch_varlen": ("torch.nn.attention.varlen", "varlen_attn", "enable_gqa"),
    # Version 0.5.2 has it; older ones may refuse fewer key heads than value heads.
    FLA: ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule", "state_v_first"),
}


@dataclass(frozen=True)
class Machine:
    """The GPU and the kernels of a machine.

    capability: compute capability, such as (9, 0); None without a GPU. installed: kernels by name.
    """

    capability: tuple[int, int] | None
    installed: frozenset[str] = frozenset()


def has_function(module: str, name: str, parameter: str | None = None) -> bool:
    """Return whether ``module`` is installed with a function ``name`` that takes ``parameter``.

    Raises InputError if it is installed but cannot be imported: slower kernels would hide that.
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
    """Import all kernels; return `LOADS`, `NOT_INSTALLED`, or why it does not load, for each."""
    states = {}
    for kernel, function in _FUNCTIONS.items():
        try:
            states[kernel] = LOADS if has_function(*function) else NOT_INSTALLED
        except InputError as error:
            states[kernel] = str(error)
    return states


@functools.cache
def this_machine() -> Machine:
    """Return this process's machine. On a GPU it imports the packages, so only ranks call it.

    Raises InputError for a package that is installed but cannot be imported.
    """
    capability = gpu_capability()
    if capability is None:
        return Machine(None)
    installed = {name for name, function in _FUNCTIONS.items() if has_function(*function)}
    return Machine(capability, frozenset(installed))


@dataclass(frozen=True)
class LayerChoice:
    """The implementation of a layer's parts.

    transformer_engine: for linears and norms; the linears add weight gradients to DDP's sums.
    fused_activation: Megatron's compiled gated activations.
    """

    transformer_engine: bool
    fused_activation: bool


def choose_layers(machine: Machine, dtype: torch.dtype) -> LayerChoice:
    """Return the best layers for a dtype on a machine."""
    fuses = machine.capability is not None and dtype in (torch.bfloat16, torch.float16)
    return LayerChoice(fuses and TRANSFORMER_ENGINE in machine.installed, fuses)


@functools.cache
def layer_choice(dtype: torch.dtype) -> LayerChoice:
    """Return the choice for this machine, and log it the first time."""
    choice = choose_layers(this_machine(), dtype)
    logger.info("layers in %s: %s; %s", dtype, choice, this_machine())
    return choice


_BEST_FIRST = (TRANSFORMER_ENGINE, "flash_attn_3", "flash_attn_2", "torch_varlen")
_LARGEST_HEAD = 256
_HOPPER = 9


@dataclass(frozen=True)
class AttentionCase:
    """The demands of a layer on its core attention, over segments laid end to end.

    causal: False if all tokens of a segment see each other. cp_size: ranks that share each segment.
    window: keys that a query sees, its own included; None for all.
    whole_items: whether tokens of an item may see each other in both directions.
    """

    head_size: int
    causal: bool
    cp_size: int = 1
    window: int | None = None
    whole_items: bool = False


@dataclass(frozen=True)
class KernelChoice:
    """kernel: its name in `attention_kernels.KERNELS`, or `TRANSFORMER_ENGINE`.

    dense_mask: whether it needs a mask of queries times keys, with work and memory for pairs that
    do not see each other. reason: why no better kernel was chosen.
    """

    kernel: str
    dense_mask: bool
    reason: str


def choose_kernel(case: AttentionCase, dtype: torch.dtype, machine: Machine) -> KernelChoice:
    """Return the best kernel for a layer.

    SDPA runs everywhere, but needs masks for windows and for causal blocks with more keys than
    queries, as on context-parallel ranks and in text beside items.
    """
    plain = case.cp_size == 1 and case.window is None and not case.whole_items
    needs_mask = case.causal and not plain
    if machine.capability is None:
        return KernelChoice(SDPA, needs_mask, "no GPU")
    refusals = []
    for kernel in _BEST_FIRST:
        reason = "not installed"
        if kernel in machine.installed:
            reason = _refusal(kernel, case, dtype, machine.capability)
        if reason is None:
            return KernelChoice(kernel, False, "; ".join(refusals) or "first choice")
        refusals.append(f"{kernel}: {reason}")
    return KernelChoice(SDPA, needs_mask, "; ".join(refusals))


def _refusal(
    kernel: str, case: AttentionCase, dtype: torch.dtype, capability: tuple[int, int]
) -> str | None:
    """Return why a kernel cannot take a case on such a GPU; None if it can."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes 16-bit inputs, not {dtype}"
    if capability < (8, 0):
        return f"needs compute capability 8.0, not {capability[0]}.{capability[1]}"
    if case.head_size > _LARGEST_HEAD or case.head_size % 8:
        return f"takes heads of 8, 16, ... {_LARGEST_HEAD}, not {case.head_size}"
    if kernel == "flash_attn_3" and capability[0] != _HOPPER:
        return "runs on capability 9 (Hopper) only"
    if kernel == TRANSFORMER_ENGINE and case.whole_items:
        return "cannot let the tokens of an item see each other"
    if kernel == TRANSFORMER_ENGINE and case.window is not None and case.cp_size > 1:
        # Its other forms of context parallelism refuse packed sequences or few heads.
        return "its ring exchange of keys refuses sliding windows"
    return None


@functools.cache
def best_kernel(case: AttentionCase, dtype: torch.dtype, machine: Machine) -> str:
    """Return the best of `attention_kernels.KERNELS` for a layer, and log it the first time."""
    choice = choose_kernel(
        case, dtype, replace(machine, installed=machine.installed - {TRANSFORMER_ENGINE})
    )
    logger.info("core attention, %s: %s", case, choice)
    if machine.capability is not None and choice.dense_mask:
        logger.warning(
            "core attention, %s: no kernel here takes it without dense masks, which is slow (%s); "
            "train in bf16 and install flash-attn",
            case,
            choice.reason,
        )
    return choice.kernel


def choose_delta_rule(head_size: int, dtype: torch.dtype, machine: Machine) -> KernelChoice:
    """Return the kernel of the gated delta rule for keys of a size: `FLA`, or "torch"."""
    reason = "not installed"
    if machine.capability is None:
        reason = "no GPU"
    elif FLA in machine.installed:
        case = AttentionCase(head_size, causal=True)
        reason = _refusal(FLA, case, dtype, machine.capability)
    if reason is None:
        return KernelChoice(FLA, False, "first choice")
    return KernelChoice("torch", False, f"{FLA}: {reason}")


@functools.cache
def delta_rule_kernel(head_size: int, dtype: torch.dtype) -> str:
    """Return the choice for this machine, and log it the first time."""
    choice = choose_delta_rule(head_size, dtype, this_machine())
    logger.info("gated delta rule, keys of %s in %s: %s", head_size, dtype, choice)
    return choice.kernel


@dataclass(frozen=True)
class FP8:
    """A recipe of Transformer Engine for linears in 8 bits.

    megatron: Megatron's name of it. format: number format; "hybrid" has wider exponents in
    gradients. multiple: divides the tokens on a rank and the sizes of a linear. lowest, below:
    bounds of the compute capability.
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
"""By the value of ``train.fp8``."""


def fp8_multiple(fp8: str) -> int:
    """Return what must divide the tokens on a rank, and the sizes of a linear on it."""
    return 1 if fp8 == "none" else FP8_RECIPES[fp8].multiple


def fp8_flags(fp8: str) -> dict[str, Any]:
    """Return Megatron's flags for ``train.fp8``."""
    if fp8 == "none":
        return {}
    return {"fp8": FP8_RECIPES[fp8].format, "fp8_recipe": FP8_RECIPES[fp8].megatron}


def fp8_problem(fp8: str, machine: Machine) -> str | None:
    """Return why a machine cannot do ``train.fp8``, and what to do; None if it can."""
    if fp8 == "none":
        return None
    wanted = FP8_RECIPES[fp8]
    if machine.capability is None:
        return f"got {fp8}, which needs a GPU, but this machine has none; set it to none"
    if TRANSFORMER_ENGINE not in machine.installed:
        return (
            f"got {fp8}, which needs Transformer Engine, but it is not installed; install "
            f"transformer-engine[pytorch], or set it to none"
        )
    possible = [
        name
        for name, recipe in FP8_RECIPES.items()
        if recipe.lowest <= machine.capability < recipe.below
    ]
    if fp8 not in possible:
        capability = ".".join(map(str, machine.capability))
        return (
            f"got {fp8}, which needs {wanted.devices}, but this GPU has compute capability "
            f"{capability}; set it to {' or '.join([*possible, 'none'])}"
        )
    return None


if __name__ == "__main__":
    for kernel, state in kernel_states().items():
        print(f"{kernel} {state}")
