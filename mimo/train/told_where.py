"""Where in the run an error of the bridge happened, for its message."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from bridge import BridgeError, SampleKeys, TransferWatch

_SHOWN_SAMPLES = 16  # in one error message


@contextmanager
def told_where(watch: TransferWatch | None, batch: str, sample_keys: SampleKeys) -> Iterator[None]:
    """Bridge errors inside get a note with ``batch`` and the samples of their microbatch.

    An error about one sample gets that one alone.

    ``watch`` notes it until it is told another place: on a device, transfers that were asked for
    inside may be late long after.
    """

    def tell(error: BridgeError) -> None:
        where = batch
        if error.microbatch is not None:
            keys = sample_keys(error.microbatch)
            if error.sample is not None:
                error.add_note(
                    f"in {where}, sample {keys[error.sample]} of microbatch {error.microbatch}"
                )
                return
            more = f" and {len(keys) - _SHOWN_SAMPLES} more" if keys[_SHOWN_SAMPLES:] else ""
            where += f", samples of microbatch {error.microbatch}: "
            where += ", ".join(keys[:_SHOWN_SAMPLES]) + more
        error.add_note(f"in {where}")

    if watch is not None:
        watch.tell_where = tell
    try:
        yield
    except BridgeError as error:
        tell(error)
        raise
