"""`mimo generate` and `mimo evaluate` with the checkpoint of a whole run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from webdataset.writer import TarWriter

from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.errors import InputError
from mimo.report.run import report as main_of_report
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.model.test_fsdp_runs import make
from tests.mimo.runs import ADAM, corrupt, mimo, mimo_here, run


@pytest.mark.slow
def test_generate_answers_from_a_run_of_any_layout_and_leaves_no_temporary_files(
    run_ranks: RunRanks, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = recipe.parent / "image.png"
    Image.new("L", (56, 28), 128).save(image)
    run(run_ranks, recipe, "train.steps=1", "language.grid.pp=2", "language.grid.tp=2")
    folder = recipe.parent / "runs" / "tiny"
    (temporary := recipe.parent / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    done = mimo("generate", folder, "--image", image, "--prompt", "what is this ?")
    assert not [*temporary.glob("*mimo*")]
    # No notice of a library either: the engine loads, and reads the checkpoint, in this process.
    assert (done.returncode, done.stderr) == (0, "")
    (expected,) = run_ranks(_answer, 1, folder, image)
    assert done.stdout.strip() == expected.strip()


def _answer(rank: int, folder: Path, image: Path) -> str:
    """Decode greedily by the definition: one whole forward per token, one sample at a time."""
    from mimo.generate.answer import Generator, Request

    generator = Generator(folder)
    content = [{"type": "image"}, {"type": "text", "text": "what is this ?"}]
    request = Request([{"role": "user", "content": content}], [Image.open(image).convert("RGB")])
    other = Request([{"role": "user", "content": [{"type": "text", "text": "hello"}]}], [])
    alone = generator.answer([request], 64)
    # Other samples of the pack change nothing.
    assert generator.answer([other, request, other], 64)[1] == alone[0]
    return alone[0]


def test_two_encoders_answer_about_items_of_both(run_ranks: RunRanks, tmp_path: Path) -> None:
    tiny.write_samples(tmp_path, videos_per_sample=tiny.VIDEOS_PER_SAMPLE)
    recipe = tiny.write_recipe(tmp_path)
    test = f"data.test=[{{path: '{tmp_path}/train-*.tar'}}]"
    run(run_ranks, recipe, tiny.SECOND_ENCODER, "train.steps=1", test)
    run_ranks(_answer_both, 1, tmp_path / "runs" / "tiny")


def _answer_both(rank: int, folder: Path) -> None:
    from mimo.generate.answer import Generator, Request
    from mimo.generate.evaluate import answer_split

    generator = Generator(folder)
    items = [Image.linear_gradient("L").resize(size) for size in ((56, 28), (28, 56), (28, 28))]
    media = ["video", "image", "video"]

    def request(*numbers: int) -> Request:
        content = [{"type": media[n]} for n in numbers] + [{"type": "text", "text": "read"}]
        return Request([{"role": "user", "content": content}], [items[n] for n in numbers])

    requests = [request(0, 1, 2), request(2), request(1), request(), request(1, 0)]
    # Other samples of the pack change nothing.
    assert generator.answer(requests, 8) == [generator.answer([r], 8)[0] for r in requests]
    answered = list(answer_split(folder))
    numbers = zip(tiny.IMAGES_PER_SAMPLE, tiny.VIDEOS_PER_SAMPLE, strict=True)
    assert [len(sample.pictures) for sample in answered] == [sum(both) for both in numbers]
    _check_that_samples_are_read_as_they_are_answered(folder, answered)


def _check_that_samples_are_read_as_they_are_answered(folder: Path, expected: list) -> None:
    from data.index.reader import SampleReader
    from mimo.generate import evaluate
    from mimo.generate.answer import Generator

    budget, events = 100, []
    read, respond = SampleReader.decoded, Generator.respond

    def reads(self: SampleReader, *arguments: int) -> Any:
        events.append("file")
        return read(self, *arguments)

    def responds(self: Generator, requests: list, *arguments: Any) -> list[Any]:
        num_tokens = sum(len(self._encode_prompt(r).sample.input_ids) + 4 for r in requests)
        assert len(requests) == 1 or num_tokens <= budget
        events.append(len(requests))
        return respond(self, requests, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evaluate, "BATCH_TOKENS", budget)
        patch.setattr(SampleReader, "decoded", reads)
        patch.setattr(Generator, "respond", responds)
        answered = list(evaluate.answer_split(folder, "test", 4))
    assert [sample.expected for sample in answered] == [sample.expected for sample in expected]
    sizes = [event for event in events if event != "file"]
    assert (len(sizes) > 2, max(sizes) > 1, sum(sizes)) == (True, True, len(expected))
    # Of the images of later batches, those of one sample at most have been read.
    num_files = [len(sample.pictures) for sample in expected]
    assert events.index(sizes[0]) <= sum(num_files[: sizes[0]]) + max(num_files)


def _write_odd_samples(path: Path) -> None:
    """Write a chat that ends with a question, and one whose answer is an image."""
    user, assistant = {"role": "user", "content": "read"}, {"role": "assistant", "content": "3"}
    drawn = {"role": "assistant", "content": [{"type": "image"}]}
    picture = np.zeros((28, 28), np.uint8)
    with TarWriter(str(path)) as tar:
        tar.write({"__key__": "open", "json": {"messages": [user, assistant, user]}})
        tar.write({"__key__": "drawn", "json": {"messages": [user, drawn]}, "0.png": picture})


def test_evaluate_writes_every_answer_and_prints_which_samples_count(
    run_ranks: RunRanks, recipe: Path
) -> None:
    tiny.write_samples(recipe.parent, (1,) * 14 + (0,) * 3, name="test")
    corrupt(recipe, "test")
    _write_odd_samples(recipe.parent / "test-00001.tar")
    test = f"data.test=[{{path: '{recipe.parent}/test-*.tar'}}]"
    run(run_ranks, recipe, "train.steps=1", test, "data.metrics=[contains, anls]")
    folder = recipe.parent / "runs" / "tiny"
    ((printed, last),) = run_ranks(_evaluate_by_command, 1, folder)
    damaged, open_ended, in_pictures, scored, answers, _, line = printed.splitlines()[-7:]
    assert damaged.startswith("skipped sample 'sample0000' of ")
    assert "test-00000.tar, item 0: the image cannot be decoded" in damaged
    reason = "the chat does not end with a question and an answer of text or drawn images"
    assert open_ended.startswith("skipped sample 'open' of ")
    assert open_ended.endswith(f"test-00001.tar: {reason}")
    assert in_pictures.endswith(f"test-00001.tar: {reason}")
    left_out = "3: text alone, where others have items"
    assert scored.startswith(f"scored 13 of 19 samples, left out 6 ({left_out}; 1: the image ")
    assert f"; 2: {reason}" in scored
    assert answers == f"answers: {folder}/held_out_test.jsonl"
    lines = [json.loads(line) for line in (folder / "held_out_test.jsonl").read_text().splitlines()]
    assert [sample["key"] for sample in lines] == [f"sample{number:04d}" for number in range(1, 17)]
    assert [sample["items"] for sample in lines] == [1] * 13 + [0] * 3
    for sample in lines:
        assert sample["scores"].keys() == {"exact", "relaxed_number"}, "of the last call"
        is_right = sample["answer"].split() == sample["expected"].split()
        assert sample["scores"]["exact"] == is_right
    assert lines[0]["question"] == "what is this ?"
    document = json.loads((folder / "held_out_test.json").read_text())
    assert (document["scored"], sum(document["left_out"].values())) == (13, 6)
    assert last == " ".join(f"{name}={document[name]:.3f}" for name in document["metrics"])
    assert [score.partition("=")[0] for score in line.split()] == ["contains", "anls"]
    assert main_of_report(folder, None) == 0
    page = (folder / "report.html").read_text()
    assert "relaxed_number" in page
    assert left_out.partition(": ")[2] in page


def _evaluate_by_command(rank: int, folder: Path) -> tuple[str, str]:
    """Return what `mimo evaluate` prints, and its last line with other metrics."""
    from typer.testing import CliRunner

    from mimo.cli.main import app

    command, others = ["evaluate", str(folder)], ["--metric", "exact", "--metric", "relaxed_number"]
    first = CliRunner().invoke(app, [*command, "--max-new-tokens", "3"])
    again = CliRunner().invoke(app, [*command, "--max-new-tokens", "3", *others])
    assert (first.exit_code, again.exit_code) == (0, 0), (first.output, again.output)
    wrong = CliRunner().invoke(app, [*command, "--metric", "exakt"])
    assert wrong.exit_code == 2
    assert wrong.stderr == "--metric exakt: did you mean 'exact'?\n"
    return first.stdout, again.stdout.splitlines()[-1]


def test_option_ema_answers_with_the_average_of_the_weights(
    run_ranks: RunRanks, recipe: Path
) -> None:
    test = f"data.test=[{{path: '{recipe.parent}/train-*.tar'}}]"
    run(run_ranks, recipe, *ADAM, "train.steps=1", "train.ema_decay=0.5", test)
    run_ranks(_evaluate_average, 1, recipe.parent / "runs" / "tiny")


def _evaluate_average(rank: int, folder: Path) -> None:
    import torch
    from typer.testing import CliRunner

    from mimo.checkpoint import reading
    from mimo.cli.main import app
    from mimo.generate.answer import Generator
    from mimo.generate.drawing import Answer

    checkpoint = folder / "checkpoints" / "step_1"
    stored = reading.read(checkpoint)
    key = "language.decoder.layers.0.mlp.linear_fc1.weight"
    assert not torch.equal(stored[key], stored[f"ema.{key}"])
    used = []

    def respond(self: Generator, requests: list, *_: object) -> list[Answer]:
        pieces = self.model.model.modules["language"].pieces("load", with_optimizer=False)
        used.extend(piece.values.clone() for piece in pieces if piece.key == key)
        return [Answer(())] * len(requests)

    for options, expected in (([], stored[key]), (["--ema"], stored[f"ema.{key}"])):
        used.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Generator, "respond", respond)
            done = CliRunner().invoke(app, ["evaluate", str(folder), *options])
        assert done.exit_code == 0, done.output
        assert used
        assert all(torch.equal(weight, expected) for weight in used), options


def test_generate_uses_the_checkpoints_copies_of_tokenizer_template_and_configuration(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    recipe = make(tmp_path, "qwen3_vl")
    tokenizer = tmp_path / "tokenizer"  # another folder than the model's
    run(run_ranks, recipe, "train.steps=1", f"data.tokenizer={tokenizer}")
    run_ranks(_answer_after_changes, 1, tmp_path, tmp_path / "runs" / "run")


def _answer_after_changes(rank: int, directory: Path, folder: Path) -> None:
    from mimo.generate.answer import Generator

    def opened() -> tuple[list[int], str, dict]:
        generator = Generator(folder)
        sample = generator.chat.encode_prompt([{"role": "user", "content": "read 3 7"}], [])
        return sample.input_ids.tolist(), generator.chat.template, generator.processors

    base, tokenizer = directory / "base", directory / "tokenizer"
    before = opened()
    template = tokenizer / "chat_template.jinja"
    template.write_text("{{ 'Answer!' }}" + template.read_text())
    known = json.loads((tokenizer / "tokenizer.json").read_text())
    vocabulary = known["model"]["vocab"]
    vocabulary["3"], vocabulary["7"] = vocabulary["7"], vocabulary["3"]
    (tokenizer / "tokenizer.json").write_text(json.dumps(known))
    write_tiny(TinyCheckpoint("gemma3"), directory / "other")  # another model, of another family
    base.rename(directory / "was")
    (directory / "other").rename(base)
    assert opened() == before
    shutil.rmtree(base)
    shutil.rmtree(tokenizer)
    assert opened() == before


def test_evaluate_allows_the_longest_answer_and_cuts_at_max_new_tokens(
    run_ranks: RunRanks, recipe: Path
) -> None:
    roles, digits = ("user", "assistant", "user", "assistant"), " ".join("0123456789" * 3)
    chats = [
        [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        for texts in (("see", "3", "read", "3 7"), ("see", "3", "write", digits))
    ]
    with TarWriter(str(recipe.parent / "test-00000.tar")) as tar:
        for number, messages in enumerate(chats):
            tar.write({"__key__": str(number), "json": {"messages": messages}})
    test = f"data.test=[{{path: '{recipe.parent}/test-*.tar'}}]"
    run(run_ranks, recipe, "train.steps=1", "data.sequence_length=48", test)
    run_ranks(_evaluate_long_answers, 1, recipe.parent / "runs" / "tiny", chats)


def _evaluate_long_answers(rank: int, folder: Path, chats: list[list[dict]]) -> None:
    from mimo.generate.answer import Generator
    from mimo.generate.evaluate import answer_split

    expected = [messages[-1]["content"].split() for messages in chats]
    longest = len(expected[1])
    steps: list[int] = []

    def answers(token: Callable[[Generator, list[int]], int], limit: int | None) -> list[list[str]]:
        """Return the answers of a model that writes ``token`` after its sequence."""

        def next_tokens(
            self: Generator, requests: list[int], sequences: list[list[int]], *_: object
        ) -> list[int]:
            steps.append(max(len(sequences[r]) for r in requests))
            return [token(self, sequences[r]) for r in requests]

        steps.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Generator, "_next_tokens", next_tokens)
            return [sample.answer.split() for sample in answer_split(folder, "test", limit)]

    def knows(self: Generator, sequence: list[int]) -> int:
        for messages in chats:
            whole = self.chat.encode(messages, [], "k").input_ids.tolist()
            if whole[: len(sequence)] == sequence:
                return whole[len(sequence)]
        raise AssertionError("no sample goes on like this")

    def babbles(self: Generator, sequence: list[int]) -> int:
        nine = self.chat.encode_prompt([{"role": "user", "content": "9"}], []).input_ids
        return next(token for token in nine.tolist() if self.chat.decode([token]) == "9")

    assert answers(knows, None) == expected
    assert len(steps) == longest + 1, "the longest answer and its end of turn"
    assert answers(knows, 5) == [expected[0], expected[1][:5]]
    # Answers that do not end are cut at the sequence length; prompts have 14 tokens.
    assert answers(babbles, 1000) == [["9"] * (48 - 14)] * 2
    assert steps == [*range(14, 48)]


AT_MOST_TWO_IMAGES = """\
{%- if messages[0]['content'] | selectattr('type', 'equalto', 'image') | list | length > 2 -%}
{{ raise_exception('at most two images, please') }}{%- endif -%}
"""


def test_generate_refuses_bad_input_of_tokenizer_template_or_processor(
    run_ranks: RunRanks, recipe: Path
) -> None:
    template = recipe.parent / "tokenizer" / "chat_template.jinja"
    template.write_text(AT_MOST_TWO_IMAGES + template.read_text())
    run(run_ranks, recipe, "train.steps=1")
    run_ranks(_generate_from_bad_input, 1, recipe.parent / "runs" / "tiny")


def _generate_from_bad_input(rank: int, folder: Path) -> None:
    from mimo.generate.answer import Generator, ItemFiles, Request, main

    good, long = folder / "good.png", folder / "long.png"
    Image.new("L", (28, 28)).save(good)
    Image.new("L", (2010, 10)).save(long)
    for images, prompt, message in (
        ([good], "what is <|image_pad|> ?", "^--prompt: '<|image_pad|>' stands for an item"),
        ([good, long], "what is this ?", r"^--image .*long\.png: .* aspect ratio of 201"),
        ([good] * 3, "what is this ?", "^the prompt cannot be answered: .*at most two images"),
    ):
        with pytest.raises(InputError, match=message.replace("|", r"\|")) as caught:
            main(folder, [ItemFiles("--image", "image", [path]) for path in images], prompt, 1)
        assert caught.value.exit_code == 2
    assert main(folder, [ItemFiles.parse("--item", f"image={good}")] * 2, "what is this ?", 1) == 0
    request = Request([{"role": "user", "content": [{"type": "image"}]}], [])
    with pytest.raises(InputError, match="1 placeholders but 0 items"):
        Generator(folder).answer([request], 1)
    with pytest.raises(InputError, match=r"^sample 'a' of b\.tar cannot be answered: "):
        Generator(folder).answer([replace(request, name="sample 'a' of b.tar")], 1)


def test_generate_without_a_checkpoint_is_bad_input(run_ranks: RunRanks, tmp_path: Path) -> None:
    done = mimo_here(run_ranks, "generate", tmp_path, "--prompt", "what is this ?")
    assert done.exit_code == 2
    assert done.stderr.startswith(f"{tmp_path}: no checkpoint there")
