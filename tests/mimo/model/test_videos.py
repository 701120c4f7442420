"""Parts of several files and items train as on one rank in any layout, and can be answered."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data.text.digits import write_tokenizer
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.errors import InputError
from tests.cases import quick
from tests.conftest import RunRanks
from tests.mimo import tiny
from tests.mimo.model.test_parity import check
from tests.mimo.runs import run

# Frames of each video and images (0) of each sample, in order of mention.
SAMPLES = ((3, 0), (), (0,), (0, 4, 0), (), (), (), (), (1, 5), (0, 0), (2,), (0, 2, 2))
SIZES = ((28, 28), (56, 28), (28, 56), (84, 28))

# One tower for images and videos, as checkpoints have it.
OTHER_MEDIA = "encoders.vision.other_media={video: {placeholder: '<|video_pad|>'}}"
_TOWER = (
    "num_layers: 2, hidden_size: 16, ffn_hidden_size: 24, num_attention_heads: 2, init_std: 0.2"
)
_LIMITS = "patch_size: 14, min_pixels: 784, max_pixels: 3136"
TOWERS = {
    "qwen_vl": [f"encoders.vision.model={{{_TOWER}, {_LIMITS}, tokens_per_second: 3.0}}"],
    "qwen3_vl": [
        "encoders.vision.family=qwen3_vl",
        f"encoders.vision.model={{{_TOWER}, {_LIMITS}, video_max_pixels: 12544, "
        "num_grid_per_side: 4, deepstack_visual_indexes: [0]}",
    ],
}
CROPS = [
    "encoders.vision.family=gemma3",
    f"encoders.vision.model={{{_TOWER}, image_size: 28, patch_size: 7, mm_tokens_per_image: 4, "
    "pan_and_scan: true, pan_and_scan_min_crop_size: 28}",
]
LENGTH = "data.sequence_length=256"
LAYOUTS = {
    "2 lanes to pp2": ["encoders.vision.grid.dp=2", "language.grid.pp=2"],
    "1 lane to tp2 with sp": ["language.grid={tp: 2, sp: true}"],
    "colocated": [
        "encoders.vision.placement=colocated",
        "encoders.vision.grid.dp=2",
        "language.grid.tp=2",
    ],
}


def write_samples(directory: Path, samples: tuple[tuple[int, ...], ...]) -> Path:
    """A shard of noise with questions and answers, a tokenizer, and the tiny recipe over them."""
    rng = np.random.default_rng(0)
    write_tokenizer(directory / "tokenizer")
    with tarfile.open(directory / "train-00000.tar", "w") as tar:

        def add(name: str, data: bytes) -> None:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))

        for number, parts in enumerate(samples):
            content: list[dict[str, object]] = []
            file = 0
            for frames in parts:
                content.append({"type": "video", "frames": frames} if frames else {"type": "image"})
                width, height = SIZES[int(rng.integers(len(SIZES)))]
                for _ in range(frames or 1):
                    pixels = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
                    buffer = io.BytesIO()
                    Image.fromarray(pixels).save(buffer, "PNG")
                    add(f"sample{number:04}.{file}.png", buffer.getvalue())
                    file += 1
            content.append({"type": "text", "text": "what is this ?"})
            user = {"role": "user", "content": content}
            answer = {"role": "assistant", "content": " ".join("37"[: 1 + number % 2])}
            add(f"sample{number:04}.json", json.dumps({"messages": [user, answer]}).encode())
    return tiny.write_recipe(directory)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("videos"), SAMPLES)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    only_images = tuple(tuple(0 for _ in parts) for parts in SAMPLES)
    return write_samples(tmp_path_factory.mktemp("images"), only_images)


@pytest.mark.parametrize("family", quick(TOWERS, "qwen3_vl"))
@pytest.mark.parametrize("layout", quick(LAYOUTS, "2 lanes to pp2"))
def test_steps_over_images_and_videos_of_one_tower_equal_those_of_one_rank(
    run_ranks: RunRanks, videos: Path, family: str, layout: str
) -> None:
    check(run_ranks, videos, [*TOWERS[family], OTHER_MEDIA, LENGTH, *LAYOUTS[layout]])


def test_steps_with_crops_equal_those_of_one_rank(run_ranks: RunRanks, images: Path) -> None:
    check(run_ranks, images, [*CROPS, LENGTH, *LAYOUTS["2 lanes to pp2"]])


def test_samples_have_items_of_several_frames_and_several_items(videos: Path, images: Path) -> None:
    grids: dict[str, set[int]] = {}
    numbers: dict[str, set[int]] = {}
    cases = {name: (videos, [*own, OTHER_MEDIA]) for name, own in TOWERS.items()}
    for name, (path, overrides) in (cases | {"gemma3": (images, CROPS)}).items():
        dataset = tiny.open_sources(load_recipe(path, [*overrides, LENGTH]))
        (index,), (reader,) = dataset.indexes, dataset.readers
        grids[name] = {reader.plan(item).grid[0] for item in range(index.num_items)}
        numbers[name] = set(index.column("item_number").tolist())
    assert grids == {"qwen_vl": {1, 2, 3}, "qwen3_vl": {1}, "gemma3": {1}}
    assert numbers == {"qwen_vl": {0}, "qwen3_vl": {0, 1, 2}, "gemma3": {0, 1, 2, 3}}


@pytest.mark.parametrize("family", quick(TOWERS, "qwen_vl"))
def test_a_run_answers_about_all_modalities(
    run_ranks: RunRanks, tmp_path: Path, family: str
) -> None:
    path = write_samples(tmp_path, SAMPLES)
    test = f"data.test=[{{path: '{tmp_path}/train-*.tar'}}]"
    run(run_ranks, path, *TOWERS[family], OTHER_MEDIA, LENGTH, "train.steps=1", test)
    run_ranks(_answer, 1, tmp_path / "runs" / "tiny")


def _answer(rank: int, folder: Path) -> None:
    from mimo.generate.answer import Generator, ItemFiles, Request, main
    from mimo.generate.evaluate import answer_split

    generator = Generator(folder)
    files = [Image.linear_gradient("L").rotate(10 * n).resize((56, 28)) for n in range(4)]

    def request(*frames: int) -> Request:
        content: list[dict] = [
            {"type": "video", "frames": n} if n else {"type": "image"} for n in frames
        ]
        count = sum(max(n, 1) for n in frames)
        text = {"type": "text", "text": "read"}
        return Request([{"role": "user", "content": [*content, text]}], files[:count])

    requests = [request(0, 3), request(3, 0), request(4), request(), request(0)]
    # What else is in the pack changes nothing.
    assert generator.answer(requests, 8) == [generator.answer([one], 8)[0] for one in requests]
    odd = Request(request(2).messages, [files[0], files[1].resize((28, 28))])
    with pytest.raises(InputError, match="files of a video are 56 x 28 pixels, 28 x 28 pixels"):
        generator.answer([odd], 1)
    answered = list(answer_split(folder))
    expected = [sum(max(n, 1) for n in parts) for parts in SAMPLES]
    assert [len(one.pictures) for one in answered] == expected

    def video(paths: list[Path]) -> ItemFiles:
        return ItemFiles("--frame", "video", paths, {"frames": len(paths)})

    paths = [folder / f"{number}.png" for number in range(4)]
    for path, image in zip(paths, files, strict=True):
        image.save(path)
    assert main(folder, [ItemFiles("--image", "image", paths[:1]), video(paths)], "read", 2) == 0
    with pytest.raises(InputError, match="--frame .*missing: no such file"):
        main(folder, [video([folder / "missing"])], "read", 2)
