"""`mimo status`: the state of a run, from its folder and from SLURM.

The folder is enough, so any machine that sees it can show the state.
"""

import re
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from mimo.checkpoint.folder import latest_checkpoint
from mimo.errors import InputError
from mimo.report.runs import RunData, begun_runs, jobs_of, last_output
from mimo.report.tables import number, percent
from mimo.runtime.run_files import BAD_SAMPLES, LAUNCH
from mimo.runtime.run_lock import holder

_NEWEST_BYTES = 4 * 2**20  # of metrics: some thousand steps
_RECENT = 20  # steps that a figure is the mean of
_SHOWN_JOBS = 10
_SQUEUE_SECONDS = 10.0
_TEXT_LENGTH = 300
_OUTPUT_LINES = 3  # of a job's output; the last one is the exit code
# States that a job does not leave; from all others, such as COMPLETING, it may be requeued.
_ENDED = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY"),
    *("PREEMPTED", "REVOKED", "TIMEOUT"),
)


@dataclass(frozen=True)
class View:
    """The state of a run. runs: its phases, if it has any. jobs: a line for each.

    is_queued: whether SLURM still has a job of the run; None where it is unknown.
    """

    folder: Path
    runs: Sequence[RunData]
    jobs: Sequence[str]
    holder: str
    is_queued: bool | None

    @property
    def goes_on(self) -> bool:
        return self.may_be_queued or bool(self.holder) or any(run.alive for run in self.runs)

    @property
    def may_be_queued(self) -> bool:
        """True if SLURM may still have a job: if unknown, unless the run has ended."""
        return not self.has_ended if self.is_queued is None else self.is_queued

    @property
    def has_ended(self) -> bool:
        return bool(self.runs) and all(run.state == "ended" for run in self.runs)

    @property
    def now(self) -> RunData | None:
        """The current or last phase; None before its ranks have started."""
        begun = [run for run in self.runs if run.steps_done or run.states]
        return begun[-1] if begun else next(iter(self.runs), None)


def read_view(folder: Path) -> View:
    """Read a run's folder, and ask SLURM if it is installed. Raises InputError without a run."""
    runs = begun_runs(folder, _NEWEST_BYTES)
    jobs, is_queued = _jobs(folder)
    return View(folder, runs, jobs, holder(folder), is_queued)


def _jobs(folder: Path) -> tuple[list[str], bool | None]:
    """Return a line for each job, and whether SLURM still has one of them, if that is known."""
    submitted = jobs_of(folder)[-_SHOWN_JOBS:]
    if not submitted:
        return [], False
    try:
        rows = _queue((folder / LAUNCH).stat().st_uid)
    except (OSError, subprocess.SubprocessError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip().partition("\n")[0]
        unknown = f"SLURM does not answer: {reason}"
        entries = [(e.get("job_id"), e.get("kind"), e.get("time")) for e in submitted]
        return [f"{job} ({kind}): submitted {when}; {unknown}" for job, kind, when in entries], None
    lines, states = list[str](), list[str]()
    for entry in submitted:
        job, kind = str(entry.get("job_id")), entry.get("kind")
        tasks = [row for row in rows if _is_of_job(row[0], job)]
        for number_of, state, so_far, left, where in tasks:
            more = f" for {so_far}, {left} left" if state == "RUNNING" else ""
            lines.append(f"{number_of} ({kind}): {state}{more}, {where}")
            states.append(state)
        if not tasks:
            lines.append(f"{job} ({kind}): no longer in the queue")
    return lines, any(state not in _ENDED for state in states)


def _is_of_job(number: str, job: str) -> bool:
    """Return whether a row of squeue is of a job, or of elements, such as 7_[0-3], that have it."""
    same_base = re.split(r"[_+]", number)[0] == re.split(r"[_+]", job)[0]
    return number == job or (same_base and ("[" in number or "_" not in job))


def _queue(user: int) -> list[list[str]]:
    """Return number, state, time, time left, and nodes or reason of each job of a user.

    squeue lists all jobs: it fails for a forgotten number. Raises OSError or SubprocessError.
    """
    ask = ["squeue", "--noheader", "--states=all", f"--user={user}", "--format=%i|%T|%M|%L|%R"]
    done = subprocess.run(ask, capture_output=True, text=True, timeout=_SQUEUE_SECONDS, check=True)
    rows = (line.strip().split("|", 4) for line in done.stdout.splitlines())
    return [row for row in rows if len(row) == 5]


def facts_of(view: View) -> Iterator[tuple[str, str]]:
    """Yield the names and values that are known."""
    yield "run", str(view.folder)
    yield from (("job", line) for line in view.jobs)
    if len(view.runs) > 1:
        yield from (("phase", f"{run.title}: {_state(run)}") for run in view.runs)
    if (run := view.now) is None:
        yield "state", f"no rank has started yet{f' ({view.holder})' if view.holder else ''}"
        yield from output_of(view)
        return
    yield "state", _state(run)
    if view.holder:
        yield "begun by", view.holder
    if slow := min(run.states.values(), key=lambda state: state.progress, default=None):
        yield "furthest behind", f"{slow} {slow.where}"
    planned = run.steps_planned
    share = f" of {planned:,} ({percent(run.steps_done / planned)})" if planned else ""
    yield "step", f"{run.steps_done:,}{share}"
    loss, validation = run.last("loss", _RECENT), run.last("validation_loss")
    if loss is not None:
        yield "loss", number(loss) + (f", validation {number(validation)}" if validation else "")
    rate, seconds = run.last("tokens_per_second", _RECENT), run.last("step_seconds", _RECENT)
    if rate is not None:
        yield "rate", f"{rate:,.0f} tokens/s, MFU {percent(run.last('mfu', _RECENT))}"
    if seconds is not None and planned and run.steps_done < planned:
        left = timedelta(seconds=round((planned - run.steps_done) * seconds))
        yield "left", f"{left} at {number(seconds)} s a step, without checkpoints"
    idle = [name for name in run.curves if name.startswith("idle_fraction_")]
    if idle:
        shares = (f"{name.split('_', 2)[2]} {percent(run.last(name, _RECENT))}" for name in idle)
        yield "idle", ", ".join(shares)
    yield "checkpoint", _checkpoint(view.folder)
    yield "restarts", str(sum(incident.get("kind") == "restart" for incident in run.incidents))
    if skipped := run.last("skipped_samples"):
        yield "skipped samples", f"{skipped:,.0f}, listed in {BAD_SAMPLES}"
    for last in run.incidents[-1:]:
        yield "last incident", f"{last.get('time')} {last.get('kind')}: {last.get('text')}"
    yield from output_of(view)


def output_of(view: View) -> Iterator[tuple[str, str]]:
    """Yield the end of the newest job's output, unless it may go on or all steps are done."""
    is_over = not (view.is_queued or view.has_ended)
    if is_over and (output := last_output(view.folder, _OUTPUT_LINES)):
        path, lines = output
        yield from ((path.name, line) for line in lines)


def _state(run: RunData) -> str:
    if run.state == "ended":
        return run.state
    failed = [state for state in run.states.values() if state.failure]
    failure = "; ".join(f"{state} failed: {state.failure}" for state in failed[:1])
    ranks = run.starts[-1].get("ranks") if run.starts else None
    alive = f", {len(run.alive)} of {ranks or len(run.states)} ranks answer" if run.states else ""
    return f"{run.state}{alive}{f'; {failure}' if failure else ''}"


def _checkpoint(folder: Path) -> str:
    try:
        newest = latest_checkpoint(folder)
        if newest is None:
            return "none yet"
        ago = timedelta(seconds=max(0, round(time.time() - newest.stat().st_mtime)))
    except (InputError, OSError) as error:  # it has just been removed
        return str(error)
    return f"{newest.relative_to(folder)}, {ago} ago"


def one_line(text: str, length: int = _TEXT_LENGTH) -> str:
    """Return a text from a file as one line without control characters."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if len(line) <= length else f"{line[:length]}..."


def status(folder: Path) -> int:
    """Print one screen for `mimo status`."""
    facts = list(facts_of(read_view(folder)))
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:{width}}  {one_line(value)}")
    return 0
