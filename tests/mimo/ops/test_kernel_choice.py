"""Each kind of layer gets the best kernel of a machine, and none of a GPU needs a dense mask."""

from __future__ import annotations

import importlib
import logging
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from mimo.errors import InputError
from mimo.ops import acceleration
from mimo.ops.acceleration import (
    AttentionCase,
    Machine,
    best_kernel,
    choose_kernel,
    has_function,
)

CASES = {
    "packed causal": AttentionCase(128, causal=True),
    "context parallel": AttentionCase(128, causal=True, cp_size=2),
    "sliding window": AttentionCase(256, causal=True, window=1024),
    "sliding window, context parallel": AttentionCase(256, causal=True, cp_size=2, window=1024),
    "items": AttentionCase(256, causal=True, whole_items=True),
    "items, sliding window": AttentionCase(256, causal=True, window=1024, whole_items=True),
    "items, sliding window, context parallel": AttentionCase(
        256, causal=True, cp_size=4, window=1024, whole_items=True
    ),
    "ViT, whole images": AttentionCase(72, causal=False),
    "ViT windows": AttentionCase(80, causal=False),
}
TE, FA3, FA2, TORCH = "transformer_engine", "flash_attn_3", "flash_attn_2", "torch_varlen"
HOPPER, AMPERE, TURING = (9, 0), (8, 0), (7, 5)
MACHINES = {
    "Transformer Engine": Machine(HOPPER, frozenset({TE, TORCH})),
    "Transformer Engine and flash-attn 2": Machine(AMPERE, frozenset({TE, FA2, TORCH})),
    "flash-attn 3": Machine(HOPPER, frozenset({FA3, FA2, TORCH})),
    "flash-attn 3 on another GPU": Machine((10, 0), frozenset({FA3, TORCH})),
    "flash-attn 2": Machine(AMPERE, frozenset({FA2, TORCH})),
    "torch only": Machine(HOPPER, frozenset({TORCH})),
}
# What Transformer Engine cannot do.
BESIDE_TE = {
    "sliding window, context parallel",
    "items",
    "items, sliding window",
    "items, sliding window, context parallel",
}
EXPECTED = {
    "Transformer Engine": {case: TORCH if case in BESIDE_TE else TE for case in CASES},
    "Transformer Engine and flash-attn 2": {c: FA2 if c in BESIDE_TE else TE for c in CASES},
    "flash-attn 3": dict.fromkeys(CASES, FA3),
    "flash-attn 3 on another GPU": dict.fromkeys(CASES, TORCH),
    "flash-attn 2": dict.fromkeys(CASES, FA2),
    "torch only": dict.fromkeys(CASES, TORCH),
}
MASKED_WITHOUT_A_KERNEL = BESIDE_TE | {"context parallel", "sliding window"}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu_every_layer_gets_the_best_kernel_and_no_dense_mask(
    case: str, machine: str
) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        choice = choose_kernel(CASES[case], dtype, MACHINES[machine])
        assert choice.kernel == EXPECTED[machine][case]
        assert not choice.dense_mask


@pytest.mark.parametrize("case", CASES)
def test_without_a_kernel_for_it_a_layer_gets_sdpa_and_the_choice_says_why(case: str) -> None:
    everything = frozenset({TE, FA3, FA2, TORCH})
    for machine, dtype, reason in (
        (Machine(None), torch.bfloat16, "no GPU"),
        (Machine(HOPPER, everything), torch.float32, "16-bit"),
        (Machine(TURING, everything), torch.float16, "capability 8.0"),
        (Machine(HOPPER), torch.bfloat16, "not installed"),
    ):
        choice = choose_kernel(CASES[case], dtype, machine)
        assert choice.kernel == "sdpa"
        assert choice.dense_mask == (case in MASKED_WITHOUT_A_KERNEL)
        assert reason in choice.reason


def test_heads_that_no_kernel_takes_get_sdpa() -> None:
    for head_size in (20, 264):
        choice = choose_kernel(
            AttentionCase(head_size, causal=True), torch.bfloat16, MACHINES["flash-attn 3"]
        )
        assert choice.kernel == "sdpa"
        assert f"not {head_size}" in choice.reason


@pytest.mark.parametrize("case", CASES)
def test_sdpa_builds_masks_where_the_choice_says_so_and_only_there(case: str) -> None:
    from mimo.ops.attention_plan import LayerForm

    layer = CASES[case]
    window = None if layer.window is None else 10
    items = ((3, 14), (20, 9)) if layer.whole_items else ()
    masked = False
    for rank in range(layer.cp_size):
        form = LayerForm("sdpa", layer.causal, window, layer.cp_size, rank)
        plan = form.plan((40, 16, 24), items)
        masked |= any(bucket.masked for call in plan.calls for bucket in call.blocks.buckets)
    assert masked == (case in MASKED_WITHOUT_A_KERNEL)


def test_torch_varlen_is_used_only_if_it_takes_grouped_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def older(query: object, key: object, value: object) -> None: ...

    varlen = "torch.nn.attention.varlen"
    monkeypatch.setattr(acceleration, "gpu_capability", lambda: (9, 0))
    assert TORCH in acceleration.this_machine.__wrapped__().installed
    monkeypatch.setattr(importlib.import_module(varlen), "varlen_attn", older)
    assert TORCH not in acceleration.this_machine.__wrapped__().installed


def test_packages_are_recognised_by_their_function(monkeypatch: pytest.MonkeyPatch) -> None:
    # flash-attn 4 installs a package of this name without the function.
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    assert not has_function("flash_attn", "flash_attn_varlen_func")
    sys.modules["flash_attn"].flash_attn_varlen_func = print  # type: ignore[attr-defined]
    assert has_function("flash_attn", "flash_attn_varlen_func")
    assert not has_function("a_package_that_nobody_has", "varlen")


@pytest.mark.parametrize(
    "statement",
    [
        "raise ImportError('undefined symbol\\nand more')",
        "assert False, 'undefined symbol'",  # as Transformer Engine does
        "raise RuntimeError('undefined symbol')",
        "import undefined_symbol  # undefined symbol",
    ],
)
def test_a_package_built_for_another_torch_is_named_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, statement: str
) -> None:
    (tmp_path / "broken_kernels.py").write_text(statement)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken_kernels", raising=False)
    with pytest.raises(InputError) as raised:
        has_function("broken_kernels", "varlen")
    assert re.fullmatch(
        r"broken_kernels is installed but cannot be imported \(.*undefined.symbol.*\); install a "
        r"version that fits torch .*, as `make gpu` does, or uninstall it",
        str(raised.value),
    )
    monkeypatch.setitem(acceleration._FUNCTIONS, "varlen", ("broken_kernels", "varlen"))
    states = acceleration.kernel_states()
    assert states["varlen"] == str(raised.value)
    assert states["torch_varlen"] == acceleration.LOADS
    assert states["flash_attn_3"] == acceleration.NOT_INSTALLED


# ------------------------------------------------------------------- layers as they are built


@pytest.fixture
def on_machine(monkeypatch: pytest.MonkeyPatch):
    """Builds a layer as on a machine: whether a spec has our class, and how ours attends."""
    from mimo.engines.megatron import attention
    from mimo.engines.megatron.attention import AttnMaskType
    from mimo.engines.megatron.config import TransformerConfig

    best_kernel.cache_clear()

    def build(machine: Machine, window: int | None, **options):
        monkeypatch.setattr(attention, "this_machine", lambda: machine)
        config = TransformerConfig(
            num_layers=1,
            cuda_graph_modules=[],
            hidden_size=64,
            num_attention_heads=1,
            kv_channels=64,
            window_size=None if window is None else (window - 1, 0),
            params_dtype=torch.bfloat16,
        )
        chosen = attention.core_attention(config, causal=True)
        layer = attention.CoreAttention(config, 1, AttnMaskType.causal, "self", **options)
        # Without Transformer Engine Megatron has a mock in place of its class.
        return chosen is attention.CoreAttention, layer.form

    return build


def test_layers_are_built_with_the_chosen_kernel(on_machine) -> None:
    ours, form = on_machine(MACHINES["Transformer Engine and flash-attn 2"], None)
    # Layers with items ask for ours even there, which then takes the next best.
    assert (ours, form.kernel) == (False, "flash_attn_2")
    ours, form = on_machine(MACHINES["flash-attn 3"], 9, whole_items=True)
    assert (ours, form.kernel, form.window) == (True, "flash_attn_3", 9)
    ours, form = on_machine(Machine(None), None)
    assert (ours, form.kernel) == (True, "sdpa")


def test_a_dense_mask_on_a_gpu_is_warned_of_once(
    on_machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        on_machine(Machine(TURING, frozenset({FA2, TORCH})), 9)
    assert [r.levelname for r in caplog.records] == ["INFO", "WARNING"]
    assert "window=9" in caplog.text
    assert "needs compute capability 8.0, not 7.5" in caplog.text
    caplog.clear()
    on_machine(Machine(None), 9)  # a CPU is not expected to be fast
    assert [r.levelname for r in caplog.records] == ["INFO"]
