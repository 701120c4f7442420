"""Language models of transformers on tensor-parallel and data-parallel ranks: losses, gradients."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import mimo.engines.fsdp.language as language
from mimo.engines.fsdp.context import DP_REPLICATE, DP_SHARD, TP, FsdpContext
from mimo.engines.fsdp.language import LanguageModel
from mimo.engines.fsdp.models import Segments, attend, model_problems
from mimo.engines.fsdp.plans import PLANS, tp_problems
from mimo.ops.attention_plan import LayerForm
from mimo.ops.segments import PackedSegments
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo.engines.fsdp.language_cases import (
    LAYOUTS,
    build,
    config_of,
    error,
    errors,
    gradients,
    inputs_of,
    lane_of,
    plain_model,
    plain_outcome,
    run_lane,
)

NAMES = ("qwen3_vl", "qwen2_5_vl", "gemma3", "llama")
EXACT = 1e-5
WRONG = 1e-3
ALONE = FsdpContext(None, torch.float32)


@functools.cache
def mesh_of(dp: int, tp: int) -> DeviceMesh:
    """One of each in a process: DTensor remembers it by its ranks, and it must not be collected."""
    return init_device_mesh("cpu", (1, dp, tp), mesh_dim_names=(DP_REPLICATE, DP_SHARD, TP))


def context(dp: int, tp: int, **changes: Any) -> FsdpContext:
    return FsdpContext(mesh_of(dp, tp), torch.float32, **changes)


class Case:
    """A model on all ranks, after its gradients from all lanes, next to the plain module."""

    def __init__(self, name: str, ctx: FsdpContext, dp: int = 1, **changes: Any) -> None:
        config = config_of(name, **changes)
        self.lanes = [lane_of(name, number) for number in range(len(LAYOUTS))]
        self.lanes = self.lanes[: len(self.lanes) // dp * dp]
        self.want = plain_outcome(name, config, self.lanes)
        self.model = build(config, ctx, sharded=dp > 1)
        first = 0 if ctx.mesh is None or dp == 1 else ctx.mesh[DP_SHARD].get_local_rank()
        self.numbers = range(first, len(self.lanes), dp)
        self.results = {number: run_lane(self.model, self.lanes[number]) for number in self.numbers}

    def wrong(self) -> dict[str, float]:
        """The errors of what is not exact."""
        found = errors(gradients(self.model), self.want.gradients)
        for number, (losses, rows) in self.results.items():
            found[f"losses of lane {number}"] = error(losses, self.want.losses[number])
            found[f"rows of lane {number}"] = error(rows, self.want.rows[number])
        return {key: value for key, value in found.items() if not value <= EXACT}

    def whole(self) -> dict[str, tuple[float, bool]]:
        """By parameter that is not cut: the error of this rank's gradient, and whether it is marked
        as a share, to be summed over tp.
        """
        wrong = {}
        for name, param in self.model.named_parameters():
            gradient, want = param.grad, self.want.gradients[self.model.hf_names[name]]
            assert gradient is not None
            placements = gradient.placements if isinstance(gradient, DTensor) else (Replicate(),)
            if not isinstance(placements[0], Shard):
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                wrong[name] = error(local, want), placements[0].is_partial()
        return wrong


# ------------------------------------------------------------------ one rank


@pytest.mark.parametrize("name", [*NAMES, "mistral"])
def test_without_a_mesh_it_is_the_plain_module_with_masks_of_segments(name: str) -> None:
    assert Case(name, ALONE).wrong() == {}


def test_without_a_mesh_it_computes_in_bf16_with_frequencies_in_fp32() -> None:
    config, lane = config_of("gemma3"), lane_of("gemma3", 0)
    model = build(config, FsdpContext(None, torch.bfloat16))
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in model.buffers()} == {torch.float32}
    want = plain_outcome("gemma3", config, [lane]).losses[0]
    assert error(run_lane(model, lane)[0], want) < 0.1


def test_it_is_built_on_meta_with_buffers_and_names_of_the_plain_module() -> None:
    config = config_of("gemma3")
    before = config.to_dict()
    model = LanguageModel(config, ALONE)
    assert config.to_dict() == before
    assert all(weight.is_meta for weight in model.parameters())
    plain = plain_model(config)
    expected = dict(plain.model.language_model.named_buffers())
    buffers = {name.removeprefix("text."): buffer for name, buffer in model.named_buffers()}
    assert len(buffers) == len(expected) > 3
    assert all(torch.equal(buffers[name], buffer) for name, buffer in expected.items())
    names = {name for name, _ in plain.named_parameters() if "language_model" in name}
    assert set(model.hf_names.values()) == names, "the head is tied"
    assert set(model.hf_names) == {name for name, _ in model.named_parameters()}
    assert model.units == list(model.text.layers)


def test_problems_name_what_there_is() -> None:
    from transformers import MistralConfig

    def problems(config: Any, tp: int) -> list[str]:
        return [*tp_problems(config, tp), *model_problems(config)]

    assert problems(config_of("qwen3_vl"), 2) == []
    (found,) = problems(config_of("qwen3_vl"), 4)
    assert "got 4, which does not divide num_key_value_heads = 2" in found
    (found,) = problems(config_of("llama", vocab_size=97), 2)
    assert "vocab_size = 97" in found
    assert problems(MistralConfig(vocab_size=96), 1) == []
    (found,) = problems(MistralConfig(vocab_size=96), 2)
    assert "'mistral'" in found
    assert all(name in found for name in PLANS)
    kinds = ["full_attention", "chunked_attention", "full_attention"]
    (found,) = problems(config_of("llama", layer_types=kinds), 1)
    assert "layers of chunked_attention" in found
    (found,) = problems(config_of("gemma3", attn_logit_softcapping=30.0), 1)
    assert "attn_logit_softcapping = 30.0" in found


def test_kernels_refuse_a_soft_cap_by_name() -> None:
    q = torch.zeros(1, 2, 4, 8)
    segments = Segments((), recompute=False)
    with pytest.raises(ValueError, match=r"a soft cap on attention scores \(30"):
        attend(nn.Module(), q, q, q, None, segments=segments, softcap=30.0)


# ------------------------------------------------------------------ tensor-parallel ranks


def exact_on_two_ranks(rank: int) -> None:
    for name in NAMES:
        for sequence_parallel in (False, True):
            case = Case(name, context(1, 2, sequence_parallel=sequence_parallel))
            assert case.wrong() == {}, (name, sequence_parallel)
            shares = {key for key, (_, is_share) in case.whole().items() if is_share}
            wrong = {key for key, (difference, _) in case.whole().items() if difference > EXACT}
            assert wrong == shares, (name, sequence_parallel)
            norms = [key for key in shares if key.endswith("q_norm.weight")]
            assert len(norms) == (3 if name in ("qwen3_vl", "gemma3") else 0)
    other_ways(case := Case("qwen3_vl", context(1, 2, sequence_parallel=True)))
    faults(case)
    # Without a table, so with dp alone; its layers all have windows, which no list says.
    for name, tied in {"mistral": False, "qwen3_vl": True}.items():
        case = Case(name, context(2, 1), dp=2, tie_word_embeddings=tied)
        assert case.wrong() == {}, name


@pytest.mark.slow
def test_two_ranks_give_the_plain_losses_and_gradients(run_ranks: RunRanks) -> None:
    run_ranks(exact_on_two_ranks, 2)


def other_ways(case: Case) -> None:
    """Logits, losses of all tokens, whole embeddings, frozen weights: with SP."""
    model, lane = case.model, case.lanes[0]
    losses = case.want.losses[0]
    with torch.no_grad():
        inputs = inputs_of(model, lane)[2] | {"loss_at": None, "labels": None}
        everywhere = torch.zeros(1, len(lane.ids), dtype=torch.int64)
        everywhere[0, lane.at] = lane.labels
        assert error(model(**inputs | {"labels": everywhere})[0, lane.at], losses) < EXACT
        for logits in (model(**inputs)[:, lane.at], model(**inputs, logits_at=lane.at)):
            assert logits.shape == (1, len(lane.at), 96)
            computed = nn.functional.cross_entropy(logits[0], lane.labels, reduction="none")
            assert error(computed, losses) < EXACT
    model.requires_grad_(False)
    _, rows = run_lane(model, lane)
    assert error(rows, case.want.rows[0]) < EXACT
    model.requires_grad_(True)
    ctx = context(1, 2, sequence_parallel=True, scatter_embedding=False)
    config = config_of("qwen2_5_vl")
    want = plain_outcome("qwen2_5_vl", config, [lane_of("qwen2_5_vl", 1)])
    whole = build(config, ctx)
    losses, rows = run_lane(whole, lane_of("qwen2_5_vl", 1), place=partial(cut_after, whole))
    assert error(losses, want.losses[0]) < EXACT
    assert error(rows, want.rows[0]) < EXACT
    wrong = errors(gradients(whole), want.gradients)
    assert max(wrong.values()) < EXACT, wrong


def cut_after(model: LanguageModel, place: Any) -> Any:
    """Put rows into whole sequences and then cut them."""
    assert model.border is not None
    tp = model.border.tp

    def cut(text: Tensor, queries: Any) -> Tensor:
        whole = DTensor.from_local(place(text, queries), tp, [Replicate()], run_check=False)
        return whole.redistribute(placements=[Shard(0)]).to_local()

    return cut


def faults(case: Case) -> None:
    """Each is seen by the comparison that is exact without it."""
    model, lane, want = case.model, case.lanes[0], case.want.losses[0]

    def of_the_shard(positions: Tensor) -> Tensor:
        return torch.arange(positions.shape[-1] // 2).repeat(3, 1, 2)

    assert error(run_lane(model, lane, position_ids=of_the_shard)[0], want) > WRONG

    def local_only(hidden: Tensor, weight: Tensor, labels: Tensor, *_: Any) -> Tensor:
        logits = hidden @ weight.T
        return nn.functional.cross_entropy(logits, labels % len(weight), reduction="none")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language, "linear_cross_entropy", local_only)
        assert error(run_lane(model, lane)[0], want) > WRONG
    gemma = Case("gemma3", context(1, 2))
    gemma.model.zero_grad()
    gemma.model.text.embed_tokens.padding_idx = 2  # as if it were every rank's
    for own_lane in gemma.lanes:
        run_lane(gemma.model, own_lane)
    assert set(gemma.wrong()) == {"model.language_model.embed_tokens.weight"}


# ------------------------------------------------------------------ with FSDP2


def exact_on_four_ranks(rank: int) -> None:
    ways = {"qwen3_vl": "full", "gemma3": "selective", "llama": "none"}
    for name, recompute in ways.items():
        ctx = context(2, 2, sequence_parallel=True, recompute=recompute)
        case = Case(name, ctx, dp=2)
        assert case.wrong() == {}, name
        times = {"full": (2, 2), "selective": (1, 2), "none": (1, 1)}[recompute]
        assert computed(case) == times, recompute
    bf16_keeps_plans()


def computed(case: Case) -> tuple[int, int]:
    """Count a step's computations of a layer's MLP, and of its core attention."""
    mlp, attention = [], []
    attend = LayerForm.attend
    hook = cast("Any", case.model.units[0]).mlp.register_forward_pre_hook(lambda *_: mlp.append(1))

    def counted(form: LayerForm, *args: Any) -> Tensor:
        attention.append(1)
        return attend(form, *args)

    with pytest.MonkeyPatch.context() as patch, hook:
        patch.setattr(LayerForm, "attend", counted)
        run_lane(case.model, case.lanes[case.numbers[0]])
    return len(mlp), len(attention) // len(case.model.units)


def bf16_keeps_plans() -> None:
    """FSDP2 casts what modules are called with; plans made ahead have to survive it."""
    ctx = FsdpContext(mesh_of(2, 2), torch.bfloat16, sequence_parallel=True)
    model = build(config_of("gemma3"), ctx, sharded=True)
    lane = lane_of("gemma3", dist.get_rank() // 2)
    segments = lane.segments
    forms = model.attention_forms()
    segments.prepare(forms)
    made = dict(segments.plans)
    losses, _ = run_lane(model, lane, packed_seq_params=lambda _: segments)
    assert forms == set(segments.plans)
    assert len(forms) == 2
    assert all(segments.plans[form] is plan for form, plan in made.items())
    want = plain_outcome("gemma3", config_of("gemma3"), [lane]).losses[0]
    assert error(losses, want) < 0.1
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())


@pytest.mark.slow  # `test_module_language.py` has a step on such ranks
def test_with_fsdp2_data_tensor_and_sequence_parallel_ranks_are_exact(run_ranks: RunRanks) -> None:
    run_ranks(exact_on_four_ranks, 4)


# ------------------------------------------------------------------ in bf16

TIMES_PLAIN = 2


def near_the_plain_module_in_bf16(_: int, name: str) -> None:
    """On one rank: errors against fp32 are like those of the plain module in bf16.

    On a CPU those are up to 0.05 of a gradient's largest element for llama, and 0.11 for gemma3.
    """
    from mimo.device import local_device

    device = local_device()
    axes = (DP_REPLICATE, DP_SHARD, TP)
    ctx = FsdpContext(init_device_mesh(device.type, (1, 1, 1), mesh_dim_names=axes), torch.bfloat16)
    config, lane = config_of(name), lane_of("llama", 0)  # of text alone
    model = build(config, ctx, str(device), sharded=True)
    exact, rounded = (
        plain_outcome("llama", config, [lane], dtype) for dtype in (torch.float32, torch.bfloat16)
    )
    inputs = inputs_of(model, lane)[2]
    inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    inputs["packed_seq_params"] = PackedSegments.from_lengths(lane.lengths, device)
    losses = model(**inputs)
    (losses * lane.factors.to(device)).sum().backward()
    allowed = TIMES_PLAIN * error(rounded.losses[0], exact.losses[0])
    assert error(losses.detach().cpu(), exact.losses[0]) < allowed
    allowed = TIMES_PLAIN * max(errors(rounded.gradients, exact.gradients).values())
    ours = {name: gradient.cpu() for name, gradient in gradients(model).items()}
    assert max(errors(ours, exact.gradients).values()) < allowed


@pytest.mark.parametrize("name", quick(["llama", "gemma3"], "gemma3"))
def test_in_bf16_losses_and_gradients_are_near_those_of_the_plain_module(
    run_ranks: RunRanks, name: str
) -> None:
    run_ranks(near_the_plain_module_in_bf16, 1, name)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_on_a_gpu_losses_and_gradients_in_bf16_are_near_those_of_the_plain_module(
    run_ranks_on_gpu: RunRanks, name: str
) -> None:
    run_ranks_on_gpu(near_the_plain_module_in_bf16, 1, name)
