"""The speed of one stack of layers on a GPU: ours against transformers.

The stack trains in bf16 on sequences of equal length, so neither side pads. Ours keeps weights and
optimizer state in fp32 beside the bf16 weights, transformers' model keeps all of it in bf16. The
vocabulary is small, so that nearly all work is in the layers.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.train import write_shard
from data.text.digits import DIGITS, conversation, write_tokenizer
from mimo.runtime.run_files import METRICS, json_lines


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Return the metrics of every step of a run."""
    return [line for line in json_lines(run / METRICS) if "loss" in line]


@dataclass(frozen=True)
class Stack:
    """Sizes of the layers, and of a step: microbatches of `sequences` with about `words` tokens."""

    num_layers: int = 4
    hidden_size: int = 4096
    ffn_hidden_size: int = 12288
    num_attention_heads: int = 32
    num_query_groups: int = 8
    head_size: int = 128
    words: int = 2000
    sequences: int = 4
    microbatches: int = 2
    steps: int = 12
    precision: str = "bf16"


_SIZES = "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups head_size"
_WARM_UP_STEPS = 3
_LEARNING_RATE = 1e-5  # with 1e-4 the loss of random weights of this width rises from 5 to 16
QWEN3_VL_8B = Stack()
"""The width of Qwen3-VL-8B's language model, with 4 of its 36 layers."""


def compare_speed(stack: Stack, folder: Path, train: Callable[[Path], object]) -> dict[str, Any]:
    """Measure tokens per second and MFU of ours and of transformers, one after the other.

    train: trains a recipe, in processes of its own.
    """
    train(write_stack(stack, folder / "stack"))
    steps = read_steps(folder / "stack/runs/stack")[_WARM_UP_STEPS:]
    ours = statistics.median(step["tokens_per_second"] for step in steps)
    mfu = steps[-1]["mfu"] and statistics.median(step["mfu"] for step in steps)
    length = round(steps[0]["tokens"] / (stack.sequences * stack.microbatches))
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        attention, theirs = pool.submit(transformers_rate, stack, length).result()
    ratio = ours / theirs
    return {
        "ratio": ratio,
        "contestants": {
            "ours": {"tokens_per_second": ours, "mfu": mfu},
            f"transformers, {attention}": {
                "tokens_per_second": theirs,
                "mfu": mfu and mfu / ratio,
            },
        },
        "note": f"{stack}; {length} tokens to a sequence",
    }


def write_stack(stack: Stack, folder: Path) -> Path:
    """Write a step's samples of equally many tokens, and our recipe: the language model alone."""
    folder.mkdir(parents=True)
    write_tokenizer(folder / "tokenizer")
    rng = np.random.default_rng(0)

    def digits() -> str:
        return " ".join(DIGITS[n] for n in rng.integers(len(DIGITS), size=stack.words // 2))

    def sample(number: int) -> dict[str, Any]:
        content = json.dumps({"messages": conversation([], digits(), digits())}).encode()
        return {"__key__": f"sample{number:04d}", "json": content}

    num_samples = stack.sequences * stack.microbatches
    write_shard(folder / "train-00000.tar", map(sample, range(num_samples)))
    half = stack.head_size // 2
    side = 5 * half // 16  # as Qwen3-VL divides 64: 24, 20, 20
    model = {name: getattr(stack, name) for name in _SIZES.split()}
    model["mrope_section"] = [half - 2 * side, side, side]
    content = {
        "name": "stack",
        "language": {"family": "qwen3", "grid": {"dp": 1}, "model": model},
        "data": {
            "sources": [{"path": str(folder / "train-*.tar")}],
            "tokenizer": str(folder / "tokenizer"),
            "sequence_length": 2 * stack.words,
        },
        "train": {
            "steps": stack.steps,
            "global_batch_size": stack.sequences * stack.microbatches,
            "micro_batch_size": stack.sequences,
            "precision": stack.precision,
            "learning_rate": _LEARNING_RATE,
            "log_every": 1,
            "run_dir": str(folder / "runs"),
        },
    }
    (path := folder / "stack.yaml").write_text(json.dumps(content))  # which is YAML as well
    return path


def transformers_rate(stack: Stack, length: int) -> tuple[str, float]:
    """Name of the attention, and median tokens per second of transformers' Qwen3; in a process."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    from mimo.device import local_device, synchronize
    from mimo.ops.acceleration import has_function

    device = local_device(0)
    has_flash = device.type == "cuda" and has_function("flash_attn", "flash_attn_varlen_func")
    attention = "flash_attention_2" if has_flash else "sdpa"
    config = Qwen3Config(
        vocab_size=64,
        num_hidden_layers=stack.num_layers,
        hidden_size=stack.hidden_size,
        intermediate_size=stack.ffn_hidden_size,
        num_attention_heads=stack.num_attention_heads,
        num_key_value_heads=stack.num_query_groups,
        head_dim=stack.head_size,
    )
    with device:  # where weights are drawn in no time
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=torch.bfloat16
        )
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True)
    ids = torch.randint(0, config.vocab_size, (stack.sequences, length), device=device)
    rates = []
    for _ in range(stack.steps):
        synchronize()
        start = time.perf_counter()
        for _ in range(stack.microbatches):
            (model(input_ids=ids, labels=ids, use_cache=False).loss / stack.microbatches).backward()
        optimizer.step()
        optimizer.zero_grad()
        synchronize()
        rates.append(ids.numel() * stack.microbatches / (time.perf_counter() - start))
    return attention, statistics.median(rates[_WARM_UP_STEPS:])
