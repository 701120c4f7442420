from __future__ import annotations

import functools
from collections.abc import Sequence
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
from tests.conftest import RunRanks
from tests.mimo.engines.fsdp.language_cases import (
    LAYOUTS,
    build,
    config_of,
    error,
    errors,
    gradients,
    lane_of,
    plain_model,
    plain_outcome,
    run_lane,
    shard,
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
        self.model = build(config, ctx)
        self.own: Sequence[int] = range(len(self.lanes))
        if dp > 1:
            shard(self.model)
            assert ctx.mesh is not None
            self.own = range(ctx.mesh[DP_SHARD].get_local_rank(), len(self.lanes), dp)
        self.ran = {number: run_lane(self.model, self.lanes[number]) for number in self.own}

    def wrong(self) -> dict[str, float]:
        """What is not exact."""
        found = errors(gradients(self.model), self.want.gradients)
        for number, (losses, rows) in self.ran.items():
            found[f"losses of lane {number}"] = error(losses, self.want.losses[number])
            found[f"rows of lane {number}"] = error(rows, self.want.rows[number])
        return {key: value for key, value in found.items() if not value <= EXACT}

    def whole(self) -> dict[str, tuple[float, bool]]:
        """Of every parameter that is not cut: the error of this rank's gradient, and whether it is
        known to be a share, to be summed over tp.
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
    assert {own.dtype for own in model.parameters()} == {torch.bfloat16}
    assert {own.dtype for own in model.buffers()} == {torch.float32}
    want = plain_outcome("gemma3", config, [lane]).losses[0]
    assert error(run_lane(model, lane)[0], want) < 0.1


def test_it_is_built_on_meta_with_buffers_and_names_of_the_plain_module() -> None:
    config = config_of("gemma3")
    before = config.to_dict()
    model = LanguageModel(config, ALONE)
    assert config.to_dict() == before
    assert all(own.is_meta for own in model.parameters())
    plain = plain_model(config)
    theirs = dict(plain.model.language_model.named_buffers())
    ours = {name.removeprefix("text."): own for name, own in model.named_buffers()}
    assert len(ours) == len(theirs) > 3
    assert all(torch.equal(ours[name], own) for name, own in theirs.items())
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
    given = {"segments": Segments((), recompute=False), "softcap": 30.0}
    with pytest.raises(ValueError, match=r"a soft cap on attention scores \(30"):
        attend(nn.Module(), q, q, q, None, **given)


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
    run_ranks(exact_on_two_ranks, 2, timeout_seconds=150)


def other_ways(case: Case) -> None:
    """Logits, losses of all tokens, whole embeddings, frozen weights: with SP."""
    model, lane = case.model, case.lanes[0]
    losses = case.want.losses[0]
    chosen = {"loss_at": None, "labels": None}
    with torch.no_grad():
        given = partial(forward, model, lane)
        everywhere = torch.zeros(1, len(lane.ids), dtype=torch.int64)
        everywhere[0, lane.at] = lane.labels
        found = given(loss_at=None, labels=everywhere)
        assert error(found[0, lane.at], losses) < EXACT
        for logits in (given(**chosen)[:, lane.at], given(**chosen, logits_at=lane.at)):
            assert logits.shape == (1, len(lane.at), 96)
            own = nn.functional.cross_entropy(logits[0], lane.labels, reduction="none")
            assert error(own, losses) < EXACT
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
    found = errors(gradients(whole), want.gradients)
    assert max(found.values()) < EXACT, found


def forward(model: LanguageModel, lane: Any, **given: Any) -> Tensor:
    return model(
        lane.ids[None], lane.positions[:, None], packed_seq_params=lane.segments,
        place=None if not lane.items else partial(only_own, model, lane),
        levels=own_levels(model, lane), **given,
    )  # fmt: skip


def only_own(model: LanguageModel, lane: Any, text: Tensor) -> Tensor:
    """Rows of a lane at this rank's places, without gradients."""
    places, mine = own_places(model, lane)
    return text.flatten(0, 1).index_copy(0, places, lane.rows[0][mine]).view(text.shape)


def own_levels(model: LanguageModel, lane: Any) -> tuple[Tensor, Tensor]:
    places, mine = own_places(model, lane)
    return lane.rows[1:, mine], places


def own_places(model: LanguageModel, lane: Any) -> tuple[Tensor, Tensor]:
    assert model.border is not None
    part = len(lane.ids) // model.border.tp.size()
    places = lane.places - model.border.tp.get_local_rank() * part
    mine = (places >= 0) & (places < part)
    return places[mine], mine


def cut_after(model: LanguageModel, place: Any) -> Any:
    """What puts rows into whole sequences and then cuts them."""
    assert model.border is not None
    tp = model.border.tp

    def cut(text: Tensor) -> Tensor:
        whole = DTensor.from_local(place(text), tp, [Replicate()], run_check=False)
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
    for own in gemma.lanes:
        run_lane(gemma.model, own)
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
    """How often a step computes a layer's MLP, and its core attention."""
    mlp, attention = [], []
    attend = LayerForm.attend
    hook = cast("Any", case.model.units[0]).mlp.register_forward_pre_hook(lambda *_: mlp.append(1))

    def counted(form: LayerForm, *given: Any) -> Tensor:
        attention.append(1)
        return attend(form, *given)

    with pytest.MonkeyPatch.context() as patch, hook:
        patch.setattr(LayerForm, "attend", counted)
        run_lane(case.model, case.lanes[case.own[0]])
    return len(mlp), len(attention) // len(case.model.units)


def bf16_keeps_plans() -> None:
    """FSDP2 casts what modules are called with; plans made ahead have to survive it."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    model = build(config_of("gemma3"), context(2, 2, sequence_parallel=True))
    shard(model, MixedPrecisionPolicy(torch.bfloat16, torch.float32))
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
    assert all(own.isfinite().all() for own in gradients(model).values())


def test_with_fsdp2_data_tensor_and_sequence_parallel_ranks_are_exact(run_ranks: RunRanks) -> None:
    run_ranks(exact_on_four_ranks, 4, timeout_seconds=150)
