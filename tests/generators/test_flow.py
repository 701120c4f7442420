"""Times and steps of sampling against diffusers' scheduler and Qwen-Image's pipeline."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import pytest
import torch

from mimo.families.flow import Schedule, euler_step, guided, shifted_time

QWEN_IMAGE: dict[str, Any] = {
    "base_image_seq_len": 256,
    "base_shift": 0.5,
    "invert_sigmas": False,
    "max_image_seq_len": 8192,
    "max_shift": 0.9,
    "num_train_timesteps": 1000,
    "shift": 1.0,
    "shift_terminal": 0.02,
    "stochastic_sampling": False,
    "time_shift_type": "exponential",
    "use_beta_sigmas": False,
    "use_dynamic_shifting": True,
    "use_exponential_sigmas": False,
    "use_karras_sigmas": False,
}
"""The scheduler's published configuration."""


def scheduler_of(config: dict[str, Any]) -> Any:
    return importlib.import_module("diffusers").FlowMatchEulerDiscreteScheduler(**config)


def pipeline_times(scheduler: Any, num_steps: int, num_tokens: int) -> torch.Tensor:
    """As `QwenImagePipeline` sets them."""
    module = importlib.import_module("diffusers.pipelines.qwenimage.pipeline_qwenimage")
    keys = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    mu = module.calculate_shift(num_tokens, *(scheduler.config[key] for key in keys))
    sigmas = np.linspace(1.0, 1 / num_steps, num_steps)
    module.retrieve_timesteps(scheduler, num_steps, "cpu", sigmas=sigmas, mu=mu)
    return scheduler.sigmas


@pytest.mark.parametrize("num_steps", [1, 2, 20, 50])
@pytest.mark.parametrize("num_tokens", [16, 256, 4096, 10000])
@pytest.mark.parametrize(
    "config",
    [
        QWEN_IMAGE,
        {**QWEN_IMAGE, "shift_terminal": None},
        {**QWEN_IMAGE, "time_shift_type": "linear"},
        {"shift": 1.0},
        {"shift": 3.0},
        {"shift": 3.0, "shift_terminal": 0.1},
    ],
    ids=["qwen_image", "without_end", "linear", "even", "shifted", "shifted_to_an_end"],
)
def test_times_are_the_schedulers_sigmas(
    config: dict[str, Any], num_tokens: int, num_steps: int
) -> None:
    if num_steps == 1 and config.get("shift_terminal"):
        return  # the scheduler divides by 0
    scheduler = scheduler_of(config)
    expected = pipeline_times(scheduler, num_steps, num_tokens)
    schedule = Schedule.from_config(scheduler.config)
    torch.testing.assert_close(schedule.times(num_steps, num_tokens), expected, atol=1e-6, rtol=0)


def test_a_single_step_begins_with_noise_alone() -> None:
    schedule = Schedule.from_config(QWEN_IMAGE)
    assert schedule.times(1, 16).tolist() == [1.0, 0.0]


def test_the_schedulers_own_times_are_even_between_noise_and_its_last() -> None:
    """`set_timesteps` without sigmas ends at 1 / num_train_timesteps, pipelines at 1 / steps."""
    scheduler = scheduler_of({"shift": 3.0})
    scheduler.set_timesteps(10)
    ours = Schedule(shift=3.0).times(10, 16)
    assert scheduler.sigmas[0] == ours[0] == 1
    assert scheduler.sigmas[-2] < ours[-2]


def test_other_sigmas_are_refused_by_key() -> None:
    with pytest.raises(ValueError, match="use_karras_sigmas is True"):
        Schedule.from_config({"use_karras_sigmas": True})


def test_a_shift_above_1_favours_noise() -> None:
    assert shifted_time(0.5, 3.0) == 0.75
    times = torch.tensor([0.0, 0.5, 1.0])
    assert shifted_time(times, 3.0).tolist() == [0, 0.75, 1]


def test_steps_are_the_schedulers() -> None:
    scheduler = scheduler_of(QWEN_IMAGE)
    times = pipeline_times(scheduler, 5, 16)
    scheduler.set_begin_index(0)
    theirs = ours = torch.randn(2, 16, 12)
    for number, moment in enumerate(scheduler.timesteps):
        velocity = torch.randn(2, 16, 12)
        theirs = scheduler.step(velocity, moment, theirs, return_dict=False)[0]
        ours = euler_step(ours, velocity, float(times[number]), float(times[number + 1]))
        torch.testing.assert_close(ours, theirs)


def test_a_step_of_the_whole_time_along_the_velocity_gives_the_image() -> None:
    image, noise = torch.randn(2, 16, 12), torch.randn(2, 16, 12)
    torch.testing.assert_close(euler_step(noise, noise - image, 1.0, 0.0), image)


def test_guidance_keeps_a_tokens_norm() -> None:
    with_condition, without = torch.randn(2, 16, 12), torch.randn(2, 16, 12)
    torch.testing.assert_close(guided(with_condition, without, 1.0), with_condition)
    velocity = without + 4 * (with_condition - without)
    rescaled = guided(with_condition, without, 4.0)
    torch.testing.assert_close(rescaled.norm(dim=-1), with_condition.norm(dim=-1))
    torch.testing.assert_close(
        rescaled / rescaled.norm(dim=-1, keepdim=True),
        velocity / velocity.norm(dim=-1, keepdim=True),
    )
