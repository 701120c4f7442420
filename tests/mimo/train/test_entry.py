"""What a rank settles before it imports the engine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mimo.errors import InputError
from mimo.ops import acceleration
from mimo.parallel.grids import LANGUAGE, GridSpec, Layout
from mimo.train import entry


def test_the_engine_is_not_imported_with_the_entry_of_ranks() -> None:
    code = "import sys, mimo.train.entry; sys.exit('megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_rank_ends_as_of_bad_input_where_a_package_of_kernels_cannot_be_imported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "broken_engine.py").write_text("assert False, 'built for another torch'")
    monkeypatch.syspath_prepend(tmp_path)
    function = ("broken_engine", "DotProductAttention")
    monkeypatch.setitem(acceleration._FUNCTIONS, acceleration.TRANSFORMER_ENGINE, function)
    monkeypatch.setattr(acceleration, "gpu_capability", lambda: (9, 0))
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    acceleration.this_machine.cache_clear()
    layout = Layout(language=GridSpec(LANGUAGE), encoders={}, world_size=1)
    try:
        with pytest.raises(InputError, match="broken_engine is installed but cannot be imported"):
            entry.prepare_process(layout, tmp_path)
    finally:
        acceleration.this_machine.cache_clear()
