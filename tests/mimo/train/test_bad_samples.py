"""The list of bad samples is kept over resumes, and too many of them end the run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from torch._C._distributed_c10d import HashStore

from data.index.samples import SkippedSample
from mimo.checkpoint.folder import Progress
from mimo.config.training import Data
from mimo.model.dataset import Dataset
from mimo.runtime.run_files import BAD_SAMPLES, incidents
from mimo.train import anomalies
from mimo.train.anomalies import BadSamples, check_skipped, publish_bad_sample


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    monkeypatch.setattr(anomalies, "_get_default_store", lambda: store)


def dataset(*skipped: SkippedSample, samples: int = 1000) -> Dataset:
    class Index(SimpleNamespace):
        def __len__(self) -> int:
            return samples

    index = Index(
        num_skipped=len(skipped),
        skipped_samples=lambda: iter(skipped),
        shard_of=lambda sample: f"{sample // 100}.tar",
    )
    return cast(Dataset, SimpleNamespace(indexes=(index,)))


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / BAD_SAMPLES).read_text().splitlines()]


def test_a_resumed_run_lists_each_bad_sample_once(tmp_path: Path) -> None:
    unused = dataset(SkippedSample("a.tar", "k\ud83d", "malformed"))
    first = BadSamples(tmp_path, 0)
    first.list_of_indexes({"sources": unused, "validation": None})
    for step, number in ((1, 4), (3, 0)):
        publish_bad_sample(step, number, 5, SkippedSample("b.tar", f"k{step}", "x" * 5000, number))
        first.append(step, [number])
    with (tmp_path / BAD_SAMPLES).open("a") as file:
        file.write('{"found": "read')  # killed while writing
    expected = [
        {"found": "index", "split": "sources", "source": 0}
        | {"shard": "a.tar", "key": "k\ud83d", "reason": "malformed"},
        {"found": "reading", "step": 1, "rank": 5}
        | {"shard": "b.tar", "key": "k1", "reason": "x" * 2000, "item": 4},
    ]
    resumed = BadSamples(tmp_path, 2)
    resumed.list_of_indexes({"sources": unused})
    assert lines(tmp_path) == expected
    publish_bad_sample(2, 0, 0, SkippedSample("b.tar", "k2", "gone"))
    resumed.append(2, [0])
    last = {"found": "reading", "step": 2, "rank": 0}
    expected.append(last | {"shard": "b.tar", "key": "k2", "reason": "gone"})
    assert lines(tmp_path) == expected


def test_skipped_samples_are_told_one_by_one_and_then_when_their_number_has_doubled(
    tmp_path: Path,
) -> None:
    console = list[str]()
    listed = BadSamples(tmp_path, 0, console.append)
    listed.list_of_indexes({})
    listed.append(0, [])
    for step in range(50):
        bad = SkippedSample("b.tar", f"k{step}", "cut\noff" + "x" * 500, 2)
        publish_bad_sample(step, 7, 1, bad)
        listed.append(step, [7])
    counts = [*range(1, 11), 20, 40]
    assert [int(line.split()[3].rstrip(":")) for line in console] == counts
    assert console[-1].startswith(
        "skipped samples: step 40: 1 skipped in this step, 40 in all; the last: "
        "sample 'k39' of b.tar, item 2: cut offxxx"
    )
    assert console[0].endswith(f"x; all are in {BAD_SAMPLES}")
    recorded = [(e["kind"], e["step"], e["num_samples"]) for e in incidents(tmp_path)]
    assert recorded == [("skipped samples", count - 1, count) for count in counts]
    console.clear()
    resumed = BadSamples(tmp_path, 40, console.append)
    publish_bad_sample(40, 1, 0, SkippedSample("b.tar", "k", "gone"))
    resumed.append(40, [1])
    assert console == []


def test_the_bad_samples_of_an_index_are_all_counted_and_as_many_named_as_a_file_can_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(anomalies, "_MAX_LINES_PER_INDEX", 3)
    some = [SkippedSample("a.tar", str(n), "malformed") for n in range(10)]
    BadSamples(tmp_path, 0).list_of_indexes({"test": dataset(*some)})
    *named, last = lines(tmp_path)
    assert [line["key"] for line in named] == ["0", "1", "2"]
    assert last == {"found": "index", "split": "test", "source": 0, "more": 7}


def test_a_limit_that_is_passed_is_named_with_what_was_reached_and_the_worst_shards() -> None:
    limits = Data.model_construct(max_skipped_samples=100, max_skipped_fraction=0.01)
    progress = Progress(1, 0, 4, frozenset({(0, 3), (0, 105), (0, 199), (0, 102)}))
    check_skipped(limits, progress, 400, dataset())
    check_skipped(limits, progress, 199, dataset())  # too few for a share
    with pytest.raises(RuntimeError) as e:
        check_skipped(limits, progress, 399, dataset())
    for part in (
        "4 samples could not be read, 1.00% of the 399 used so far",
        "above data.max_skipped_fraction 0.01",
        "the worst shards: 1.tar (3), 0.tar (1)",
        BAD_SAMPLES,
    ):
        assert part in str(e.value)
    # Later epochs use the same samples again.
    with pytest.raises(RuntimeError, match="of the 300 used so far"):
        check_skipped(limits, progress, 10**6, dataset(samples=300))
    few = replace(progress, skipped_samples=101)
    with pytest.raises(RuntimeError, match="more than data.max_skipped_samples 100"):
        check_skipped(limits, few, 10**6, dataset(samples=10**6))
