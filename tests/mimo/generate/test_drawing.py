"""Drawing: the maths of diffusers' pipeline, texts and images in order, options, and scores."""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from data.index.reader import SampleReader
from data.text.chat import ChatTokenizer
from data.text.digits import write_tokenizer
from data.text.outputs import OutputText
from mimo.checkpoint.assets import portable_recipe
from mimo.checkpoint.folder import find_checkpoint
from mimo.checkpoint.hf.initial import convert_from_hf
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.checkpoint.hf.tiny import TinyCheckpoint, write_tiny
from mimo.config.schema import Recipe
from mimo.errors import InputError
from mimo.families.flow import pack
from mimo.generate.drawing import Drawing, parse_size
from mimo.report.run import report
from tests.cases import quick, quick_values
from tests.conftest import RunRanks
from tests.mimo import drawings, tiny
from tests.mimo.runs import ADAM, run

# ------------------------------------------------------------- against the pipeline

H = 128  # of the tiny folder's hidden states
SIZE = (48, 32)
STEPS = 3


@pytest.mark.parametrize("guidance", quick_values({"1.0": 1.0, "3.5": 3.5}, "3.5"))
def test_sampling_is_that_of_the_pipeline(
    run_ranks: RunRanks, tmp_path: Path, guidance: float
) -> None:
    """Conditions of two lengths are drawn together, and by the pipeline one by one."""
    write_tiny(TinyCheckpoint("qwen_image"), tmp_path / "model")
    convert_from_hf(tmp_path / "model", tmp_path / "ours")
    generator = torch.Generator().manual_seed(0)
    conditions = [torch.randn(rows, H, generator=generator) for rows in (5, 3)]
    how = Drawing(STEPS, guidance, seed=7, size=SIZE)
    ((latents, images),) = run_ranks(draw_with_folder, 1, tmp_path / "ours", conditions, how)
    kind: Any = importlib.import_module("diffusers").QwenImagePipeline
    pipeline = kind.from_pretrained(tmp_path / "model", low_cpu_mem_usage=False)
    pipeline.set_progress_bar_config(disable=True)
    for number, (condition, latent, image) in enumerate(
        zip(conditions, latents, images, strict=True)
    ):
        size = SIZE[0] // 16 * SIZE[1] // 16, pipeline.transformer.config.in_channels
        philox = np.random.Philox(key=7, counter=[0, number, 0, 0])
        noise = np.random.Generator(philox).standard_normal(size, dtype=np.float32)
        mask = torch.ones(1, len(condition), dtype=torch.long)
        drawn = pipeline(
            prompt_embeds=condition[None],
            prompt_embeds_mask=mask,
            # No condition: a row that nothing sees, as the module takes one at least.
            negative_prompt_embeds=torch.zeros(1, 1, H),
            negative_prompt_embeds_mask=torch.zeros(1, 1, dtype=torch.long),
            true_cfg_scale=guidance,
            width=SIZE[0],
            height=SIZE[1],
            num_inference_steps=STEPS,
            latents=torch.from_numpy(noise)[None],
            output_type="latent",
        ).images
        torch.testing.assert_close(pack(latent[None]), drawn, rtol=1e-4, atol=1e-4)
        assert image.shape == (SIZE[1], SIZE[0], 3)
        assert image.dtype == np.uint8
        assert 5 < image.std() < 120


def draw_with_folder(
    rank: int, checkpoint: Path, conditions: list[Tensor], how: Drawing
) -> tuple[Tensor, list[np.ndarray]]:
    from mimo.checkpoint.resume import open_checkpoint
    from mimo.generate.drawing import Drawer
    from mimo.generate.one_rank import LocalModel
    from mimo.model.dataset import open_tokenizer

    keys = ["generators.image.condition_dropout=0.1"]
    recipe = load_recipe(checkpoint / "recipe.yaml", keys)
    stored, chat = open_checkpoint(checkpoint), open_tokenizer(recipe)
    local = LocalModel.from_checkpoint(checkpoint, recipe, stored, chat.vocab_size)
    drawer = Drawer(recipe, "image", chat, local.model.modules["image"])
    assert drawer.autoencoder is not None
    decode, latents = drawer.autoencoder.decode, list[Tensor]()

    def keep(values: Tensor) -> Tensor:
        latents.append(values)
        return decode(values)

    drawer.autoencoder.decode = keep  # type: ignore[method-assign]
    images = drawer.draw(conditions, how)
    return torch.cat(latents), images


# ------------------------------------------------------------------ whole answers

CASES = {
    "queries": ["generators.image.condition_dropout=0.1"],
    "prompt": ["generators.image.condition=prompt", "generators.image.skipped_tokens=2"],
}
# Each sample's images; texts stand before those of odd samples.
ANSWERS = [[(8, 8)], [(8, 8), (8, 8)], [], [(4, 8)], [(8, 4)]]


@pytest.fixture(scope="module", params=quick(CASES, "queries"))
def trained(
    request: pytest.FixtureRequest, run_ranks: RunRanks, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The folder of a run of one step."""
    directory = tmp_path_factory.mktemp(request.param)
    path = drawings.write_recipe(directory)
    drawings.write_samples(directory, ANSWERS, "test")
    settings = [*ADAM, drawings.GENERATOR, "train.steps=1", *CASES[request.param]]
    settings += ["train.global_batch_size=8", "train.micro_batch_size=4"]
    run(run_ranks, path, *settings, f"data.test=[{{path: '{directory}/test-*.tar'}}]")
    return directory / "runs" / "tiny"


def samples_to_answer(run_dir: Path) -> tuple[Recipe, SampleReader]:
    """The recipe of a run's checkpoint, and its test split."""
    recipe = portable_recipe(find_checkpoint(run_dir))
    data = recipe.data.model_copy(update={"sources": recipe.data.test})
    (reader,) = tiny.open_sources(recipe.model_copy(update={"data": data})).readers
    return recipe, reader


def test_answers_have_texts_and_images_in_the_order_of_training(
    run_ranks: RunRanks, trained: Path
) -> None:
    run_ranks(answer_and_compare, 1, trained)


def answer_and_compare(rank: int, run_dir: Path) -> None:
    from mimo.generate.answer import Generator, Request
    from mimo.generate.drawing import Drawer
    from mimo.generate.one_rank import LocalModel
    from tests.mimo.generate.forced import forced, known

    generator, (recipe, reader) = Generator(run_dir), samples_to_answer(run_dir)
    encoded = [reader.sample(number) for number in range(len(ANSWERS))]
    requests = []
    for number in range(len(ANSWERS)):
        *asked, _ = reader.messages(number)
        items = list(reader.index.parts_of_sample(number))[: int(number % 4 == 1)]
        files = [reader.decoded(i, f) for i in items for f in reader.index.files_of_part(i)]
        requests.append(Request(asked, files))
    lanes, conditions = list[Any](), list[Tensor]()
    hidden_states, draw = LocalModel.hidden_states, Drawer.draw

    def keep_lane(self: LocalModel, lane: Any, rows: Any) -> Tensor:
        lanes.append((lane, hidden_states(self, lane, rows)))
        return lanes[-1][1]

    def keep_conditions(self: Drawer, given: Sequence[Tensor], how: Drawing) -> list[np.ndarray]:
        conditions.extend(given)
        return draw(self, given, how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalModel, "hidden_states", keep_lane)
        patch.setattr(Drawer, "draw", keep_conditions)
        with forced(known([sample.input_ids.tolist() for sample in encoded])):
            answers = generator.respond(requests, 64, how=Drawing(steps=2))
            texts = generator.answer(requests, 64)
    kinds = [[part if isinstance(part, str) else part.shape for part in a.parts] for a in answers]
    image = (8, 8, 3)  # the largest square, whatever the size of the truth
    assert kinds == [[image], ["3", image, "3", image], ["3 7"], ["3", image], [image]]
    assert texts == ["", "3 3", "3 7", "3", ""]
    # What is drawn from stands in tokens, and at the places, of training.
    ((lane, hidden),) = lanes
    drawn = [n for n, sizes in enumerate(ANSWERS) if sizes]
    parts = np.split(lane.input_ids, np.cumsum(lane.lengths)[:-1])
    start, expected = 0, list[Tensor]()
    for part, sample in zip(parts, (encoded[n] for n in drawn), strict=True):
        # The end of the turn is the last token of an answer; the template goes on behind it.
        assert part.tolist() == sample.input_ids[: len(part)].tolist()
        for first, rows in zip(
            sample.item_offsets.tolist(), sample.item_rows.tolist(), strict=True
        ):
            expected.append(hidden[start + first : start + first + rows])
        start += len(part)
    del expected[1]  # the picture that the second sample reads
    assert len(conditions) == len(expected) == 5
    for got, wanted in zip(conditions, expected, strict=True):
        torch.testing.assert_close(got, wanted)
    if recipe.generators["image"].num_queries:
        assert [(media, count) for media, _, count in lane.queries] == [("output.image", 3)] * 5
        assert not any(torch.equal(conditions[0], other) for other in conditions[1:])


def test_generate_saves_images_and_its_options_change_them(
    run_ranks: RunRanks, trained: Path, tmp_path: Path
) -> None:
    run_ranks(generate_by_command, 1, trained, tmp_path)


def generate_by_command(rank: int, run_dir: Path, folder: Path) -> None:
    from typer.testing import CliRunner, Result

    from mimo.cli.main import app
    from mimo.model.dataset import open_tokenizer
    from tests.mimo.generate.forced import forced

    recipe = portable_recipe(find_checkpoint(run_dir))
    chat = open_tokenizer(recipe)
    start, end = chat.output_ids["output.image"]
    (stop, *_) = chat.stop_token_ids

    def token(sequence: list[int]) -> int:
        """Draw twice, then end."""
        return start if sequence.count(end) < 2 else stop

    def call(*options: str) -> Result:
        arguments = ["generate", str(run_dir), "--prompt", "draw", "--output", str(folder)]
        with forced(token):
            return CliRunner().invoke(app, [*arguments, "--steps", "2", *options])

    def images(*options: str) -> list[np.ndarray]:
        done = call(*options)
        assert done.exit_code == 0, done.output
        paths = [folder / f"drawn_{number}.png" for number in range(2)]
        assert done.stdout.splitlines() == [*map(str, paths)]
        return [np.asarray(Image.open(path)) for path in paths]

    has_queries = recipe.generators["image"].num_queries > 0
    if not has_queries:
        # Between two images without a text there is no condition, and still one to start from.
        assert len(images()) == 2
        refused = call("--guidance", "2")
        assert refused.exit_code == 2
        assert (
            "--guidance 2: generators.image was trained with condition_dropout 0" in refused.stderr
        )
        return
    first, second = images()
    assert first.shape == (8, 8, 3)
    assert not np.array_equal(first, second)
    assert np.array_equal(images()[0], first), "the seed is 0"
    assert not np.array_equal(images("--seed", "1")[0], first)
    assert not np.array_equal(images("--guidance", "4")[0], first)
    assert images("--size", "12x6")[0].shape == (6, 12, 3)
    refused = call("--size", "9x8")
    assert refused.exit_code == 2
    assert refused.stderr.strip() == "--size 9x8: needs multiples of 2 pixels"
    assert call("--size", "9").exit_code == 2
    assert call("--output", str(folder / "new" / "folder")).exit_code == 0
    assert (folder / "new" / "folder" / "drawn_1.png").is_file()
    refused = call("--output", str(folder / "drawn_0.png"))
    assert refused.exit_code == 2
    assert f"--output {folder}/drawn_0.png: drawn_0.png cannot be written: " in refused.stderr


@pytest.mark.parametrize("text", ["8", "8x", "0x8", "8x-2", "axb", "8x8x8", "123456x8"])
def test_a_size_has_width_and_height(text: str) -> None:
    with pytest.raises(InputError, match=f"^--size {text}: need width and height"):
        parse_size(text)
    assert parse_size("1024x768") == (1024, 768)


def test_evaluate_saves_what_was_drawn_and_scores_the_texts(
    run_ranks: RunRanks, trained: Path
) -> None:
    (printed,) = run_ranks(evaluate_by_command, 1, trained)
    lines = [
        json.loads(line) for line in (trained / "held_out_test.jsonl").read_text().splitlines()
    ]
    assert [line["key"] for line in lines] == [f"sample{n:04d}" for n in range(len(ANSWERS))]
    for line, sizes in zip(lines, ANSWERS, strict=True):
        if not sizes:
            assert line["scores"] == {"exact": 1.0, "per_word": 1.0}
            assert "drawn" not in line
            continue
        assert "scores" not in line
        assert line["asked"] == len(line["drawn"]) == len(sizes)
        for number, path in enumerate(line["drawn"]):
            assert path == f"drawn_test/test-00000_{line['key']}.{number}.png"
            assert Image.open(trained / path).size == (8, 8)
    drawn = sorted(path.name for path in (trained / "drawn_test").iterdir())
    assert drawn == sorted(Path(path).name for line in lines for path in line.get("drawn", ()))
    assert "scored 1 of 5 samples, left out 4" in printed
    assert f"beside the truth: {trained}/drawn_test.png" in printed
    assert printed.splitlines()[-1] == "exact_match=1.000 per_word=1.000"
    assert report(trained, None) == 0
    assert "<figcaption>drawn_test" in (trained / "report.html").read_text()


def evaluate_by_command(rank: int, run_dir: Path) -> str:
    from typer.testing import CliRunner

    from mimo.cli.main import app
    from tests.mimo.generate.forced import forced, known

    _, reader = samples_to_answer(run_dir)
    whole = [reader.sample(number).input_ids.tolist() for number in range(len(ANSWERS))]
    with forced(known(whole)):
        done = CliRunner().invoke(app, ["evaluate", str(run_dir), "--steps", "2"])
    assert done.exit_code == 0, done.output
    return done.stdout


# --------------------------------------------------------------- the quickstart's judge


def test_the_judge_counts_digits_that_were_drawn_as_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from examples.digits import judge
    from examples.digits.scans import load_scans

    scans, digits = load_scans("test")
    (tmp_path / "drawn_test").mkdir()
    lines, numbers = list[str](), [3, 5, 8, 13]
    for number in numbers:
        path = f"drawn_test/{number}.png"
        Image.fromarray(np.stack([scans[number][1:-1, 1:-1]] * 3, axis=-1)).save(tmp_path / path)
        question = f"draw the digit {digits[number]} ."
        lines.append(json.dumps({"question": question, "drawn": [path]}))
    wrong = (int(digits[3]) + 1) % 10
    lines.append(json.dumps({"question": f"draw a {wrong} .", "drawn": ["drawn_test/3.png"]}))
    # Nothing was drawn; of two digits only the first; and a sample that is read.
    lines.append(json.dumps({"question": "draw a 3 .", "drawn": []}))
    question = f"draw {digits[5]} then 7 ."
    lines.append(json.dumps({"question": question, "drawn": ["drawn_test/5.png"]}))
    lines.append(json.dumps({"question": "read 9 .", "scores": {"exact": 1.0}}))
    (tmp_path / "held_out_test.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "held_out_test.json").write_text('{"exact_match": 0.5, "per_word": 0.75}')
    assert judge.share_drawn_right(tmp_path) == 5 / 8
    judge.main(tmp_path)
    assert capsys.readouterr().out == "exact_match=0.500 per_digit=0.750 drawn=0.625\n"


def test_the_length_of_an_answer_counts_text_before_its_images(tmp_path: Path) -> None:
    from mimo.generate.evaluate import _answer_length

    write_tokenizer(tmp_path)
    chat = ChatTokenizer(tmp_path, {}, {"output.image": OutputText("<draw>", "</draw>")})
    answered = [{"type": "text", "text": "1 2 3 4 5"}, {"type": "image"}]
    asked = [{"type": "text", "text": "read"}]
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    for messages in (turns, [*turns, *turns]):
        sample = chat.encode(messages, [3] * (len(messages) // 2), "k")
        # Five words, the start, the end, and the end of the turn.
        assert _answer_length(sample, chat.eos_token_id) == 8
