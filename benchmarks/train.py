"""Compare whole training steps of ours and of transformers on the same samples.

Ours packs samples. transformers pads batches of samples; equally long samples need no padding. Each
side is a process of its own, because on a machine without a GPU the engine changes what PyTorch's
calls do, for the whole process.
"""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from PIL import Image
from torch import Tensor
from torch._C._distributed_c10d import HashStore
from webdataset.compat import WebDataset
from webdataset.writer import TarWriter

from benchmarks import harness
from benchmarks.harness import Bound, Contest, timed
from data.modalities.image_files import png_bytes
from data.modalities.transformers import load_processor
from data.text.digits import DIGITS, conversation, words
from mimo.checkpoint.hf.initial import initial_weights
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.config.schema import Recipe, Train
from mimo.device import initialize_distributed, keep_freed_memory, set_threads
from mimo.model.dataset import open_dataset
from mimo.parallel.build import build_layout

_TIMEOUT_SECONDS = 1800.0
_PADDED_BATCH = 8
_ROW_PIXELS = 30  # side of a row of the tiny checkpoint
_MAX_ROWS = 64  # of an image
_SPREAD, _MOST_WORDS = 1.0, 1500  # of the words of a sample: log-normal with this sigma
_QUICK = {"width": 1, "num_layers": 4, "samples": 8, "median_words": 12}
_RECIPE = """
name: bench
encoders: {vision: {placement: colocated}}
data: {sequence_length: 4096, shuffle_block: 1_000_000}
train: {learning_rate: 1.0e-4, min_learning_rate_ratio: 1.0, weight_decay: 0.0}
"""
IGNORED = -100  # label that transformers leaves out of the loss
_LOSS_ERROR = 1e-4  # relative; fp32 on both sides, in another order of sums
GOALS = {"long-tailed": 2.0, "equal": 1.05}  # lengths of samples -> times faster


@dataclass(frozen=True)
class Workload:
    """One folder with the checkpoint and, for each kind of lengths, a shard and a recipe.

    width, num_layers: of `TinyCheckpoint`. samples: of a step if lengths are long-tailed, else half
    as many. median_words: of a sample's text.
    """

    directory: Path
    width: int = 4
    num_layers: int = 8
    samples: int = 32
    median_words: int = 120

    @property
    def checkpoint(self) -> Path:
        """In Hugging Face format; both sides load it."""
        return self.directory / "checkpoint"

    def shard(self, lengths: str) -> Path:
        """The samples of a step, in order."""
        return self.directory / f"{lengths}-00000.tar"

    def num_samples(self, lengths: str) -> int:
        return self.samples if lengths == "long-tailed" else self.samples // 2

    def write(self) -> None:
        """Write everything that is read later."""
        tiny = TinyCheckpoint("qwen3_vl", width=self.width, num_layers=self.num_layers)
        write_tiny(tiny, self.checkpoint)
        file = self.checkpoint / "preprocessor_config.json"  # its images have few rows
        content = json.loads(file.read_text())
        content["size"]["longest_edge"] = _MAX_ROWS * _ROW_PIXELS**2
        file.write_text(json.dumps(content))
        for lengths in GOALS:
            write_shard(self.shard(lengths), self._samples(lengths))

    def recipe(self, lengths: str, steps: int) -> Recipe:
        """Our recipe: one step per pass over the samples, on one rank."""
        path = self.directory / f"{lengths}.yaml"
        path.write_text(_RECIPE)
        sizes = {
            "init_from": self.checkpoint,
            "data.sources": [{"path": str(self.shard(lengths))}],
            "train.steps": steps,
            "train.global_batch_size": self.num_samples(lengths),
            "train.micro_batch_size": self.samples // 2,
            "train.run_dir": self.directory / "runs",
        }
        return load_recipe(path, [f"{key}={value}" for key, value in sizes.items()])

    def _samples(self, lengths: str) -> Iterable[dict[str, Any]]:
        """Members of each sample's files, for the tar writer: a question about images."""
        rng, median = np.random.default_rng(0), self.median_words
        for number in range(self.num_samples(lengths)):
            if lengths == "equal":
                num_words, images = 2 * median, [(3, 3)]
            else:
                drawn = median * np.exp(_SPREAD * rng.standard_normal())
                num_words = int(np.clip(drawn, 8, _MOST_WORDS))
                count = int(rng.integers(1, 3)) if rng.random() < 0.5 else 0
                images = rng.integers(2, 1 + round(_MAX_ROWS**0.5), (count, 2)).tolist()
            members: dict[str, Any] = {"__key__": f"sample{number:04d}"}
            members["json"] = chat(num_words, len(images), rng)
            for place, (h, w) in enumerate(images):
                pixels = rng.integers(0, 256, (h * _ROW_PIXELS, w * _ROW_PIXELS, 3), dtype=np.uint8)
                members[f"{place}.png"] = png_bytes(pixels)
            yield members


def chat(num_words: int, num_images: int, rng: np.random.Generator) -> bytes:
    """The JSON of a question about images, and an answer that is a third of the text."""
    vocabulary = [*DIGITS, *words()]
    text = [vocabulary[n] for n in rng.integers(len(vocabulary), size=num_words)]
    cut = num_words - max(1, num_words // 3)
    messages = conversation(["image"] * num_images, " ".join(text[:cut]), " ".join(text[cut:]))
    return json.dumps({"messages": messages}).encode()


def write_shard(path: Path, samples: Iterable[dict[str, Any]]) -> None:
    """One tar file with the members of each sample."""
    with TarWriter(str(path), encoder=False) as tar:
        for members in samples:
            tar.write(members)


def answer_labels(tokenizer: Any, ids: Tensor, messages: Sequence[dict[str, Any]]) -> Tensor:
    """Return labels (S,) on the answer and its end, for token ids (S,) of a chat."""
    labels = torch.full_like(ids, IGNORED)
    answer = messages[-1]["content"][0]["text"]
    end = int((ids == tokenizer.convert_tokens_to_ids("<|im_end|>")).nonzero().max())
    first = end - len(tokenizer(answer, add_special_tokens=False)["input_ids"])
    labels[first : end + 1] = ids[first : end + 1]
    return labels


def our_side(workload: Workload, steps: int) -> Callable[[str], Any]:
    """Return a function that does a step of `mimo train`; call this in a process of its own."""
    from mimo.parallel.groups import build_topology
    from mimo.train.loop import Trainer  # late: it loads the engine
    from mimo.train.step import StepObserver

    set_threads(None, 1)
    keep_freed_memory()
    initialize_distributed(0, 1, HashStore(), _TIMEOUT_SECONDS)
    trainings = {}
    for lengths in GOALS:
        recipe = workload.recipe(lengths, steps)
        topology = build_topology(build_layout(recipe))
        trainer = Trainer(recipe, topology, Path(recipe.train.run_dir), initial_weights(recipe))
        dataset = open_dataset(recipe, "sources", trainer.chat, trainer.processors)
        assert dataset is not None, "the recipe has a source"
        trainings[lengths] = trainer.train(dataset, None, StepObserver())
    return lambda lengths: timed(partial(next, trainings[lengths]))


def their_side(workload: Workload) -> Callable[[str], Any]:
    """Return a function that does a step; call this in a process of its own."""
    set_threads(None, 1)
    train = workload.recipe("equal", 1).train
    trainings = {lengths: TransformersSteps(workload, lengths, train) for lengths in GOALS}
    return lambda lengths: timed(trainings[lengths].step)


class TransformersSteps:
    """Train a model of transformers with AdamW. train: settings of our recipe."""

    def __init__(self, workload: Workload, lengths: str, train: Train) -> None:
        from transformers import AutoModelForImageTextToText

        self.processor = load_processor(workload.checkpoint)
        self.processor.tokenizer.padding_side = "right"
        shard = str(workload.shard(lengths))
        samples = [*WebDataset(shard, shardshuffle=False, nodesplitter=None)]
        size = _PADDED_BATCH if lengths == "long-tailed" else len(samples)
        self.batches = [samples[at : at + size] for at in range(0, len(samples), size)]
        self.model: Any = AutoModelForImageTextToText.from_pretrained(
            str(workload.checkpoint),
            dtype=torch.float32,
            local_files_only=True,
            attn_implementation="sdpa",
        ).train()
        assert train.clip_grad_norm is not None, "the recipe clips"
        self.clip = train.clip_grad_norm
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=train.learning_rate,
            betas=(train.adam_beta1, train.adam_beta2),
            weight_decay=train.weight_decay,
            fused=True,  # as is the default of transformers' Trainer
        )

    def step(self) -> dict[str, float]:
        """Run all batches and one update; return the loss per loss token, and the real tokens."""
        batches = [self.collate(samples) for samples in self.batches]
        num_loss_tokens = sum((inputs["labels"][:, 1:] != IGNORED).sum() for inputs in batches)
        loss = 0.0
        for inputs in batches:
            output = self.model(**inputs, use_cache=False, num_items_in_batch=num_loss_tokens)
            output.loss.backward()
            loss += float(output.loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        tokens = sum(int(inputs["attention_mask"].sum()) for inputs in batches)
        return {"loss": loss, "tokens": tokens}

    def collate(self, samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Return inputs (B, S), labels (B, S) on the answers, and the pixels of all images.

        B samples of S tokens of the longest, padding included.
        """
        chats = [json.loads(sample["json"])["messages"] for sample in samples]
        files = [
            sample[name] for sample in samples for name in sorted(sample) if name.endswith("png")
        ]
        images = [Image.open(io.BytesIO(file)).convert("RGB") for file in files]
        text = self.processor.apply_chat_template(chats, tokenize=False)
        inputs = self.processor(
            images=images or None,
            text=text,
            padding=True,
            return_tensors="pt",
            add_special_tokens=False,
        )
        rows = zip(inputs["input_ids"], chats, strict=True)
        labels = [answer_labels(self.processor.tokenizer, ids, chat) for ids, chat in rows]
        return {**inputs, "labels": torch.stack(labels)}


def judge(contests: Sequence[Contest]) -> Iterator[Bound]:
    """Yield all bounds, held or missed: that both did the same work, and the speed."""
    for contest, goal in zip(contests, GOALS.values(), strict=True):
        pairs = [(a.result, b.result) for a, b in zip(*contest.runs.values(), strict=True)]
        error = max(abs(a["loss"] / b["loss"] - 1) for a, b in pairs)
        difference = max(abs(a["tokens"] - b["tokens"]) for a, b in pairs)
        name, ratio = contest.name, contest.ratio("transformers")
        yield Bound(f"{name}: relative difference of losses", error, _LOSS_ERROR, True)
        yield Bound(f"{name}: difference of real tokens", difference, 0, True)
        yield Bound(f"{name}: times faster", ratio, goal, False)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Timed steps of each contestant.")] = 4,
    quick: harness.Quick = False,
    json_path: harness.Figures = None,
) -> int:
    """Train on both sides in turns; return 1 when a bound is missed."""
    rounds = 1 if quick else rounds
    with tempfile.TemporaryDirectory(prefix="mimo-bench-") as directory:
        workload = Workload(Path(directory), **(_QUICK if quick else {}))
        with harness.workers(lambda: workload.write) as write:
            write()
        # The engine is loaded there alone: no process that has initialised a GPU can be forked.
        with (
            harness.workers(lambda: their_side(workload)) as theirs,
            # Enough steps that the last timed one still reads ahead.
            harness.workers(lambda: our_side(workload, rounds + 5)) as ours,
        ):
            contests = []
            for lengths in GOALS:
                turns = {"ours": partial(ours, lengths), "transformers": partial(theirs, lengths)}
                runs = harness.take_turns(turns, 1 + rounds)
                contests.append(Contest(lengths, {name: of[1:] for name, of in runs.items()}))
    return harness.conclude(
        f"Training steps of Qwen3-VL, {workload.num_layers} layers, hidden size "
        f"{128 * workload.width}, fp32",
        contests,
        {"tokens/s": lambda contest, name: contest.median(name, "tokens") / contest.median(name)},
        [*judge(contests)],
        json_path,
        judge_speed=not quick,
    )


if __name__ == "__main__":
    harness.command(main)()
