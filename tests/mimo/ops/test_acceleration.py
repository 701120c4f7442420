"""The implementation of layers depends on the machine, and changes nothing but their speed."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import RecipeError
from mimo.generate.one_rank import one_rank_recipe
from mimo.model.recipe_checks import check_device, check_recipe
from mimo.ops.acceleration import (
    FP8_RECIPES,
    TRANSFORMER_ENGINE,
    LayerChoice,
    Machine,
    choose_layers,
    fp8_flags,
    fp8_problem,
)
from mimo.parallel.grids import sequence_multiple
from tests import language_steps
from tests.conftest import RunRanks
from tests.lone_module import noise
from tests.mimo import tiny

ADA, HOPPER, BLACKWELL = ((8, 9), (9, 0), (10, 0))
TE = frozenset({TRANSFORMER_ENGINE})

# ------------------------------------------------------------------------------ the choice


@pytest.mark.parametrize(
    ("machine", "dtype", "fused"),
    [
        (Machine(None, TE), torch.bfloat16, (False, False)),
        (Machine(HOPPER), torch.bfloat16, (False, True)),
        (Machine(HOPPER, TE), torch.bfloat16, (True, True)),
        (Machine(HOPPER, TE), torch.float16, (True, True)),
        (Machine(HOPPER, TE), torch.float32, (False, False)),
        (Machine(HOPPER, TE), torch.float64, (False, False)),
    ],
)
def test_layers_are_fused_in_16_bits_on_a_gpu_only(
    machine: Machine, dtype: torch.dtype, fused: tuple[bool, bool]
) -> None:
    choice = choose_layers(machine, dtype)
    assert (choice.transformer_engine, choice.fused_activation) == fused


TANH = partial(functional.gelu, approximate="tanh")


@pytest.mark.parametrize(
    ("activation", "gated", "fuse", "named", "fused"),
    [
        (functional.silu, True, True, functional.silu, True),
        (TANH, True, True, functional.gelu, True),
        (functional.silu, True, False, functional.silu, False),
        (TANH, True, False, TANH, False),
        (functional.gelu, True, True, functional.gelu, False),  # Megatron's fused one is by tanh
        (functional.gelu, False, True, functional.gelu, False),
        (TANH, False, True, TANH, False),
    ],
    ids=["silu", "tanh", "silu, no GPU", "tanh, no GPU", "exact", "exact, no gate", "no gate"],
)
def test_only_gated_activations_that_megatron_computes_alike_are_fused(
    activation: Any, gated: bool, fuse: bool, named: Any, fused: bool
) -> None:
    from mimo.engines.megatron.config import fused_activation

    flags = fused_activation(activation, gated, fuse)
    assert flags == {"activation_func": named, "bias_activation_fusion": fused}


@pytest.mark.parametrize(("activation", "kernel"), [(functional.silu, "swiglu"), (TANH, "geglu")])
def test_the_fused_gated_activations_are_ours(activation: Any, kernel: str) -> None:
    import importlib

    fused = importlib.import_module(f"megatron.core.fusions.fused_bias_{kernel}")
    compiled = {"swiglu": "SwiGLUFunction", "geglu": "GeGLUFunction"}[kernel]
    function = getattr(fused, compiled)
    x = noise(0, 5, 3, 16).double().requires_grad_()
    gate, up = x.chunk(2, -1)
    expected = activation(gate) * up
    (of_expected,) = torch.autograd.grad(expected.square().sum(), x)
    options = (False, False) if kernel == "swiglu" else ()
    with torch.compiler.set_stance("force_eager"):  # a compiler needs seconds and a C++ one
        got = function.apply(x, *options)
        (of_got,) = torch.autograd.grad(got.square().sum(), x)
    # Megatron writes sqrt(2 / pi) and its multiples with seven digits.
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(of_got, of_expected, rtol=1e-6, atol=1e-7)


# --------------------------------------------------------------------------------- norms


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rms_norms_are_those_of_transformers_bit_by_bit(
    dtype: torch.dtype, zero_centered: bool
) -> None:
    from mimo.ops.layers import norm_class

    config: Any = SimpleNamespace(
        normalization="RMSNorm",
        layernorm_zero_centered_gamma=zero_centered,
        params_dtype=dtype,
        sequence_parallel=False,
    )
    norm = norm_class(config)(config, 96, 1e-6)
    norm.weight.data.copy_(noise(0, 96))
    x = (100 * noise(1, 50, 7, 96)).to(dtype)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    if zero_centered:
        expected = (normed * (1.0 + norm.weight.float())).to(dtype)
    else:
        expected = norm.weight * normed.to(dtype)
    got = norm(x)
    assert got.dtype == dtype
    if dtype == torch.bfloat16:
        assert torch.equal(got, expected)
    else:
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------- Transformer Engine, by fakes


def built_with_fakes(rank: int, family: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Inside a rank: losses and names with our layers, then with stand-ins for TE's and adapters.

    A stand-in computes what ours does and records the configuration that it was built with.
    """
    import importlib

    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    from mimo.engines.megatron import stack
    from mimo.engines.megatron.config import LoRA, ModuleContext
    from mimo.engines.megatron.parallel import prepare_engine
    from mimo.ops.layers import norm_class
    from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
    from mimo.parallel.groups import build_topology

    fused: list[bool] = []

    def noted(options: dict[str, Any]) -> dict[str, Any]:
        fused.append(options["config"].gradient_accumulation_fusion)
        options["config"].gradient_accumulation_fusion = False  # Megatron's need a GPU for it
        return options

    class Column(ColumnParallelLinear):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **noted(options))

    class Row(RowParallelLinear):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **noted(options))

    class Norm:
        """Like Megatron's wrapper: an instance is of another class."""

        made = 0

        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> Any:
            cls.made += 1
            return norm_class(config)(config, hidden_size, eps)

    prepare_engine(language_steps.SEED)
    layout = Layout(language=GridSpec(LANGUAGE), encoders={}, world_size=1)
    groups = build_topology(layout).modules[LANGUAGE]
    module = importlib.import_module(f"mimo.families.languages.{family}")
    sizes = module.Settings(**settings)

    def build(lora: LoRA | None = None) -> Any:
        ctx = ModuleContext(groups=groups, dtype=torch.float32, lora=lora)
        return module.build(sizes, ctx, language_steps.NUM_TOKENS, 64, language_steps.SEED)

    def loss(model: Any) -> torch.Tensor:
        return language_steps.losses_of(model)[0].sum()

    plain = build()
    stand_in = SimpleNamespace(TEColumnParallelLinear=Column, TERowParallelLinear=Row, TENorm=Norm)
    stack._transformer_engine = lambda: stand_in
    choice = LayerChoice(True, False)
    stack.layer_choice = lambda dtype: choice
    stood_in = build()
    fused_linears, norms = [*fused], Norm.made
    adapted = build(LoRA(2, 1.0, frozenset({"qkv", "fc2"})))
    layer = adapted.decoder.layers[0]
    return {
        "names": [[n for n, _ in model.named_parameters()] for model in (plain, stood_in)],
        "losses": [float(loss(model)) for model in (plain, stood_in)],
        "norm_weights": [
            [float(p.mean()) for p in model.parameters() if p.dim() == 1]
            for model in (plain, stood_in)
        ],
        "fused": fused_linears,
        "norms": norms,
        "of_layer": [
            type(linear).__name__
            for linear in (
                layer.self_attention.linear_qkv,
                layer.self_attention.linear_proj,
                layer.mlp.linear_fc1,
                layer.mlp.linear_fc2,
            )
        ],
    }


_DECODER = {k: v for k, v in language_steps.SETTINGS.items() if k != "mrope_section"}


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", language_steps.SETTINGS),
        ("gemma3", _DECODER | {"sliding_window": 8, "sliding_window_pattern": 2}),
    ],
)
def test_layers_of_transformer_engine_have_our_names_and_adapters_stay_ours(
    run_ranks: RunRanks, family: str, settings: dict[str, Any]
) -> None:
    (found,) = run_ranks(built_with_fakes, 1, family, settings)
    plain, stood_in = found["names"]
    assert plain == stood_in
    assert found["losses"][0] == found["losses"][1]
    assert found["norm_weights"][0] == found["norm_weights"][1]
    assert found["fused"] == [True] * 8, "four linears in each of two layers"
    # Two or four around each layer's parts, those of queries and keys, the last.
    assert found["norms"] == {"qwen3": 2 * 4 + 1, "gemma3": 2 * 6 + 1}[family]
    assert found["of_layer"] == [
        "LoRAColumnParallelLinear",
        "Row",
        "Column",
        "LoRARowParallelLinear",
    ]


@pytest.mark.gpu
def test_a_model_of_transformer_engine_learns_like_ours(run_ranks_on_gpu: RunRanks) -> None:
    pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    losses = {
        fused: run_ranks_on_gpu(losses_in_bf16, 1, fused)[0]  # on one GPU
        for fused in (False, True)
    }
    torch.testing.assert_close(losses[True], losses[False], rtol=2e-2, atol=0)


def losses_in_bf16(rank: int, fused: bool) -> torch.Tensor:
    """Inside a rank: the losses of a few steps, with everything fused or nothing."""
    from mimo.engines.megatron import config, stack
    from mimo.ops import acceleration

    if not fused:
        plain = LayerChoice(False, False)
        for module in (acceleration, config, stack):
            module.layer_choice = lambda dtype: plain  # type: ignore[attr-defined]
    job = language_steps.Job(dtype=torch.bfloat16, steps=3, optimizer="adam", learning_rate=0.01)
    return torch.tensor([step["loss"] for step in language_steps.train(rank, job)["metrics"]])


# ------------------------------------------------------------------------------------ FP8


@pytest.mark.parametrize(
    ("fp8", "works"),
    [
        ("none", [None, (8, 0), ADA, HOPPER, BLACKWELL, (10, 3), (12, 0)]),
        ("current", [ADA, HOPPER, BLACKWELL, (10, 3), (12, 0)]),
        ("block", [HOPPER]),
        ("mxfp8", [BLACKWELL, (10, 3)]),
    ],
)
def test_8_bits_work_where_the_device_has_them(fp8: str, works: list[Any]) -> None:
    devices = [None, (8, 0), ADA, HOPPER, BLACKWELL, (10, 3), (12, 0)]
    assert [d for d in devices if fp8_problem(fp8, Machine(d, TE)) is None] == works
    without = fp8_problem(fp8, Machine(HOPPER))
    assert (without is None) == (fp8 == "none")
    assert without is None or "install transformer-engine[pytorch]" in without


def test_the_message_about_a_device_names_what_works_there() -> None:
    message = fp8_problem("mxfp8", Machine(HOPPER, TE))
    assert message is not None
    assert "compute capability 9.0" in message
    assert "set it to current or block or none" in message


def test_every_8_bit_recipe_is_one_of_megatron() -> None:
    from megatron.core.enums import Fp8Recipe
    from megatron.core.transformer.transformer_config import TransformerConfig

    assert fp8_flags("none") == {}
    for fp8 in FP8_RECIPES:
        config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=1,
            bf16=True,
            cuda_graph_modules=[],
            **fp8_flags(fp8),
        )
        assert Fp8Recipe(config.fp8_recipe)
        assert config.fp8 in ("e4m3", "hybrid")


def test_sequences_are_padded_so_that_each_rank_has_enough_tokens() -> None:
    assert sequence_multiple(cp=1, tp=1, sp=False) == 1
    for cp, tp, sp in ((1, 1, False), (1, 4, True), (2, 4, False), (2, 2, True), (3, 5, True)):
        multiple = sequence_multiple(cp, tp, sp, tokens_on_rank=32)
        assert multiple % sequence_multiple(cp, tp, sp) == 0
        assert multiple // cp // (tp if sp else 1) % 32 == 0


BF16 = "train.precision=bf16"
SIZES = (
    "language.model={num_layers: 2, hidden_size: 64, ffn_hidden_size: 96, num_attention_heads: 4, "
    "num_query_groups: 2, head_size: 16, mrope_section: [4, 2, 2]}"
)


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["train.fp8=current"], ["fp8: current needs precision: bf16, but it is fp32"]),
        (["train.fp8=delayed", BF16], ["train.fp8"]),
        (["train.fp8=current", BF16, SIZES, "language.lora={rank: 4}"], ["language.lora"]),
        (
            ["train.fp8=mxfp8", BF16, SIZES, "language.grid.tp=2"],
            ["multiples of 32, but linear_fc2 is 64 x 48 with language.grid.tp 2"],
        ),
        (["train.fp8=block", BF16, SIZES], ["multiples of 128, but linear_qkv is 128 x 64"]),
    ],
    ids=["fp32", "unknown", "adapters", "sizes", "sizes of blocks"],
)
def test_a_recipe_that_cannot_compute_in_8_bits_is_refused(
    tmp_path: Path, overrides: list[str], messages: list[str]
) -> None:
    path = tiny.write_recipe(tmp_path)
    with pytest.raises(RecipeError) as caught:
        check_recipe(load_recipe(path, overrides), None)
    for message in messages:
        assert message in str(caught.value)


def test_8_bits_on_a_machine_without_a_gpu_are_refused_by_the_key(tmp_path: Path) -> None:
    recipe = load_recipe(
        tiny.write_recipe(tmp_path), ["train.fp8=current", BF16, SIZES, "data.sequence_length=128"]
    )
    check_recipe(recipe, None)  # nothing else is wrong
    check_device(one_rank_recipe(recipe))  # answering needs none
    with pytest.raises(RecipeError, match=r"train\.fp8: got current, which needs a GPU"):
        check_device(recipe)
