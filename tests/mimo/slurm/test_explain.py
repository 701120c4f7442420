"""The text that says where every rank is and what that saves."""

from pathlib import Path

from mimo.checkpoint.hf.recipes import load_phases
from mimo.parallel.build import build_layout
from mimo.slurm.explain import explain
from mimo.slurm.placement import place
from tests.mimo import tiny

UNEVEN = """\
nodes 0-2: 17 ranks, up to 8 on a node

ranks  node  module    lane   tp  cp  pp
0         0  vision       0    0   0   0
1-4       0  language     0  0-3   0   0
5-8       1  language     1  0-3   0   0
9-12      1  language     2  0-3   0   0
13-16     2  language     3  0-3   0   0

bytes of a step    in all  across nodes in order  as placed
tp language      12.0 MiB                3.0 MiB          -
dp language       0.4 MiB                0.2 MiB    0.3 MiB
bridge vision     0.5 MiB                0.3 MiB    0.4 MiB
together         12.9 MiB                3.5 MiB    0.7 MiB
from above: of microbatches that are full, with rows of items as they may be
"""
TWO_KINDS = """\
node 0 of encoders: 2 ranks, up to 2 on a node
nodes 1-2 of language: 4 ranks, up to 3 on a node

ranks  node  module    lane   tp  cp  pp
0         0  vision       0    0   0   0
1         0  vision       1    0   0   0
2-4       1  language     0  0-2   0   0
5         2  language     0    3   0   0
tp 4 of language is across 2 nodes, which have no room for a tensor-parallel group; lower tp, or \
use larger nodes
"""


def explained(directory: Path, *overrides: str, hetjob: bool = False) -> str:
    phased = load_phases(tiny.write_recipe(directory), overrides)
    layouts = phased.each(build_layout)
    return explain(phased, layouts, place(phased, layouts, hetjob))


def test_each_tensor_parallel_group_has_a_line_and_each_kind_of_bytes_before_and_after(
    tmp_path: Path,
) -> None:
    text = explained(tmp_path, "language.grid={tp: 4, dp: 4}", "train.global_batch_size=16")
    assert text == UNEVEN


def test_a_heterogeneous_job_and_a_group_that_no_node_holds_are_named(tmp_path: Path) -> None:
    overrides = ("encoders.vision.grid.dp=2", "language.grid={tp: 4, dp: 1}")
    nodes = ("cluster.gpus_per_node=3", "cluster.encoder_nodes={ranks_per_node: 2}")
    text = explained(tmp_path, *overrides, *nodes, hetjob=True)
    assert text.startswith(TWO_KINDS + "\nbytes of a step")


def test_modules_on_the_same_ranks_have_lines_of_their_own(tmp_path: Path) -> None:
    lines = explained(
        tmp_path, "language.grid={tp: 2, pp: 2, dp: 1}", "encoders.vision.placement=colocated",
        "encoders.vision.grid={dp: 4}",
    ).splitlines()  # fmt: skip
    assert [line.split() for line in lines[3:9]] == [
        ["0", "0", "vision", "0", "0", "0", "0"],
        ["0-1", "0", "language", "0", "0-1", "0", "0"],
        ["1", "0", "vision", "1", "0", "0", "0"],
        ["2", "0", "vision", "2", "0", "0", "0"],
        ["2-3", "0", "language", "0", "0-1", "0", "1"],
        ["3", "0", "vision", "3", "0", "0", "0"],
    ]


def test_phases_are_explained_one_by_one(tmp_path: Path) -> None:
    path = tiny.write_recipe(tmp_path)
    phases = "phases:\n  - {name: one}\n  - {name: two, encoders: {vision: {freeze: true}}}\n"
    path.write_text(phases + path.read_text())
    phased = load_phases(path, [])
    layouts = phased.each(build_layout)
    text = explain(phased, layouts, place(phased, layouts))
    assert text.index("phase 1 of 2, one") < text.index("phase 2 of 2, two")
    assert text.count("bytes of a step") == 2
