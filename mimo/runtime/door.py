"""The door of a job: a port that all ranks know, where rank 0 says where its store is.

Through it a rank can tell our job from another program on that port, for which a store would wait
in vain; then all ranks try the next port. Both sides prove that they know the job's secret. Door
and store listen at that address alone by which the ranks know rank 0.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address

from torch._C._distributed_c10d import TCPStore

from mimo.errors import StartError

_NUM_DOORS = 8  # ports to try, starting with the requested one
_ANSWER_SECONDS = 2.0  # within which a door must answer; other programs may never answer
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Peers:
    """Who meets at a door: what they are called, and what a person sets for them to meet elsewhere.

    address, port: environment variables or options.
    """

    name: str
    address: str
    port: str


RANKS = Peers("rank", "MASTER_ADDR", "MASTER_PORT")


def secret_of(world_size: int) -> bytes:
    """Something that the ranks of one job share with no other job, and is never sent.

    MIMO_JOB_SECRET makes it one that nobody can guess.
    """
    # Each component of a heterogeneous job has a number of its own beside that of the first.
    job = "SLURM_JOB_ID_HET_GROUP_0"
    names = ("SLURM_STEP_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RUN_ID", "MIMO_JOB_SECRET")
    names = (job if job in os.environ else "SLURM_JOB_ID", *names)
    parts = [os.environ.get(name, "") for name in names]
    return repr((world_size, parts)).encode()


def proof(secret: bytes, words: str) -> str:
    """That whoever says the words knows the secret."""
    return hmac.new(secret, words.encode(), hashlib.sha256).hexdigest()


def _own_address(host: str, peers: Peers) -> str:
    """The address of this machine by which its peers know it, to listen at no other.

    Empty, with a warning, for all addresses: where the name leads elsewhere from here, as through a
    service of Kubernetes, or back to the machine itself, as a host's own name does on Debian.
    """
    for wanted in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):  # no such name, or not of this machine
            for _, _, _, _, place in socket.getaddrinfo(host, None, wanted, socket.SOCK_STREAM):
                own = str(place[0])
                if host in ("localhost", own) or not ip_address(own).is_loopback:
                    _listener(own, 0).close()
                    return own
    print(
        f"warning: {host} leads to no address of this machine that others reach, so the store of "
        f"the {peers.name}s listens at all of its addresses; give one of them as {peers.address}",
        file=sys.stderr,
        flush=True,
    )
    return ""


def _listener(own: str, port: int) -> socket.socket:
    if own:
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        return socket.create_server((own, port), family=family, backlog=1024)
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)


def open_store(
    host: str, port: int, secret: bytes, timeout: datetime.timedelta, peers: Peers = RANKS
) -> TCPStore:
    """A store of this machine, and a door at ``port`` or one of the next. Raises StartError."""
    own, door = _own_address(host, peers), None
    for candidate in range(port, port + _NUM_DOORS):
        with suppress(OSError):
            door = _listener(own, candidate)
            break
    if door is None:
        raise _all_taken(host, port, peers)
    place = _listener(own, 0)
    at, descriptor = (own or "localhost", place.getsockname()[1]), place.detach()
    store = TCPStore(*at, None, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)
    given = (door, secret, store.port)
    threading.Thread(target=_keep_door, args=given, name="door", daemon=True).start()
    return store


def _keep_door(door: socket.socket, secret: bytes, store_port: int) -> None:
    """Tell every visitor of this job where the store is, for as long as this process runs."""
    while True:
        try:
            visitor, _ = door.accept()
        except OSError:  # a visitor that has left already, or no file is free: no reason to end
            time.sleep(_POLL_SECONDS)
            continue
        # Each by a thread: one that says nothing keeps nobody waiting.
        given = (visitor, secret, store_port)
        threading.Thread(target=_answer, args=given, name="visitor", daemon=True).start()


def _answer(visitor: socket.socket, secret: bytes, store_port: int) -> None:
    question = os.urandom(16).hex()
    with visitor, suppress(OSError):
        visitor.settimeout(_ANSWER_SECONDS)
        visitor.sendall(f"mimo {question}\n".encode())
        said = visitor.makefile("rb").readline(200).decode(errors="replace").strip()
        if hmac.compare_digest(said.encode(), proof(secret, f"rank {question}").encode()):
            answer = f"{proof(secret, f'door {question} {store_port}')} {store_port}\n"
            visitor.sendall(answer.encode())


def _knock(host: str, port: int, secret: bytes) -> int | None:
    """The port of the store behind the door; None if it is another's. Raises OSError."""
    with socket.create_connection((host, port), _ANSWER_SECONDS) as door, suppress(OSError):
        door.settimeout(_ANSWER_SECONDS)
        lines = door.makefile("rb")
        name, _, question = lines.readline(200).decode(errors="replace").strip().partition(" ")
        if name != "mimo":
            return None
        door.sendall(f"{proof(secret, f'rank {question}')}\n".encode())
        said, _, store_port = lines.readline(200).decode(errors="replace").strip().partition(" ")
        if said and said == proof(secret, f"door {question} {store_port}"):
            return int(store_port)
    return None


def find_store(
    host: str,
    port: int,
    secret: bytes,
    timeout_seconds: float,
    number: int,
    peers: Peers = RANKS,
) -> int:
    """The port of the store, as the first peer gives it at its door, which may not be open yet.

    number: who asks. Raises StartError.
    """
    deadline = time.monotonic() + timeout_seconds
    reason = ""
    while time.monotonic() < deadline:
        strangers = 0
        for candidate in range(port, port + _NUM_DOORS):
            try:
                if (store_port := _knock(host, candidate, secret)) is not None:
                    return store_port
                strangers, reason = strangers + 1, "another program or job answers there"
            except OSError as error:
                reason = str(error)
        if strangers == _NUM_DOORS:
            raise _all_taken(host, port, peers)
        time.sleep(_POLL_SECONDS)
    to_set = " and ".join(dict.fromkeys((peers.address, peers.port)))
    raise StartError(
        f"{peers.name} {number} did not find {peers.name} 0 at {host}:{port} within "
        f"{timeout_seconds:g} s: {reason}; see whether {peers.name} 0 runs there, else set {to_set}"
    )


def _all_taken(host: str, port: int, peers: Peers) -> StartError:
    return StartError(
        f"ports {port} to {port + _NUM_DOORS - 1} of {host} are taken by other programs, so the "
        f"{peers.name}s cannot meet there; give a port of that host that is free as {peers.port}"
    )
