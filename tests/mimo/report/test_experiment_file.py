"""The file of an experiment, and the comparison of runs with the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mimo.errors import RecipeError
from mimo.report.experiment_file import Experiment, read_experiment
from mimo.report.experiment_results import STRICT_STEPS, Followed, bound, follow
from mimo.report.runs import Curve

HEAD = "name: some\nrecipe: recipe.yaml\nsteps: 5\n"
TWO = "layouts:\n  - {name: a}\n  - {name: b, language.grid.tp: 2}\n"
VARY = """
vary:
  encoders.vision.placement: [disjoint, colocated]
  language.grid: [{tp: 2}, {pp: 2, dp: 3}]
"""


def read(folder: Path, text: str, *overrides: str) -> Experiment:
    (folder / "recipe.yaml").touch()
    path = folder / "experiment.yaml"
    path.write_text(text)
    return read_experiment(path, overrides)


def test_axes_become_all_combinations_with_readable_names(tmp_path: Path) -> None:
    experiment = read(tmp_path, HEAD + VARY)
    assert [*experiment.layouts] == [
        *("disjoint-tp2", "disjoint-pp2-dp3"),
        *("colocated-tp2", "colocated-pp2-dp3"),
    ]
    assert experiment.reference == "disjoint-tp2"
    assert experiment.layouts["colocated-tp2"][-2:] == (
        'encoders.vision.placement="colocated"',
        'language.grid={"tp": 2}',
    )


@pytest.mark.parametrize(
    ("axes", "names"),
    [
        ("{train.micro_batch_size: [1, 4]}", ["micro_batch_size1", "micro_batch_size4"]),
        ("{language.grid.sp: [true, false]}", ["sptrue", "spfalse"]),
        (
            "{encoders.vision.grid: [{tp: 2}], language.grid: [{tp: 2}, {pp: 2}]}",
            ["tp2-tp2", "tp2-pp2"],
        ),
    ],
)
def test_names_contain_the_values(tmp_path: Path, axes: str, names: list[str]) -> None:
    assert [*read(tmp_path, f"{HEAD}vary: {axes}").layouts] == names


def test_overrides_come_from_all_layouts_then_the_command_line_then_the_layout(
    tmp_path: Path,
) -> None:
    experiment = read(tmp_path, f"{HEAD}set: {{train.seed: 3}}\n{TWO}", "train.seed=4")
    shared = ("train.save_every=null", "train.seed=3", "train.steps=5", "train.seed=4")
    assert experiment.shared == shared
    assert experiment.layouts["b"] == (*shared, "language.grid.tp=2")


def test_the_recipe_is_looked_for_beside_the_file_then_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert read(tmp_path, HEAD + TWO).recipe == tmp_path / "recipe.yaml"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "second.yaml").touch()
    monkeypatch.chdir(tmp_path / "other")
    assert read(tmp_path, HEAD.replace("recipe.yaml", "second.yaml") + TWO).recipe == Path(
        "second.yaml"
    )


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        (HEAD, "", "give either `layouts`"),
        (HEAD + TWO + VARY, "", "give either `layouts`"),
        (f"{HEAD}repaets: 2\n{TWO}", ":4", "did you mean 'repeats'?"),
        (f"{HEAD}repeats: two\n{TWO}", ":4", "repeats: "),
        (f"{HEAD}reference: aa\n{TWO}", ":4", "no layout is called 'aa'"),
        (f"{HEAD}layouts: [{{name: a}}, {{name: a}}]", ":4", "a `name` of its own"),
        (f"{HEAD}vary: {{train.steps: [3, 4]}}", ":4", "train.steps, which is the same in all"),
        (f"{HEAD}layouts: [{{name: ../a}}]", ":4", "got '../a'"),
        (f"{HEAD}layouts: [{{language.grid.tp: 2}}]", ":4", "needs a `name`"),
        (f"{HEAD}vary: {{language.grid: []}}", ":4", "vary.language.grid"),
        (
            f"{HEAD}vary: {{language.grid: [{{tp: 2}}, {{tp: 2}}]}}",
            ":4",
            "got 'tp2'; its values",
        ),
        (HEAD.replace("recipe.yaml", "none.yaml") + TWO, ":2", "no recipe is at"),
        (HEAD.replace("some", "'$(reboot)'") + TWO, ":1", "name: "),
        (HEAD.replace("steps: 5", "steps: 0") + TWO, ":3", "steps: "),
    ],
)
def test_a_wrong_key_is_reported_with_its_line(
    tmp_path: Path, text: str, line: str, message: str
) -> None:
    with pytest.raises(RecipeError) as error:
        read(tmp_path, text)
    assert any(
        f"experiment.yaml{line}: " in problem and message in problem
        for problem in error.value.problems
    )


STEPS = 150


def train(order: int = 0, *, rate: float = 1.0, encoder: float = 1.0) -> list[dict[str, Any]]:
    """Two layers of fp32 by Adam, of which the first is the encoder.

    order: in which samples are summed up. rate: that of the learning rate. encoder: that of its
    gradients, which Adam all but scales away.
    """
    rng = np.random.default_rng(0)
    weights = [rng.normal(0, 0.3, (8, 16)), rng.normal(0, 0.3, (16, 1))]
    weights = [w.astype(np.float32) for w in weights]
    moments = [(np.zeros_like(w), np.zeros_like(w)) for w in weights]
    shuffle, records = np.random.default_rng(order), []
    for step in range(STEPS):
        x = rng.normal(size=(64, 8)).astype(np.float32)
        y = np.sin(x.sum(1, keepdims=True))
        if order:
            shuffled = shuffle.permutation(64)
            x, y = x[shuffled], y[shuffled]
        hidden = np.tanh(x @ weights[0])
        off = hidden @ weights[1] - y
        back = (2 * off / 64) @ weights[1].T * (1 - hidden**2)
        gradients = [np.float32(encoder) * (x.T @ back), hidden.T @ (2 * off / 64)]
        norms = {f"grad_norm_{n}": float(np.linalg.norm(g)) for n, g in enumerate(gradients)}
        records.append({"step": step, "loss": float((off**2).mean()), **norms})
        lr = np.float32(rate * 0.01 * min(1, (step + 1) / 50))
        for w, g, (mean, square) in zip(weights, gradients, moments, strict=True):
            mean += 0.1 * (g - mean)
            square += 0.05 * (g * g - square)
            scale = np.float32((1 - 0.95 ** (step + 1)) ** 0.5 / (1 - 0.9 ** (step + 1)))
            w -= lr * scale * mean / (np.sqrt(square) + np.float32(1e-8))
    return records


def compared(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Followed:
    """The comparison of records in fp32."""

    def curves(records: list[dict[str, Any]]) -> dict[str, Curve]:
        steps = np.arange(len(records)) + 1
        values = {name: [record[name] for record in records] for name in records[0]}
        return {name: Curve(steps, np.array(values[name], float)) for name in values}

    return follow(curves(ours), curves(theirs), "fp32")


REFERENCE = train()


@pytest.mark.parametrize("order", range(1, 6))
def test_sums_in_another_order_follow_over_all_steps(order: int) -> None:
    followed = compared(train(order), REFERENCE)
    assert followed.problem == ""
    allowed = bound(followed.at, "fp32")
    assert allowed is not None
    assert 0 < followed.difference < allowed


@pytest.mark.parametrize(
    ("rate", "encoder", "problem"),
    [
        (1.1, 1.0, "of step 2 "),
        (1.01, 1.0, "of step "),
        (1.0, 2.0, "grad_norm_0 of step 1 is off by 1.0e+00"),
        (1.0, 1.001, "grad_norm_0 of step 1 "),
    ],
)
def test_a_wrong_rate_or_gradient_does_not_follow(
    rate: float, encoder: float, problem: str
) -> None:
    wrong = train(rate=rate, encoder=encoder)
    assert problem in compared(wrong, REFERENCE).problem


def test_a_late_difference_is_reported_with_its_step() -> None:
    late = [dict(record) for record in REFERENCE]
    for record in late[40:]:
        record["loss"] *= 1.001
    followed = compared(late, REFERENCE)
    assert followed.problem.startswith("loss of step 41 is off by 1.0e-03")
    assert followed.difference == pytest.approx(1e-3)


def of_loss(loss: float | None) -> list[dict[str, Any]]:
    return [{"step": 0, "loss": loss, "grad_norm": 1.0}]


@pytest.mark.parametrize(
    ("ours", "theirs", "follows"),
    [(None, None, True), (None, 1.0, False), (1.0, None, False), (0.0, 0.0, True)],
)
def test_losses_are_equal_where_neither_is_finite(
    ours: float | None, theirs: float | None, follows: bool
) -> None:
    assert (compared(of_loss(ours), of_loss(theirs)).problem == "") == follows


def test_the_bound_is_of_the_precision_and_grows_until_single_steps_say_nothing() -> None:
    first = [bound(STRICT_STEPS - 1, precision) for precision in ("fp64", "fp32", "bf16")]
    assert first == [1e-10, 1e-5, 0.02]
    assert bound(STRICT_STEPS + 9, "fp32") == pytest.approx(2e-5)
    assert bound(10**9 - 1, "fp32") is bound(10**8, "bf16") is None


@pytest.mark.parametrize(("factor", "follows"), [(1.1, True), (1.5, False)])
def test_only_the_mean_losses_of_long_runs_are_compared(factor: float, follows: bool) -> None:
    rng, reference = np.random.default_rng(1), list[dict[str, Any]]()
    for step in range(400):
        reference.append({"step": step, "loss": 0.1 + rng.random(), "grad_norm": 1.0})
    chaotic = [dict(record) for record in reference]
    for record in chaotic[200:]:  # some single losses are off by far more
        record["loss"] *= factor * rng.choice([0.5, 1.0, 1.5])
    followed = compared(chaotic, reference)
    assert (followed.problem == "") == follows
    assert follows or "the mean loss of 100 steps" in followed.problem
    assert followed.difference == 0, "that of steps which can be compared"


@pytest.mark.parametrize(("jump", "problem"), [(24.9, ""), (25.1, "steps of step 151 is off by")])
def test_a_mean_covers_100_losses_with_that_of_its_step(jump: float, problem: str) -> None:
    reference = [{"step": step, "loss": 1.0, "grad_norm": 1.0} for step in range(300)]
    jumps = [dict(record) for record in reference]
    jumps[150]["loss"] += jump
    message = compared(jumps, reference).problem
    assert problem in message if problem else message == ""
