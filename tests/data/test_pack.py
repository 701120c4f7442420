"""`mimo data pack`: from JSON and Parquet to shards that can be indexed and read."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from data.index.reader import SampleReader
from data.index.samples import Processors
from data.modalities.audio import wav_bytes
from data.pack import pack
from data.text.chat import ChatTokenizer
from mimo.cli.main import app
from tests.data.conftest import build_index


def llava(image: str | None, question: str = "read <image> .") -> dict[str, Any]:
    turns = [{"from": "human", "value": question}, {"from": "gpt", "value": "3 7"}]
    return {"conversations": turns} | ({} if image is None else {"image": image})


def write_lines(path: Path, *documents: Any) -> Path:
    lines = [one if isinstance(one, str) else json.dumps(one) for one in documents]
    path.write_text("\n".join(lines) + "\n")
    return path


def members(folder: Path) -> dict[str, dict[str, bytes]]:
    """By shard and name."""
    found: dict[str, dict[str, bytes]] = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            found[path.name] = {m.name: tar.extractfile(m).read() for m in tar}  # type: ignore[union-attr]
    return found


def bad_rows(folder: Path) -> dict[int, str]:
    lines = (folder / "bad_samples.jsonl").read_text().splitlines()
    return {one["row"]: one["reason"] for one in map(json.loads, lines)}


@pytest.fixture
def images(tmp_path: Path, make_image) -> Path:
    (tmp_path / "src" / "in").mkdir(parents=True)
    (tmp_path / "src" / "a.png").write_bytes(make_image(28, 56))
    (tmp_path / "src" / "in" / "b.jpeg").write_bytes(make_image(56, 56, "JPEG"))
    return tmp_path / "src"


@pytest.mark.parametrize("form", ["lines", "array", "parquet"])
def test_packed_rows_are_indexed_and_read_as_they_were(
    images: Path, tmp_path: Path, chat: ChatTokenizer, processors: Processors, form: str
):
    a, b = (images / "a.png").read_bytes(), (images / "in" / "b.jpeg").read_bytes()
    url = f"data:image/png;base64,{base64.b64encode(a).decode()}"
    ask = [{"type": "text", "text": "read"}, {"type": "image_url", "image_url": {"url": url}}]
    yes = {"role": "assistant", "content": "3 7"}
    if form == "parquet":
        turns = llava(None)["conversations"]
        both = [{"bytes": a, "path": None}, {"bytes": None, "path": "in/b.jpeg"}]
        two = [{**turns[0], "value": "<image> and <image>"}, turns[1]]
        columns = {
            "images": [both[:1], both, []],
            "conversations": [turns, two, [{**turns[0], "value": "read"}, turns[1]]],
        }
        pq.write_table(pa.table(columns), images / "rows.parquet", row_group_size=2)
        source, counts = images, [1, 2, 0]
    else:
        documents = [
            llava("a.png"),
            llava(None, "read ."),
            {"messages": [{"role": "user", "content": ask}, yes]},
        ]
        documents.append(llava("in/b.jpeg", "what digit is this ?"))
        source, counts = images / "rows.json", [1, 0, 1, 1]
        write_lines(source, *documents)
        if form == "array":
            source.write_text("\ufeff \n" + json.dumps(documents, indent=2))
    packed = pack(str(source), tmp_path / "out")
    assert (packed.samples, packed.files, packed.bad) == (len(counts), sum(counts), 0)
    index = build_index(str(tmp_path / "out" / "*.tar"), chat, processors)
    assert index.num_skipped == 0
    assert [len(index.items_of_sample(n)) for n in range(len(index))] == counts
    assert [index.key(n) for n in range(len(index))] == [f"{n:09d}" for n in range(len(counts))]
    reader = SampleReader(index, chat, processors)
    files = [reader.read(n, f) for n in range(len(index)) for f in index.files_of_sample(n)]
    assert files == [a, a, b]
    for n in range(len(index)):
        assert chat.decode(reader.sample(n).labels[reader.sample(n).loss_mask == 1]) == "3 7"
        document = json.loads(members(tmp_path / "out")["shard-000000.tar"][f"{n:09d}.json"])
        assert list(document) == ["messages"], "shards carry our form"
        assert all(set(message) == {"role", "content"} for message in document["messages"])


def test_every_bad_row_is_left_out_and_listed_with_its_line_and_reason(
    images: Path, tmp_path: Path
):
    (tmp_path / "secret.png").write_bytes((images / "a.png").read_bytes())
    (images / "out.png").symlink_to(tmp_path / "secret.png")
    (images / "outer").symlink_to(tmp_path)
    (images / "inside.png").symlink_to(images / "a.png")
    (images / "broken.png").write_bytes(b"nothing")
    os.mkfifo(images / "pipe.png")
    tool = {"role": "user", "content": "x"}
    data = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,@"}}]
    wanted: list[tuple[Any, str]] = [
        (llava("inside.png"), ""),
        ("{", "malformed JSON"),
        ("[" * 100_000, "malformed JSON"),
        (llava("none.png"), "file 0: 'none.png' is no file in"),
        (llava(str(tmp_path / "secret.png")), "is outside of the media root"),
        (llava("../secret.png"), "is outside of the media root"),
        (llava("a.png\0"), "embedded null byte"),
        (llava("out.png"), "is outside of the media root"),
        (llava("outer/secret.png"), "is outside of the media root"),
        (llava("pipe.png"), "is no file"),
        (llava("in"), "is no file"),
        (llava("https://a.b/c.png"), "is a URL: nothing is downloaded"),
        (llava("file:///etc/passwd"), "is a URL"),
        (llava("broken.png"), "file 0: the image header cannot be read"),
        (llava(None), "the row does not say which file it is"),
        ({"messages": [{"role": "user", "content": data}]}, "file 0: is not Base64"),
        ({"prompt": "hello"}, "['prompt'] is no chat; need one of these forms"),
        ({"messages": [tool] * 3000}, "3000 messages, at most"),
        (
            {"messages": [tool, {"role": "narrator", "content": "x"}]},
            "the role 'narrator' is unknown; use system, user, assistant, model, tool",
        ),
        ({"messages": [{"role": "user"}]}, "the content of message 0 is None"),
        ({"messages": [tool, {**tool, "content": "\ud83d"}]}, "surrogates not allowed"),
        ("", ""),
        (llava("a.png"), ""),
    ]
    source = write_lines(images / "rows.jsonl", *(one for one, _ in wanted))
    packed = pack(str(source), tmp_path / "out", max_bad_fraction=1.0)
    found = bad_rows(tmp_path / "out")
    assert sorted(found) == [n for n, (_, reason) in enumerate(wanted, 1) if reason]
    for number, reason in found.items():
        assert wanted[number - 1][1] in reason
    assert (packed.samples, packed.bad) == (2, len(found))
    assert packed.first_bad.startswith(f"{source}, row 2: malformed JSON")
    names = [name for shard in members(tmp_path / "out").values() for name in shard]
    assert [name.partition(".")[2] for name in names] == ["0.png", "json"] * 2


def test_a_share_of_bad_rows_ends_it_and_names_the_first(images: Path, tmp_path: Path):
    good, bad = llava("a.png"), llava("none.png")
    source = write_lines(images / "rows.jsonl", *[good] * 8, bad, bad)
    pack(str(source), tmp_path / "enough", max_bad_fraction=0.2)
    for limit in (0.19, 0.0):
        with pytest.raises(ValueError, match=r"of \d+ rows cannot be used, the first .*, row 9: "):
            pack(str(source), tmp_path / f"{limit}", max_bad_fraction=limit)
    source = write_lines(images / "bad.jsonl", bad, bad)
    with pytest.raises(ValueError, match="2 of 2 rows cannot be used"):
        pack(str(source), tmp_path / "none", max_bad_fraction=1.0)


@pytest.mark.parametrize("size", [{"max_samples": 3}, {"max_bytes": 400}])
def test_shards_have_the_size_and_the_same_bytes_each_time(
    images: Path, tmp_path: Path, size: dict[str, Any]
):
    source = write_lines(images / "rows.jsonl", *[llava(None, f"read {n}") for n in range(7)])
    for out in ("one", "two"):
        pack(str(source), tmp_path / out, **size)
    shards = members(tmp_path / "one")
    # The JSON of a sample has some 90 bytes.
    assert [len(one) for one in shards.values()] == ([3, 3, 1] if "max_samples" in size else [5, 2])
    assert sorted(os.listdir(tmp_path / "one")) == list(shards)
    digests = [
        [hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted((tmp_path / out).iterdir())]
        for out in ("one", "two")
    ]
    assert digests[0] == digests[1]


def test_a_source_that_ends_early_leaves_nothing_and_the_corrected_call_packs_it(
    images: Path, tmp_path: Path
):
    documents = json.dumps([llava(None, f"read {n}") for n in range(5)])
    out, source = tmp_path / "out", images / "cut.json"
    source.write_text(documents[:-60])
    with pytest.raises(ValueError, match=r"cut\.json cannot be read: "):
        pack(str(source), out, max_samples=3)
    assert os.listdir(out) == []
    (out / ".packing").mkdir()  # as after a kill
    (out / ".packing" / "shard-000007.tar").write_bytes(b"half")
    source.write_text(documents)
    assert pack(str(source), out, max_samples=3).samples == 5
    assert sorted(os.listdir(out)) == ["shard-000000.tar", "shard-000001.tar"]
    table = pa.table({"conversations": [llava(None)["conversations"]] * 4})
    pq.write_table(table, images / "cut.parquet")
    whole = (images / "cut.parquet").read_bytes()
    (images / "cut.parquet").write_bytes(whole[:-9])
    with pytest.raises(ValueError, match=r"cut\.parquet cannot be read: "):
        pack(str(images / "cut.parquet"), out, overwrite=True)
    assert sorted(os.listdir(out)) == ["shard-000000.tar", "shard-000001.tar"]


def test_a_forgotten_media_root_is_named_and_the_corrected_call_packs_the_rows(
    images: Path, tmp_path: Path
):
    source, out = write_lines(tmp_path / "rows.jsonl", llava("a.png")), tmp_path / "out"
    with pytest.raises(ValueError, match="'a.png' is no file in .*; --media-root names the folder"):
        pack(str(source), out)
    assert list(bad_rows(out)) == [1]
    assert pack(str(source), out, images).files == 1
    assert os.listdir(out) == ["shard-000000.tar"]


def test_audio_and_frames_of_videos_are_packed(images: Path, tmp_path: Path):
    import numpy as np

    sound = base64.b64encode(wav_bytes(np.zeros(1600, np.int16))).decode()
    heard = {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}}
    film = {"type": "video", "video": ["a.png", "a.png"], "fps": 4.0}
    yes = {"role": "assistant", "content": "yes"}
    source = write_lines(
        images / "rows.jsonl", {"messages": [{"role": "user", "content": [heard, film]}, yes]}
    )
    pack(str(source), tmp_path / "out")
    (shard,) = members(tmp_path / "out").values()
    assert sorted(shard) == [f"000000000.{n}" for n in ("0.wav", "1.png", "2.png", "json")]
    content = json.loads(shard["000000000.json"])["messages"][0]["content"]
    assert content == [{"type": "audio"}, {"type": "video", "fps": 4.0, "frames": 2}]


def test_the_command_packs_once_and_refuses_what_it_may_not_replace(images: Path, tmp_path: Path):
    source = write_lines(tmp_path / "rows.jsonl", *[llava("a.png")] * 200, llava("none.png"))
    out = tmp_path / "out"
    command = ["data", "pack", str(source), str(out), "--media-root", str(images)]
    command += ["--shard-size", "100"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "packed 200 samples with 200 files, shards: 2" in result.output
    assert f"left out 1 rows, the first {source}, row 201: file 0: 'none.png'" in result.output
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert "is not empty: give another folder, or --overwrite" in result.output
    (out / "notes.txt").write_text("mine")
    (out / ".index" / "settings").mkdir(parents=True)
    (out / ".index" / "settings" / "of_both.catalog").touch()
    write_lines(source, llava("a.png"))
    assert CliRunner().invoke(app, [*command, "--overwrite"]).exit_code == 0
    assert sorted(os.listdir(out)) == [".index", "notes.txt", "shard-000000.tar"]
    assert not list(out.rglob("*.catalog"))
    for wrong, message in (
        (["--shard-size", "5GB"], "need samples, as 2000, or a size, as 512MiB"),
        (["--media-root", str(source)], "is no folder"),
    ):
        result = CliRunner().invoke(app, [*command, "--overwrite", *wrong])
        assert result.exit_code == 2
        assert message in result.output
    for missing in (tmp_path / "none.jsonl", tmp_path / "empty", source.with_suffix(".csv")):
        result = CliRunner().invoke(app, ["data", "pack", str(missing), str(tmp_path / "new")])
        assert result.exit_code == 2
        assert "need a file or pattern that ends with" in result.output
