"""One call of each kernel does what a dense mask says, for every kind of layer and every rank.

flash-attn and PyTorch's variable-length kernel need a GPU. Here a stand-in takes their place that
follows their documentation to the letter, so that what they are given is checked by its result.
"""

from __future__ import annotations

import functools
import inspect
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.mimo.ops.test_item_attention import (
    GROUPS,
    HEADS,
    ITEMS,
    LENGTHS,
    ROUNDING,
    SCALE,
    SIZE,
    dense,
    inputs,
    visible,
)

VARLEN = ("flash_attn_2", "flash_attn_3", "torch_varlen")
NO_ITEMS: tuple[tuple[int, int], ...] = ()


@dataclass
class Recorded:
    """The arguments of a variable-length kernel."""

    bounds: tuple[Tensor, Tensor]
    heads: tuple[int, int]
    window: tuple[int, int]
    causal: bool
    options: dict[str, Any] = field(default_factory=dict)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, of_q: Tensor, of_k: Tensor, window: tuple[int, int]
) -> Tensor:
    """Blocks one by one; the last query stands on the last key, -1 means no limit."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    outputs = []
    for i in range(len(of_q) - 1):
        rows, keys = slice(*of_q[i : i + 2].tolist()), slice(*of_k[i : i + 2].tolist())
        num_queries, num_keys = rows.stop - rows.start, keys.stop - keys.start
        query = torch.arange(num_keys - num_queries, num_keys)[:, None]
        key = torch.arange(num_keys)
        seen = torch.ones(num_queries, num_keys, dtype=torch.bool)
        if window[0] >= 0:
            seen &= key >= query - window[0]
        if window[1] >= 0:
            seen &= key <= query + window[1]
        scores = torch.einsum("qnd,knd->nqk", q[rows], k[keys]) * SCALE
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("nqk,knd->qnd", weights, v[keys]))
    return torch.cat(outputs)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Recorded]:
    """Calls of the kernels, whose functions are stand-ins."""
    found: list[Recorded] = []

    def check(q: Tensor, k: Tensor, of_q: Tensor, of_k: Tensor, most_q: int, most_k: int) -> None:
        for bounds, most, total in ((of_q, most_q, len(q)), (of_k, most_k, len(k))):
            assert bounds.dtype == torch.int32
            assert bounds.diff().max() == most
            assert bounds[-1] == total

    def flash(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        *,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
    ) -> Tensor:
        check(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        assert softmax_scale == SCALE
        heads = q.shape[1], k.shape[1]
        found.append(Recorded((cu_seqlens_q, cu_seqlens_k), heads, window_size, causal))
        # `causal` sets the second number, whatever it was.
        window = (window_size[0], 0) if causal else window_size
        return _attend(q, k, v, cu_seqlens_q, cu_seqlens_k, window)

    from torch.nn.attention import varlen

    signature = inspect.signature(varlen.varlen_attn)

    def torch_varlen(*args: Any, **kwargs: Any) -> Tensor:
        given = signature.bind(*args, **kwargs).arguments  # as the real one would
        q, k, v, of_q, of_k, *most = args
        check(q, k, of_q, of_k, *most)
        assert given["scale"] == SCALE
        assert given["enable_gqa"]
        # cuDNN would make a plan for each new shape, at nearly every microbatch.
        assert torch.backends.cuda.flash_sdp_enabled()
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        window = given["window_size"]
        causal = window == (-1, 0)
        found.append(Recorded((of_q, of_k), (q.shape[1], k.shape[1]), window, causal))
        return _attend(q, k, v, of_q, of_k, window)

    for name in ("flash_attn", "flash_attn_interface"):
        module: Any = ModuleType(name)
        module.flash_attn_varlen_func = flash
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(varlen, "varlen_attn", torch_varlen)
    return found


@functools.cache
def reference(causal: bool, window: int | None, items: tuple[tuple[int, int], ...]) -> list[Tensor]:
    """Output and gradients of queries, keys and values under a dense mask."""
    mask = visible(LENGTHS, items, window)
    if not causal:
        mask = mask | mask.T
    q, k, v, out_gradient = inputs(sum(LENGTHS))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = dense(q, k, v, mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, out_gradient)]


def by_ranks(forms: list[Any], items: tuple[tuple[int, int], ...]) -> list[Tensor]:
    """The same, each rank of a context-parallel group after the other."""
    from mimo.ops.segments import zigzag_indices

    q, k, v, out_gradient = inputs(sum(LENGTHS))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = torch.zeros_like(q)
    for form in forms:
        mine = torch.arange(len(q))
        if form.cp_size > 1:
            mine = zigzag_indices(LENGTHS, form.cp_size, form.cp_rank)
        plan = form.plan(LENGTHS, items)
        out = out.index_copy(0, mine, form.attend(q[mine], k, v, plan, SCALE))
    return [out.detach(), *torch.autograd.grad(out, leaves, out_gradient)]


@pytest.mark.parametrize("kernel", ["sdpa", "flash_attn_2", "torch_varlen"])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize(
    ("causal", "window", "items"),
    [
        (True, None, NO_ITEMS),
        (True, 6, NO_ITEMS),
        (False, None, NO_ITEMS),
        (True, None, ITEMS),
        (True, 6, ITEMS),  # shorter than most items
        (True, 11, ITEMS),  # longer than most
    ],
)
def test_a_kernel_computes_what_a_dense_mask_says(
    calls: list[Recorded], kernel: str, cp: int, causal: bool, window: int | None, items: Any
) -> None:
    from mimo.ops.attention_plan import LayerForm

    forms = [LayerForm(kernel, causal, window, cp, rank) for rank in range(cp)]
    got, expected = by_ranks(forms, items), reference(causal, window, items)
    for name, ours, true in zip(("output", "dq", "dk", "dv"), got, expected, strict=True):
        torch.testing.assert_close(
            ours, true, rtol=0, atol=ROUNDING, msg=lambda text, name=name: f"{name}: {text}"
        )
    if kernel == "sdpa":
        assert not calls
        return
    # One call per layer, and one more for all items together.
    assert len(calls) == cp * (2 if items else 1)
    for call in calls:
        assert call.heads == (HEADS, GROUPS)  # not repeated
        of_q, of_k = call.bounds
        assert (of_q is of_k) == torch.equal(of_q, of_k)
    assert [call.causal for call in calls] == (
        [causal and (window is None or kernel != "torch_varlen"), False][: 2 if items else 1] * cp
    )
    if cp == 1 and not items:
        assert calls[0].bounds[0] is calls[0].bounds[1]  # one copy to the device


@pytest.mark.parametrize("causal", [True, False])
def test_an_unpacked_batch_goes_to_the_same_kernel(calls: list[Recorded], causal: bool) -> None:
    from dataclasses import replace

    from tests.mimo.engines.megatron.test_attention import core_attention

    attention = core_attention(causal, softmax_scale=SCALE)
    q, k, v = (torch.randn(5, 3, n, SIZE) for n in (HEADS, GROUPS, GROUPS))
    expected = attention(q, k, v, None)
    attention.form = replace(attention.form, kernel="flash_attn_3")
    got = attention(q, k, v, None)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    (call,) = calls
    assert call.bounds[0].tolist() == [0, 5, 10, 15]
    assert call.bounds[0] is call.bounds[1]


def test_masks_are_bounded_by_cutting_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    from mimo.ops import attention_kernels
    from mimo.ops.attention_plan import LayerForm

    monkeypatch.setattr(attention_kernels, "LARGEST_MASK", 100)
    for window in (None, 6, 30):
        forms = [LayerForm("sdpa", True, window, 2, rank) for rank in range(2)]
        for form in forms:
            for bucket in form.plan(LENGTHS, ()).calls[0].blocks.buckets:
                batch, longest, most_keys = bucket.size
                assert not bucket.masked or batch * longest * most_keys <= 100 or longest == 1
        for ours, true in zip(by_ranks(forms, ()), reference(True, window, ()), strict=True):
            torch.testing.assert_close(ours, true, rtol=0, atol=ROUNDING)


# --------------------------------------------------------------- what reaches the device, and when


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that has no values to read, and needs no GPU to pin memory for it."""
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    return torch.device("meta")


class Crossings(TorchDispatchMode):
    """Counts what crosses between the host and that device."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = 0
        self.made_on_host = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        if isinstance(result, Tensor):
            if result.is_meta and any(not x.is_meta and x.dim() for x in given):
                self.copies += 1
            if not result.is_meta and not given:
                self.made_on_host += 1
        return result


@pytest.mark.parametrize("kernel", ["sdpa", *VARLEN])
def test_plans_reach_the_device_in_one_copy_and_layers_make_none(
    monkeypatch: pytest.MonkeyPatch, calls: list[Recorded], meta: torch.device, kernel: str
) -> None:
    from mimo.ops.attention_plan import LayerForm
    from mimo.ops.segments import PackedSegments

    for name in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setattr(sys.modules[name], "flash_attn_varlen_func", _nothing)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", _nothing)
    forms = [LayerForm(kernel, True, window, 2, 1) for window in (None, 6)]
    segments = PackedSegments.from_lengths(LENGTHS, meta, items=ITEMS)
    with Crossings() as crossings:
        segments.prepare(forms)
    assert crossings.copies == 1
    q = torch.randn(sum(LENGTHS) // 2, HEADS, SIZE, device=meta, requires_grad=True)
    k, v = (torch.randn(sum(LENGTHS), GROUPS, SIZE, device=meta) for _ in range(2))
    with Crossings() as crossings:
        segments.prepare(forms)
        for form in forms:
            for _ in range(3):  # layers
                out = form.attend(q, k, v, segments.plan(form), SCALE)
                assert out.is_meta
                out.sum().backward()
    assert (crossings.copies, crossings.made_on_host) == (0, 0)
    assert len(segments.plans) == 2


def _nothing(q: Tensor, k: Tensor, v: Tensor, *bounds: Any, **options: Any) -> Tensor:
    return q * 1


def test_a_tensor_of_a_plan_stays_one_tensor_on_the_device(meta: torch.device) -> None:
    from mimo.ops.attention_plan import LayerForm
    from mimo.ops.segments import PackedSegments

    segments = PackedSegments.from_lengths(LENGTHS, meta)
    (call,) = segments.plan(LayerForm("torch_varlen", causal=True)).calls
    assert call.blocks.query_bounds.is_meta
    assert call.blocks.query_bounds is call.blocks.key_bounds


def test_another_copy_may_bring_plans_and_their_values_arrive() -> None:
    from dataclasses import replace

    from mimo.ops.attention_plan import LayerForm
    from mimo.ops.segments import PackedSegments

    copies = []

    def copy(tensor: Tensor) -> Tensor:
        copies.append(tensor.clone())
        return copies[-1]

    form = LayerForm("torch_varlen", True, 6, 2, 1)
    segments = PackedSegments.from_lengths(LENGTHS, torch.device("cpu"), items=ITEMS)
    segments.prepare([form], copy)
    assert len(copies) == 1
    plan, expected = segments.plan(form), form.plan(LENGTHS, ITEMS)
    assert expected.back is not None
    assert expected.lane is not None
    assert torch.equal(plan.back, expected.back)
    assert torch.equal(plan.lane.to_shares, expected.lane.to_shares)
    for call, expected_call in zip(plan.calls, expected.calls, strict=True):
        for name in ("query_bounds", "key_bounds", "rows"):
            sent = getattr(call.blocks, name)
            assert torch.equal(sent, getattr(expected_call.blocks, name))
            assert sent.untyped_storage().data_ptr() == copies[0].untyped_storage().data_ptr()
            assert sent.data_ptr() % 16 == 0
    # What is made of them for another device plans anew.
    assert not replace(segments, max_seqlen_q=1).plans


def test_segments_with_windows_prepare_both() -> None:
    from mimo.ops.attention_plan import LayerForm
    from mimo.ops.segments import PackedSegments

    form = LayerForm("torch_varlen", causal=False)
    segments = PackedSegments.from_lengths((6, 4), torch.device("cpu"))
    segments.windows = PackedSegments.from_lengths((2, 4, 4), torch.device("cpu"))
    segments.prepare([form])
    assert segments.plans[form].calls[0].blocks.query_bounds.tolist() == [0, 6, 10]
    assert segments.windows.plans[form].calls[0].blocks.query_bounds.tolist() == [0, 2, 6, 10]


def test_the_forms_of_a_model_are_those_of_its_layers() -> None:
    from torch import nn

    from mimo.engines.megatron.attention import forms_in
    from mimo.ops.attention_plan import LayerForm
    from tests.mimo.engines.megatron.test_attention import core_attention

    layers = nn.ModuleList([core_attention(True, window) for window in (None, 5, None)])
    windows = [form.window for form in forms_in([layers]) if isinstance(form, LayerForm)]
    assert sorted(windows, key=str) == [5, None]


class Sums(TorchDispatchMode):
    """Collects the dtypes in which rows are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "index_add" in func.name() or "index_put" in func.name():
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dtype", "sums"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64,) * 2],
)
def test_the_gradient_of_a_16_bit_row_asked_for_often_is_added_up_in_fp32(
    dtype: torch.dtype, sums: torch.dtype
) -> None:
    from mimo.ops.segments import gather_rows

    x = torch.zeros(3, 2, dtype=dtype, requires_grad=True)
    out = gather_rows(x, torch.tensor([1] * 3000 + [2]))
    assert out.dtype == dtype
    with Sums() as found:
        out.backward(torch.ones_like(out))
    assert found.dtypes == {sums}
    assert x.grad is not None
    expected = torch.tensor([0.0, 3000.0, 1.0], dtype=dtype)
    assert torch.equal(x.grad, expected[:, None].expand(3, 2))
