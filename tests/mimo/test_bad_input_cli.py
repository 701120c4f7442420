"""Bad input on the command line: exit code 2, a message, little time and little memory."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import quick_values
from tests.mimo import tiny

MEMORY_BYTES = 2**30
CPU_SECONDS = 20  # a hang burns more; importing torch alone burns a few


# Runs between the tests and the command, as a child starts with the peak of whoever forks it.
MEASURE = f"""
import resource, subprocess, sys
limit = lambda: resource.setrlimit(resource.RLIMIT_CPU, ({CPU_SECONDS}, {CPU_SECONDS}))
done = subprocess.run(sys.argv[1:], preexec_fn=limit)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(done.returncode % 256)
"""


def peak_bytes(arguments: list[str]) -> tuple[int, str, str, int]:
    """Exit code, stdout, stderr and the resident memory that the process had at most."""
    command = [sys.executable, "-c", MEASURE, sys.executable, "-m", "mimo.cli.main", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    *out, peak = done.stdout.splitlines()
    return done.returncode, "\n".join(out), done.stderr, int(peak) * 1024


BAD_INPUT = {
    " ".join(arguments)[:40]: arguments
    for arguments in (
        ["check", "{recipe}", "language.grid.pp=1000000000000"],
        ["check", "{recipe}", "train.global_batch_size=1000000000000000"],
        ["check", "{recipe}", "data.sources.².path=x"],
        ["train", "{recipe}", "name=" + "x" * 300],
        ["train", "{recipe}", "language.model.hidden_size=1048576"],
        ["train", "{recipe}", "language.grid.dp=1048575"],
        ["verify", "{recipe}", "--max-ranks", "1000000"],
        [
            "verify",
            "{recipe}",
            "language.grid.dp=65536",
            "train.global_batch_size=262144",
            "--full",
        ],
        ["tiny", "qwen3_vl", "{folder}/out", "--seed", str(2**70)],
    )
}


@pytest.mark.parametrize(
    "arguments", quick_values(BAD_INPUT, "check {recipe} data.sources.².path=x")
)
def test_the_command_line_refuses_bad_input(tmp_path: Path, arguments: list[str]) -> None:
    recipe = tiny.write_recipe(tmp_path)
    words = [word.format(recipe=recipe, folder=tmp_path) for word in arguments]
    code, out, err, peak = peak_bytes(words)
    assert code == 2, (code, err)
    assert err.strip()
    assert "Traceback" not in out + err
    assert peak < MEMORY_BYTES
