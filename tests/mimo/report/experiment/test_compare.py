"""The criterion: rounding may grow as it does in training, an error may not hide behind it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mimo.report.experiment.compare import STRICT_STEPS, bound, follow

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
    shuffle, found = np.random.default_rng(order), []
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
        found.append({"step": step, "loss": float((off**2).mean()), **norms})
        lr = np.float32(rate * 0.01 * min(1, (step + 1) / 50))
        for w, g, (mean, square) in zip(weights, gradients, moments, strict=True):
            mean += 0.1 * (g - mean)
            square += 0.05 * (g * g - square)
            scale = np.float32((1 - 0.95 ** (step + 1)) ** 0.5 / (1 - 0.9 ** (step + 1)))
            w -= lr * scale * mean / (np.sqrt(square) + np.float32(1e-8))
    return found


REFERENCE = train()


@pytest.mark.parametrize("order", range(1, 6))
def test_sums_in_another_order_follow_over_all_steps(order: int) -> None:
    found = follow(train(order), REFERENCE, "fp32")
    assert found.problem == ""
    allowed = bound(found.at, "fp32")
    assert allowed is not None
    assert 0 < found.difference < allowed


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
    assert problem in follow(wrong, REFERENCE, "fp32").problem


def test_what_goes_wrong_later_is_told_with_its_step() -> None:
    late = [dict(one) for one in REFERENCE]
    for one in late[40:]:
        one["loss"] *= 1.001
    found = follow(late, REFERENCE, "fp32")
    assert found.problem.startswith("loss of step 41 is off by 1.0e-03")
    assert found.difference == pytest.approx(1e-3)


def of_loss(loss: float | None) -> list[dict[str, Any]]:
    return [{"step": 0, "loss": loss, "grad_norm": 1.0}]


@pytest.mark.parametrize(
    ("ours", "theirs", "follows"),
    [(None, None, True), (None, 1.0, False), (1.0, None, False), (0.0, 0.0, True)],
)
def test_losses_that_are_not_finite_are_alike_where_both_are(
    ours: float | None, theirs: float | None, follows: bool
) -> None:
    assert (follow(of_loss(ours), of_loss(theirs), "fp32").problem == "") == follows


def test_the_bound_is_of_the_precision_and_grows_until_single_steps_say_nothing() -> None:
    first = [bound(STRICT_STEPS - 1, precision) for precision in ("fp64", "fp32", "bf16")]
    assert first == [1e-10, 1e-5, 0.02]
    assert bound(STRICT_STEPS + 9, "fp32") == pytest.approx(2e-5)
    assert bound(10**9 - 1, "fp32") is bound(10**8, "bf16") is None


@pytest.mark.parametrize(("factor", "follows"), [(1.1, True), (1.5, False)])
def test_of_long_runs_only_means_have_to_be_alike(factor: float, follows: bool) -> None:
    rng, reference = np.random.default_rng(1), list[dict[str, Any]]()
    for step in range(400):
        reference.append({"step": step, "loss": 0.1 + rng.random(), "grad_norm": 1.0})
    chaotic = [dict(one) for one in reference]
    for one in chaotic[200:]:  # some single losses are off by far more
        one["loss"] *= factor * rng.choice([0.5, 1.0, 1.5])
    found = follow(chaotic, reference, "fp32")
    assert (found.problem == "") == follows
    assert follows or "the mean loss of 100 steps" in found.problem
    assert found.difference == 0, "that of steps which can be compared"


@pytest.mark.parametrize(("jump", "problem"), [(24.9, ""), (25.1, "steps of step 151 is off by")])
def test_a_mean_is_over_100_losses_that_of_its_own_step_among_them(
    jump: float, problem: str
) -> None:
    reference = [{"step": step, "loss": 1.0, "grad_norm": 1.0} for step in range(300)]
    jumps = [dict(one) for one in reference]
    jumps[150]["loss"] += jump
    found = follow(jumps, reference, "fp32").problem
    assert problem in found if problem else found == ""
