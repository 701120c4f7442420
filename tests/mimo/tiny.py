"""A tiny data set and recipe for multi-rank tests, and what a layout's step is compared by."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from data.digits_text import write_tokenizer

# Images per sample, four samples to a global microbatch: mixed, text only, mixed.
# The second step starts over, with stale gradients to clear.
NUM_STEPS = 2
IMAGES_PER_SAMPLE = (2, 0, 1, 3, 0, 0, 0, 0, 1, 4, 1, 2)
# Videos (items of a second encoder) in the same samples, where a test asks for them: samples with
# items of both kinds, of either kind and of none.
VIDEOS_PER_SAMPLE = (1, 2, 0, 2, 0, 0, 0, 0, 0, 1, 3, 0)
_SIZES = ((28, 28), (56, 28), (28, 56), (56, 56), (84, 28))

RECIPE = """
name: tiny
language:
  family: qwen3
  grid: {{tp: 1, dp: 1}}
  model:
    num_layers: 2
    hidden_size: 32
    ffn_hidden_size: 48
    num_attention_heads: 4
    num_query_groups: 2
    head_size: 8
    rotary_base: 10000.0
    mrope_section: [2, 1, 1]
    tie_word_embeddings: true
    init_std: 0.2
encoders:
  vision:
    family: qwen_vl
    grid: {{tp: 1, dp: 1}}
    model:
      num_layers: 2
      hidden_size: 16
      ffn_hidden_size: 24
      num_attention_heads: 2
      temporal_patch_size: 1
      min_pixels: 784
      max_pixels: 12544
      init_std: 0.2
data:
  sources: [{{path: "{directory}/train-*.tar"}}]
  tokenizer: {directory}/tokenizer
  sequence_length: 128
  shuffle_block: 1000
train:
  steps: 3
  global_batch_size: 12
  micro_batch_size: 4
  optimizer: sgd
  learning_rate: 0.1
  clip_grad_norm: null
  run_dir: {directory}/runs
  threads_per_rank: 1
"""


# A second tower of another size, with smaller patches, hence more rows per item.
SECOND_ENCODER = (
    "encoders.glyphs={family: qwen_vl, media: video, placeholder: '<|video_pad|>', grid: {dp: 1}, "
    "model: {num_layers: 1, hidden_size: 24, ffn_hidden_size: 32, num_attention_heads: 2, "
    "patch_size: 7, temporal_patch_size: 1, min_pixels: 784, max_pixels: 3136, init_std: 0.2}}"
)


def write_samples(
    directory: Path,
    images_per_sample: Sequence[int] = IMAGES_PER_SAMPLE,
    name: str = "train",
    videos_per_sample: Sequence[int] | None = None,
) -> None:
    """A shard of noise images of different sizes with questions and answers, and a tokenizer.

    Videos are still images, too; they stand between the images of their sample.
    """
    rng = np.random.default_rng(0)
    directory.mkdir(parents=True, exist_ok=True)
    write_tokenizer(directory / "tokenizer")
    with tarfile.open(directory / f"{name}-00000.tar", "w") as tar:
        for number, images in enumerate(images_per_sample):
            videos = videos_per_sample[number] if videos_per_sample else 0
            count = images + videos
            media = ["image"] * images
            for video in range(videos):
                media.insert(2 * video, "video")
            digits = " ".join(str(d) for d in rng.integers(0, 10, max(count, 2)))
            content = [{"type": one} for one in media] + [
                {"type": "text", "text": "what is this ?" if number % 3 else "read the digits"}
            ]
            messages = [
                {"role": "user", "content": content},
                {"role": "assistant", "content": [{"type": "text", "text": digits}]},
            ]
            document = json.dumps({"messages": messages}).encode()
            _add(tar, f"sample{number:04d}.json", document)
            for item in range(count):
                width, height = _SIZES[int(rng.integers(len(_SIZES)))]
                pixels = rng.integers(0, 256, (height, width), dtype=np.uint8)
                buffer = io.BytesIO()
                Image.fromarray(pixels).save(buffer, "PNG")
                _add(tar, f"sample{number:04d}.{item}.png", buffer.getvalue())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def write_recipe(directory: Path) -> Path:
    """The tiny recipe over the data in ``directory``."""
    path = directory / "tiny.yaml"
    path.write_text(RECIPE.format(directory=directory))
    return path


# ------------------------------------------------------- functions that run inside ranks


def run_layout_steps(rank: int, path: Path, overrides: list[str]) -> dict:
    """One rank: train; its metrics, last gradients and weights by global name."""
    import torch.distributed as dist

    from mimo.dataset import open_dataset
    from mimo.layout import build_layout
    from mimo.recipe import load_recipe
    from mimo.topology import build_topology
    from mimo.train import Trainer

    recipe = load_recipe(path, overrides)
    topology = build_topology(build_layout(recipe, dist.get_world_size()))
    trainer = Trainer(recipe, topology, path.parent / "run")
    dataset = open_dataset(recipe, "sources", trainer.chat, trainer.processors)
    assert dataset is not None
    steps = trainer.train(dataset, None)
    metrics = [next(steps) for _ in range(NUM_STEPS)]
    steps.close()
    shards = []
    for name, module in trainer.model.modules.items():
        shards += _shards(name, module)
    return {"metrics": metrics, "shards": shards}


def _shards(name: str, module: Any) -> list[dict]:
    from mimo.megatron.initialize import global_name

    found = []
    for stage, chunk in enumerate(module.raw):
        vp_stage = stage if len(module.raw) > 1 else None
        for local, param in chunk.named_parameters():
            whole = global_name(local, chunk.config, module.groups.pp.rank(), vp_stage)
            gradient = param.main_grad if module.trains else None
            found.append(
                {
                    "name": f"{name}.{whole}",
                    "lane": module.groups.dp.rank(),
                    "tp": module.groups.tp.rank(),
                    "split": bool(getattr(param, "tensor_model_parallel", False)),
                    "dim": int(getattr(param, "partition_dim", 0)),
                    "stride": int(getattr(param, "partition_stride", 1)),
                    "gradient": None if gradient is None else gradient.detach().clone().numpy(),
                    # numpy has no bf16; fp32 holds the same numbers.
                    "weight": param.detach().to(copy=True, dtype=_numpy_dtype(param)).numpy(),
                }
            )
    return found


def _numpy_dtype(param: Any) -> Any:
    import torch

    return torch.float32 if param.dtype == torch.bfloat16 else param.dtype


def run_reference_steps(
    rank: int, path: Path, overrides: list[str], unusable: frozenset[str] = frozenset()
) -> dict:
    """The same steps on one rank: no DDP, no bridge, no schedule, plain autograd and SGD.

    unusable: keys of samples whose items and loss are left out.
    """
    import torch

    from data.batch import pack_lane, plan_microbatch
    from mimo.dataset import item_processors, open_dataset, open_tokenizer
    from mimo.layout import build_layout, num_microbatches
    from mimo.learning_rate import learning_rate
    from mimo.local import LocalModel
    from mimo.recipe import load_recipe

    recipe = load_recipe(path, overrides)
    layout = build_layout(recipe)
    chat, processors = open_tokenizer(recipe), item_processors(recipe)
    dataset = open_dataset(recipe, "sources", chat, processors)
    assert dataset is not None
    local = LocalModel(recipe, chat.vocab_size, freeze=True)
    frozen = {"language": recipe.language.freeze} | {
        name: e.freeze for name, e in recipe.encoders.items()
    }
    for name, module in local.model.modules.items():
        module.raw[0].requires_grad_(not frozen[name])
    per_step = layout.language.dp * recipe.train.micro_batch_size
    reader = dataset.readers[0]
    microbatches = num_microbatches(recipe, layout)

    def sum_of_losses(step: int) -> tuple[torch.Tensor, int]:
        losses, tokens = torch.zeros(()), 0
        for m in range(microbatches):
            loss, count = loss_of(step * microbatches + m)
            losses, tokens = losses + loss, tokens + count
        return losses, tokens

    def loss_of(m: int) -> tuple[torch.Tensor, int]:
        samples = plan_microbatch(dataset.indexes, dataset.order, m * per_step, 1, per_step)
        blank = [n for n, key in enumerate(dataset.sample_keys(samples)) if key in unusable]
        samples = samples.without(blank)
        encoded = [reader.sample(int(s)) for s in samples.sample]
        for n in blank:
            encoded[n] = replace(encoded[n], item_offsets=np.zeros(0, np.int64))
        grids = [
            [reader.row_grid(int(i)) for i in samples.item[samples.item_sample == n]]
            for n in range(per_step)
        ]
        lane = pack_lane(
            encoded,
            grids,
            samples.loss_tokens.tolist(),
            int(samples.lane_tokens[0]),
            chat.pad_token_id,
        )
        rows = []
        for name, encoder in recipe.encoders.items():
            items = samples.item[samples.items_of_media(encoder.media)].tolist()
            if items:
                patches = np.concatenate([reader.patches(i) for i in items])
                shapes = np.array([reader.grid(i) for i in items], np.int64)
                token = chat.placeholder_ids[encoder.media]
                kept = np.repeat(~np.isin(np.arange(len(lane.lengths)), blank), lane.lengths)
                places = np.flatnonzero((lane.input_ids == token) & kept)
                rows.append((local.encode(name, patches, shapes), places))
        per_token = local.forward(lane, rows, with_labels=True)
        loss = (per_token[0] * torch.from_numpy(lane.loss_mask)).sum()
        return loss, int(samples.loss_tokens.sum())

    params = {
        f"{name}.{key}": param
        for name, module in local.model.modules.items()
        for key, param in module.raw[0].named_parameters()
    }
    trained = [param for param in params.values() if param.requires_grad]
    steps = []
    for step in range(NUM_STEPS):
        losses, tokens = sum_of_losses(step)
        for param in trained:
            param.grad = None
        (losses / tokens).backward()
        gradients = [param.grad for param in trained if param.grad is not None]
        assert len(gradients) == len(trained), "a parameter got no gradient"
        norm = torch.stack([g.double().pow(2).sum() for g in gradients]).sum().sqrt()
        clip = recipe.train.clip_grad_norm
        factor = min(1.0, clip / (float(norm) + 1e-6)) if clip else 1.0
        rate = learning_rate(step, recipe.train.steps, recipe.train.learning_rate, 0, 0.1)
        with torch.no_grad():
            for param, gradient in zip(trained, gradients, strict=True):
                param.sub_(rate * factor * gradient)
                param.grad = gradient * factor
        steps.append(
            {"loss": float(losses.detach()) / tokens, "tokens": tokens, "grad_norm": float(norm)}
        )
    found = {
        key: {
            "gradient": None if param.grad is None else param.grad.numpy(),
            "weight": param.detach().numpy(),
        }
        for key, param in params.items()
    }
    return {"steps": steps, "parameters": found}


# ------------------------------------------------------------------------- comparison


def assemble(results: Sequence[dict], what: str) -> dict[str, np.ndarray | None]:
    """Whole tensors by name from the shards of all ranks; replicas must be equal bit for bit."""
    by_name: dict[str, dict[int, dict]] = {}
    for result in results:
        for shard in result["shards"]:
            parts = by_name.setdefault(shard["name"], {})
            if shard["tp"] in parts and shard[what] is not None:
                np.testing.assert_array_equal(
                    parts[shard["tp"]][what],
                    shard[what],
                    err_msg=f"{shard['name']} differs by lane",
                )
            parts[shard["tp"]] = shard
    whole: dict[str, np.ndarray | None] = {}
    for name, parts in by_name.items():
        first = parts[0]
        if first[what] is None:
            whole[name] = None
        elif not first["split"] or len(parts) == 1:
            whole[name] = first[what]
        else:
            pieces = [
                np.split(parts[t][what], first["stride"], first["dim"]) for t in sorted(parts)
            ]
            whole[name] = np.concatenate(
                [
                    np.concatenate([p[s] for p in pieces], first["dim"])
                    for s in range(first["stride"])
                ],
                first["dim"],
            )
    return whole


def errors(got: dict[str, Any], reference: dict[str, Any], what: str) -> dict[str, float]:
    """Error of every tensor: max|Δ| / max(max|ref|, 1e-6 · global gradient norm), DESIGN §5.4."""
    gradients = [p["gradient"] for p in reference.values() if p["gradient"] is not None]
    floor = 1e-6 * float(np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients)))
    assert got.keys() == reference.keys(), got.keys() ^ reference.keys()
    found = {}
    for name, value in got.items():
        expected = reference[name][what]
        if expected is None:
            assert value is None, f"{name} is frozen and has a gradient"
            continue
        scale = max(float(np.abs(expected).max()), floor)
        found[name] = float(np.abs(value - expected).max()) / scale
    return found
