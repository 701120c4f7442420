"""Workers and ranks of one host that decode for each other change nothing but the time it takes."""

from __future__ import annotations

import errno
import io
import json
import logging
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.decoding import Decoding, WorkerPool
from data.index.reader import SampleReader
from data.loader import DecoderLate, LoadedStep, StepLoader
from mimo.checkpoint.hf.recipes import load_recipe
from mimo.model import decoding as decodings
from mimo.model.dataset import Dataset
from mimo.model.decoding import decoding_of, gather_items
from mimo.model.step_plan import StepPlan, StepPlanner
from mimo.parallel.build import build_layout
from mimo.parallel.connections import Host
from mimo.parallel.grids import Coords, Layout
from tests.data.traps import Trap
from tests.mimo import tiny
from tests.ranks import running

STEPS = 4
COLOCATED = "encoders.vision.placement=colocated"
PAIR = ("language.grid.tp=2", "encoders.vision.grid.tp=2")
VICTIM = "sample0003"  # whose first image the traps are in; it is in every step


class Case:
    """A data set, and loaders of it for rank 0."""

    def __init__(self, directory: Path, root: Path, *overrides: str) -> None:
        self.path = tiny.write_recipe(directory)
        recipe = load_recipe(self.path, [COLOCATED, *overrides])
        self.dataset = tiny.open_sources(recipe)
        self.reader = self.dataset.readers[0]
        self.layout, self.root = build_layout(recipe), root

    def trap(self, log: Path, do: str, times: int = 1) -> SampleReader:
        with tarfile.open(self.reader.index.shards[0]) as shard:
            name = next(n for n in shard.getnames() if n.startswith(VICTIM) and n.endswith("png"))
            file = shard.extractfile(name)
            assert file is not None
            victim = file.read()
        assert io.BytesIO(victim).read(4) == b"\x89PNG"
        trap = Trap(
            **vars(self.reader.processors["image"]), victim=victim, do=do, times=times, log=str(log)
        )
        return SampleReader(self.reader.index, self.reader.chat, {"image": trap})

    def decoding(self, workers: int, reader: SampleReader | None = None, **given: Any) -> Decoding:
        host = Host(given.pop("ranks", (0,)), "job", 0, 1)
        return decodings.decoding_of(
            [reader or self.reader], self.layout, 0, host, workers, **given
        )

    def loader(self, decoding: Decoding, microbatches: int = 3) -> StepLoader:
        planner = StepPlanner(
            self.layout,
            {"vision": ("image",)},
            self.dataset.indexes,
            self.dataset.order,
            4,
            microbatches,
        )
        return StepLoader(planner, decoding.readers, decoding, 0, STEPS)

    def load(self, decoding: Decoding) -> list[LoadedStep]:
        with decoding:
            loader = self.loader(decoding)
            try:
                return [loader.next() for _ in range(STEPS)]
            finally:
                loader.close()


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Case]:
    """Its folder of shared memory is empty in the end."""
    root = tmp_path / "shared"
    root.mkdir()
    monkeypatch.setattr(decodings, "_root", lambda *_: root)
    tiny.write_samples(tmp_path)
    yield Case(tmp_path, root)
    assert list(root.iterdir()) == []


def numbers(loaded: Sequence[LoadedStep]) -> list[Any]:
    """All that was read, to be compared."""
    return [
        (
            [
                {i: [a.tolist() for a in vars(e).values()] for i, e in m.items()}
                for m in one.encoded
            ],
            [{at: patches.tolist() for at, patches in m.items()} for m in one.patches],
            one.unusable,
        )
        for one in loaded
    ]


def test_what_is_loaded_depends_neither_on_workers_nor_on_how_much_is_ahead(case: Case) -> None:
    expected = numbers(case.load(case.decoding(0)))
    assert sum(len(items) for _, patches, _ in expected for items in patches) == 14 * STEPS
    for workers, ahead in ((1, 0), (0, 10**9), (2, 40_000)):
        assert numbers(case.load(case.decoding(workers, ahead_bytes=ahead))) == expected


def test_no_more_is_decoded_ahead_than_memory_is_given_beyond_the_next_step(case: Case) -> None:
    def held(ahead: int) -> tuple[int, int]:
        """Bytes and steps that a loader holds while nobody asks for any."""
        with case.decoding(0, ahead_bytes=ahead) as decoding:
            loader, seen = case.loader(decoding), None
            while seen != (seen := (loader._num_bytes, len(loader._steps))) or not seen[1]:
                time.sleep(0.1)
            loader.close()
        return seen

    step, steps = held(0)
    assert steps == 1
    first = case.load(case.decoding(0))[0]
    assert step == sum(
        array.nbytes
        for own in (*first.encoded, *first.patches)
        for one in own.values()
        for array in ([one] if isinstance(one, torch.Tensor) else vars(one).values())
    )
    more, steps = held(int(2.5 * step))
    assert 2 * step < more <= 2.5 * step
    assert steps == 3
    assert held(100 * step) == (STEPS * step, STEPS)


@pytest.mark.parametrize(
    ("do", "how"),
    [
        pytest.param("exit", "ended with exit code 7", marks=pytest.mark.slow),
        ("kill", "was killed by SIGKILL"),
        pytest.param("hang", "did not answer for 0.7 s and was ended", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_dies_or_hangs_is_replaced_and_what_ends_two_is_left_out(
    case: Case, tmp_path: Path, do: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = numbers(case.load(case.decoding(0)))
    shard = case.reader.index.shards[0]
    for times in (1, 2):
        log = tmp_path / f"log{times}"
        log.mkdir()
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            decoding = case.decoding(2, case.trap(log, do, times), worker_seconds=0.7)
            got = numbers(case.load(decoding))
        assert f"a decode worker {how}; another one tries" in caplog.text
        assert f"sample '{VICTIM}' of {shard}, item 0" in caplog.text
        if times == 1:
            assert got == expected
            continue
        # In the first step both tries end a worker; the trap is gone afterwards.
        assert got[1:] == expected[1:]
        ((number, reason),) = got[0][2].items()
        assert str(reason) == (
            f"sample '{VICTIM}' of {shard}, item 0: 2 workers ended over it: one {how}, one {how}"
        )
        lost = sum(map(len, expected[0][1])) - sum(map(len, got[0][1]))
        assert (lost, number in range(12)) == (1, True)
    assert all(not running([int(p.name[7:])]) for p in tmp_path.glob("log*/sprung-*"))


def test_a_mistake_of_a_processor_reaches_the_rank_as_it_was(case: Case, tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="a mistake in the processor") as raised:
        case.load(case.decoding(1, case.trap(tmp_path, "raise")))
    assert "in a decode worker" in raised.value.__notes__[0]
    assert "traps.py" in raised.value.__notes__[0]


def test_a_worker_has_no_engine_no_torch_and_no_gpu(case: Case, tmp_path: Path) -> None:
    case.load(case.decoding(1, case.trap(tmp_path, "report")))
    seen = json.loads((tmp_path / "report").read_text())
    modules = {name.split(".")[0] for name in seen["modules"]}
    assert "data" in modules
    assert modules.isdisjoint({"torch", "megatron", "mimo", "bridge", "encoders"})
    assert seen["gpus"] == ""


def test_what_another_rank_never_decodes_is_named_with_that_rank(case: Case) -> None:
    pair = Case(case.root.parent, case.root, *PAIR)
    decoding = pair.decoding(0, ranks=(0, 1), peer_seconds=0.4)
    expected = r"sample 'sample\d{4}' of .*: rank 1 has not decoded it .* within 0.4 s"
    with pytest.raises(DecoderLate, match=expected) as raised:
        pair.load(decoding)
    assert raised.value.waits_for == (1,)


def test_full_shared_memory_names_the_remedy(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("data.loader.write_arrays", full)
    pair = Case(case.root.parent, case.root, *PAIR)
    with pytest.raises(OSError, match="No space left") as raised:
        pair.load(pair.decoding(0, ranks=(0, 1)))
    assert "--shm-size" in raised.value.__notes__[0]


def test_workers_use_the_cores_ranks_leave(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, wanted, expected in ((1, "null", 0), (2, "null", 1), (16, "null", 15), (1, "3", 3)):
        monkeypatch.setattr(decodings, "find_host", lambda cores=cores: Host((0,), "j", 0, cores))
        recipe = load_recipe(case.path, [COLOCATED, f"data.workers={wanted}"])
        with decodings.open_decoding(recipe, case.layout, 0, [case.reader]) as decoding:
            assert (0 if decoding.pool is None else decoding.pool.size) == expected
            assert decoding.worker_seconds == recipe.bridge.timeout_seconds / 4


def test_little_shared_memory_is_avoided_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    plenty, little = (Host((0, 1), "job", free, 1) for free in (2**30, 2**26))
    assert decodings._root(plenty, 2**29) == Path("/dev/shm")
    assert decodings._root(little, 2**29) != Path("/dev/shm")
    assert "64 MiB free, 2 ranks of this host may need 1024 MiB" in caplog.text
    assert "--shm-size" in caplog.text


def test_workers_end_with_a_loader_that_is_closed_early(case: Case, tmp_path: Path) -> None:
    with case.decoding(1, case.trap(tmp_path, "hang")) as decoding:
        loader = case.loader(decoding)
        while not (sprung := list(tmp_path.glob("sprung-*"))):
            time.sleep(0.02)
        loader.close()
        assert isinstance(decoding.pool, WorkerPool)
        assert not running([int(sprung[0].name[7:])])
        again = case.loader(decoding)
        assert [again.next().unusable for _ in range(STEPS)] == [{}] * STEPS
        again.close()


# ----------------------------------------------------------- what a rank reads


def load(path: Path, rank: int) -> tuple[LoadedStep, StepPlan, Dataset, Layout]:
    """The first step as ``rank`` loads it: rank 0 encodes, rank 1 is the language model."""
    planner, dataset = tiny.planner_of(path), tiny.open_sources(load_recipe(path))
    layout = planner.layout
    decoding = decoding_of(dataset.readers, layout, rank)
    loader = StepLoader(planner, dataset.readers, decoding, 0, 1)
    loaded = loader.next()
    loader.close()
    return loaded, planner.finish(loaded.microbatches), dataset, layout


def test_language_rank_decodes_no_item_and_encoder_rank_tokenizes_no_sample(path: Path) -> None:
    encoder, language = (load(path, rank)[0] for rank in (0, 1))
    assert [len(m) for m in encoder.patches] == [6, 0, 8]
    assert not any(encoder.encoded)
    assert [len(m) for m in language.encoded] == [4, 4, 4]
    assert not any(language.patches)


def test_patches_wait_as_the_bytes_that_are_sent_also_where_there_are_none(path: Path) -> None:
    loaded, plan, dataset, _ = load(path, 0)
    form, reader = dataset.readers[0].processors["image"].wire, dataset.readers[0]
    gathered = gather_items(loaded, plan, dataset.readers, "vision", Coords(0, 0, 0, 0), form)
    assert [len(items.grids) for items in gathered] == [6, 0, 8]
    for m, items in enumerate(gathered):
        assert items.patches is not None
        numbers = plan.microbatches[m].samples.item.tolist()
        expected = [np.zeros((0, 3 * 14**2)), *(reader.patches(item) for item in numbers)]
        for (wire, patches), bytes_of_item in zip(items.patches, expected, strict=True):
            assert wire == form
            assert patches.dtype is torch.uint8
            np.testing.assert_array_equal(patches.numpy(), bytes_of_item)
