"""The doctor's figures are those of the samples; its page shows no stranger's HTML."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from mimo.checkpoint.hf.recipes import load_recipe
from mimo.model.dataset import (
    Dataset,
    item_processors,
    linear_tokens,
    open_dataset,
    open_tokenizer,
)
from mimo.report import doctor
from mimo.report.doctor import examine, histogram, main, pieces, read_columns, render_reports
from tests.mimo import drawings, tiny

LANES = ["language.grid.dp=2", "encoders.vision.grid.dp=2", "train.micro_batch_size=2"]
HOSTILE = '"><img src=x onerror=alert(1)><script>'


def opened(recipe: Path, *overrides: str) -> Dataset:
    loaded = load_recipe(recipe, overrides)
    dataset = open_dataset(loaded, "sources", open_tokenizer(loaded), item_processors(loaded))
    assert dataset is not None
    return dataset


def test_figures_are_those_of_the_samples_themselves(recipe: Path) -> None:
    figures, shown = examine(load_recipe(recipe, LANES), None)
    (reader,) = opened(recipe, *LANES).readers
    index = reader.index
    samples, items = range(12), range(index.num_items)
    tokens = [len(reader.sample(n).input_ids) for n in samples]
    learned = [reader.sample(n).loss_mask.sum() for n in samples]
    item_rows = [int(np.prod(reader.plan(item).row_grid)) for item in items]
    rows = [sum(item_rows[item] for item in index.items_of_sample(n)) for n in samples]
    assert (figures["samples"], figures["looked_at"], figures["shards"]) == (12, 12, 1)
    assert figures["items"] == sum(tiny.IMAGES_PER_SAMPLE) == index.num_items
    assert figures["tokens_per_sample"] == pytest.approx(sum(tokens) / 12)
    assert figures["loss_token_fraction"] == pytest.approx(sum(learned) / sum(tokens))
    text_tokens = [tokens[n] for n in samples if not tiny.IMAGES_PER_SAMPLE[n]]
    mix = {row["holds"]: row for row in figures["modality_mix"]}
    assert mix["image"]["samples"] == pytest.approx(1 - len(text_tokens) / 12)
    assert mix["text alone"]["tokens"] == pytest.approx(sum(text_tokens) / sum(tokens))
    assert (mix["image"]["rows"], mix["text alone"]["rows"]) == (1.0, 0.0)
    expected = {index.key(n): (tokens[n], rows[n]) for n in samples}
    largest = figures["largest"]
    assert all(expected[sample["key"]] == (sample["tokens"], sample["rows"]) for sample in largest)
    assert [sample["tokens"] for sample in largest] == sorted(tokens, reverse=True)[:10]

    sizes = [
        reader.decoded(item, file).size for item in items for file in index.files_of_part(item)
    ]
    for name, values in {
        "tokens of a sample": tokens,
        "text tokens of a sample": np.subtract(tokens, rows).tolist(),
        "embeddings of a sample with items": [count for count in rows if count],
        "image: embeddings of an item": item_rows,
        "image: first by second number (aspect ratio, or seconds)": [w / h for w, h in sizes],
        "image: size of a file, first number (width, or samples)": [w for w, _ in sizes],
    }.items():
        histogram = figures["histograms"][name]
        edges, counts = histogram["edges"], histogram["counts"]
        for place, (low, high) in enumerate(pairwise(edges)):
            last = place == len(counts) - 1
            inside = [low <= value < high or (last and value == high) for value in values]
            assert counts[place] == sum(inside), name
        assert sum(counts) == len(values)
        assert histogram["mean"] == pytest.approx(np.mean(values))
        assert (histogram["least"], histogram["most"]) == (min(values), max(values))

    assert len(shown) == 12
    assert {sample.title for sample in shown} == set(expected)
    assert sum(len(sample.images) for sample in shown) == index.num_items
    assert json.loads(json.dumps(figures)) == figures


def test_figures_of_steps_are_those_of_their_samples(recipe: Path) -> None:
    loaded = load_recipe(recipe, [*LANES, "train.steps=3", "train.global_batch_size=8"])
    plan = examine(loaded, None)[0]["packing"]
    dataset = opened(recipe, *LANES)
    linear = linear_tokens(loaded)
    real, imbalances = [], []
    for start in range(0, 24, 4):  # two lanes of two samples each
        _, sample = dataset.order.at(np.arange(start, start + 4))
        lengths = dataset.indexes[0].column("token_length", sample).astype(int).reshape(2, 2)
        real += lengths.sum(axis=1).tolist()
        load = (lengths * (linear + lengths)).sum(axis=1)
        imbalances.append(load.max() / load.mean())
    assert (plan["steps"], plan["samples_per_step"], plan["full"]) == (3, 8, 1.0)
    assert plan["tokens_per_microbatch"]["mean"] == pytest.approx(np.mean(real))
    assert plan["tokens_per_microbatch"]["most"] == max(real)
    assert plan["imbalance"]["language"]["mean"] == pytest.approx(np.mean(imbalances))
    assert plan["imbalance"]["language"]["worst"] == pytest.approx(max(imbalances))
    assert plan["imbalance"]["vision"]["mean"] > 1
    by_tokens = ["data.tokens_per_microbatch=128", "train.micro_batch_size=1"]
    plan = examine(load_recipe(recipe, [*by_tokens, "language.grid.cp=2"]), None)[0]["packing"]
    assert plan["of_budget"] == pytest.approx(plan["tokens_per_microbatch"]["mean"] / 128)
    assert 0.5 < plan["full"] < 1


def test_images_to_draw_are_counted_shown_and_dealt_out_to_lanes(tmp_path: Path) -> None:
    path = drawings.write_recipe(tmp_path)
    lanes = ["language.grid.dp=2", "generators.image.grid.dp=2", "train.micro_batch_size=2"]
    size = ["train.global_batch_size=8"]
    figures, shown = examine(load_recipe(path, [drawings.GENERATOR, *lanes, *size]), None)
    counts = [len(sizes) for sizes in drawings.DRAWN]
    mix = {row["holds"]: row["samples"] for row in figures["modality_mix"]}
    both, drawn = "image + output.image", "output.image"
    assert mix[both] + mix[drawn] == sum(map(bool, counts)) / len(counts)
    assert figures["histograms"]["output.image: embeddings of an item"]["most"] == 3
    assert figures["packing"]["imbalance"]["image"]["mean"] >= 1
    assert sum(len(sample.images) for sample in shown) == sum(counts) + 2
    assert render_reports([("tiny", (figures, shown))]).count("data:image") == sum(counts) + 2


def test_a_bounded_number_of_samples_is_read_from_a_large_index(recipe: Path) -> None:
    columns = read_columns(opened(recipe), most=5)
    assert 0 < len(columns.sample) <= 5
    assert len(np.unique(columns.sample)) == len(columns.sample)


def test_a_histogram_has_every_value_once() -> None:
    rng = np.random.default_rng(0)
    for values in (
        np.array([7]),
        np.array([1, 2, 2, 30]),
        rng.integers(1, 10**6, 1000),
        rng.random(100) * 1000,
        np.array([0.1] * 3),
    ):
        counted = histogram(values)
        assert counted is not None
        assert sum(counted["counts"]) == len(values)
        assert counted["edges"] == sorted(counted["edges"])
    assert histogram(np.array([0, 0])) is None


def test_pieces_mark_special_and_learned_tokens(recipe: Path) -> None:
    (reader,) = opened(recipe).readers
    parts = pieces(reader.chat, reader.sample(0))
    texts = "".join(part.text * part.times for part in parts)
    # The words of this tokenizer stand between blanks.
    assert texts.replace(" ", "") == reader.chat.text(reader.sample(0).input_ids).replace(" ", "")
    learned = [part for part in parts if part.learned]
    assert sum(part.special for part in learned) == 1  # the end of the answer
    assert learned[-1].text == "<|im_end|>"
    rows = sum(part.times for part in parts if part.text == "<|image_pad|>")
    assert rows == sum(np.prod(reader.plan(i).row_grid) for i in reader.index.items_of_sample(0))
    special = Counter(part.text for part in parts if part.special)
    assert special["<|im_start|>"] == 2


def test_the_page_needs_no_other_file_and_escapes_hostile_texts(
    recipe: Path, tmp_path: Path
) -> None:
    shard = tmp_path / "train-00001.tar"
    bad = {"messages": [{"role": HOSTILE}]}
    asked = [{"role": "user", "content": HOSTILE}, {"role": "assistant", "content": HOSTILE}]
    with tarfile.open(shard, "w") as tar:
        for name, document in ((f"a{HOSTILE}", bad), (f"b{HOSTILE}", {"messages": asked})):
            data = json.dumps(document).encode()
            member = tarfile.TarInfo(f"{name}.json")
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    page, figures = tmp_path / "out" / "page.html", tmp_path / "out" / "figures.json"
    assert main(recipe, [], None, page, figures) == 0
    text = page.read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:image/jpeg;base64,)""", text)
    assert not re.search(r"<(script|link|iframe)|url\(", text)
    assert text.count("<img") == sum(tiny.IMAGES_PER_SAMPLE)
    assert "onerror=alert(1)&gt;" in text
    (report,) = json.loads(figures.read_text())
    assert report["bad"]["in_index"] == 1
    assert [bad["key"] for bad in report["bad"]["named"]] == [f"a{HOSTILE}"]


def test_long_texts_of_samples_are_cut(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_SHOWN_CHARACTERS", 5)
    _, shown = examine(load_recipe(recipe), None)
    texts = {"".join(piece.text for piece in sample.pieces) for sample in shown}
    assert texts == {"<|im_ …"}


def test_unreadable_samples_are_named_beside_those_of_the_index(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = recipe.parent / "train-00000.tar"
    data = bytearray(shard.read_bytes())
    first = data.index(b"IDAT")
    data[first + 8 : first + 40] = bytes(32)
    shard.write_bytes(data)
    monkeypatch.setattr(doctor, "_RENDERED", 3)
    figures, shown = examine(load_recipe(recipe), None)
    bad = figures["bad"]
    assert (bad["in_index"], bad["read"], bad["unreadable"]) == (0, 12, 1)
    (named,) = bad["named"]
    assert (named["key"], named["item"]) == ("sample0000", 0)
    assert len(shown) == 3
    assert "sample0000" not in {sample.title for sample in shown}
