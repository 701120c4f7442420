"""No name in a checkpoint, a shard or an index leads out of its folder."""

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from data.index.shard_index import Catalog, DamagedFileError
from data.index.shards import find_shards
from data.index.store import load_or_build_index
from data.index.tar_shards import scan_shard
from data.text.chat import ChatTokenizer
from mimo.checkpoint.folder import Progress, find_checkpoint, publish
from mimo.checkpoint.hf.weights_folder import WeightsFolder, index_name
from mimo.errors import InputError
from tests.mimo import tiny


@pytest.mark.parametrize("latest", ["../step_1", "/step_1", "..", "", "step_1/../../x", "step_\0"])
def test_latest_names_a_checkpoint_beside_it(tmp_path: Path, latest: str) -> None:
    partial = tmp_path / "run" / "checkpoints" / ".partial"
    partial.mkdir(parents=True)
    checkpoint = publish(partial, Progress(1, 1), "name: x", keep=1)
    assert find_checkpoint(tmp_path / "run") == checkpoint
    (checkpoint.parent / "latest").write_text(latest)
    with pytest.raises(InputError, match=r"no checkpoint there, or `latest` does not name one"):
        find_checkpoint(tmp_path / "run")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "..", "", "a/b", 3, None])
def test_an_index_of_weights_names_files_of_its_folder(tmp_path: Path, name: object) -> None:
    (tmp_path / "secret.safetensors").write_bytes(b"")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / index_name()).write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(InputError, match="which is no file of this folder"):
        WeightsFolder(folder)


@pytest.mark.parametrize("key", ["../up", "a/../../up", "/root", "new\nline", "bell\a"])
def test_a_sample_whose_name_leaves_its_folder_is_unusable(tmp_path: Path, key: str) -> None:
    path = tmp_path / "shard.tar"
    with tarfile.open(path, "w") as tar:
        for name in (f"{key}.json", "good/one.json", "good/one.0.png"):
            member = tarfile.TarInfo(name)
            member.size = 2
            tar.addfile(member, io.BytesIO(b"{}"))
    bad, good = scan_shard(find_shards(str(path))[0], {"png"})
    assert "leaves the folder" in bad.problem
    assert not good.problem


def test_an_index_that_names_files_elsewhere_is_not_read(tmp_path: Path) -> None:
    home = tmp_path / "home"
    tiny.write_samples(home, images_per_sample=(0, 0))
    pattern, chat = str(home / "train-*.tar"), ChatTokenizer(home / "tokenizer", {})
    built = load_or_build_index(pattern, chat, {})
    (tmp_path / "other.tar").write_bytes(Path(built.shards[0]).read_bytes())
    path = built.catalog.path
    for name in ("../other.tar", str(tmp_path / "other.tar"), "a/../../other.tar"):
        replace(built.catalog, names=(name, *built.catalog.names[1:])).write()
        with pytest.raises(DamagedFileError, match="names files of other folders"):
            Catalog.read(path, str(home))
        with pytest.warns(UserWarning, match="made again"):
            again = load_or_build_index(pattern, chat, {})
        assert again.shards == built.shards
        assert again.catalog.identity == built.catalog.identity
