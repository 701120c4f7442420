"""Nothing that initialises CUDA is imported before ranks are forked, or they say what did so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = "tests.mimo.runtime.test_preload"
ENGINE = "mimo.engines.megatron.preload"

# Stands in for the package: its import asks for the device's capability, which initialises CUDA.
TRANSFORMER_ENGINE = """
import os
from pathlib import Path

import torch

torch.cuda._initialized = True
with (Path(__file__).parent / "imported_by").open("a") as file:
    print(os.environ.get("RANK", "the fork server"), file=file)
raise ImportError("this is only a stand-in")
"""


def use_the_engine() -> None:
    """Import what a rank needs, as far as the machine allows; CUDA is untouched until then."""
    import torch

    assert not torch.cuda.is_initialized()
    assert "megatron.core" not in sys.modules
    assert "transformers" in sys.modules
    import megatron  # noqa: F401
    import transformer_engine  # type: ignore[import-not-found]  # noqa: F401


def do_nothing() -> None: ...


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The folder of a stand-in for Transformer Engine."""
    folder = tmp_path / "packages" / "transformer_engine"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(TRANSFORMER_ENGINE)
    return folder


def launch(package: Path, target: str, preload: list[str]) -> subprocess.CompletedProcess[str]:
    """Start a rank from a process of its own, on a machine that may have GPUs."""
    code = (
        "import sys; from mimo.runtime.ranks import launch\n"
        f"sys.exit(launch('{HERE}:{target}', (), 1, {preload}))"
    )
    path = os.pathsep.join([str(package.parent), *sys.path])
    environment = {name: os.environ[name] for name in os.environ if name != "CUDA_VISIBLE_DEVICES"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_ranks_and_not_the_fork_server_import_an_engine_that_initialises_cuda(
    package: Path,
) -> None:
    done = launch(package, "use_the_engine", [ENGINE, "mimo.train.rank", "transformers"])
    assert "this is only a stand-in" in done.stderr, done.stderr
    assert (package / "imported_by").read_text().splitlines() == ["0"]


def test_ranks_forked_after_cuda_was_initialised_say_which_module_did_it(package: Path) -> None:
    text = TRANSFORMER_ENGINE.replace('raise ImportError("this is only a stand-in")', "")
    (package / "__init__.py").write_text(text)
    done = launch(package, "do_nothing", ["json", "transformer_engine", "transformers"])
    assert done.returncode == 1
    assert "importing transformer_engine initialised CUDA in the process that" in done.stderr
    assert (package / "imported_by").read_text().splitlines() == ["the fork server"]
