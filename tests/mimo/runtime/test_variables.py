"""What the environment of ranks says where the user has said nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mimo.runtime.ranks import VARIABLES, set_variables


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        for name in (variable.name, *variable.instead):
            monkeypatch.setenv(name, "so that it is put back")
            monkeypatch.delenv(name)


def test_variables_that_nobody_set_get_our_value_and_are_not_called_the_users() -> None:
    for _ in range(2):
        set_variables()
        assert all(os.environ[variable.name] == variable.value for variable in VARIABLES)
        assert not any(variable.is_users for variable in VARIABLES)


def test_a_value_of_the_user_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    set_variables()
    assert os.environ["GOMP_SPINCOUNT"] == "7"


def test_another_name_for_the_same_wins_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """GNU OpenMP would prefer a count of spins to the policy that the user chose."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    set_variables()
    assert "GOMP_SPINCOUNT" not in os.environ
    assert "KMP_BLOCKTIME" not in os.environ
    assert "PYTORCH_CUDA_ALLOC_CONF" in os.environ


def test_threads_of_a_command_and_its_ranks_do_not_spin() -> None:
    """OpenMP tells what it has read of the environment, which it does once, when it is loaded.

    Ranks are forked from a process that inherits the environment of the command.
    """
    code = (
        "import sys\n"
        "from typer.testing import CliRunner\n"
        "from mimo.cli.main import app\n"
        "assert 'torch' not in sys.modules\n"
        "CliRunner().invoke(app, ['check', 'absent.yaml'])\n"
        "import torch\n"
    )
    environment = os.environ | {"OMP_DISPLAY_ENV": "verbose"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    if "_OPENMP" not in done.stderr:
        pytest.skip("this torch has another OpenMP, or none")
    assert "GOMP_SPINCOUNT = '1000'" in done.stderr, done.stderr
