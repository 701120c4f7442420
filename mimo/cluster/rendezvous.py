"""Where the ranks of a job meet: an address of this host, and a port of it that is free.

`mimo rendezvous` prints them, on the node that runs rank 0.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import psutil

from mimo.errors import InputError, suggestion

_FIRST_PORT, _NUM_PORTS = 20000, 10000  # below those that systems give to clients
_APART = 37  # ports of one job before those of the next
_TRIES = 500


def address_and_port(interface: str | None) -> tuple[str, int]:
    """Of the interface, or of the one that this host's name leads to; rather IPv4.

    The port follows from the job and how often it was started. Raises InputError without any.
    """
    address = next(_addresses(interface), None)
    if address is None:
        raise InputError(f"cluster.interface: {interface} has no address on {socket.gethostname()}")
    job, start = (int(os.environ.get(f"SLURM_{n}", "0")) for n in ("JOB_ID", "RESTART_COUNT"))
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for number in range(_TRIES):
        port = _FIRST_PORT + (job * _APART + start + number) % _NUM_PORTS
        with suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, port))
            return address, port
    raise InputError(f"none of {_TRIES} ports of {address} is free for the ranks to meet")


def _addresses(interface: str | None) -> Iterator[str]:
    """Those by which other hosts may reach this one, the best first."""
    known = {
        name: [
            one.address
            for family in (socket.AF_INET, socket.AF_INET6)
            for one in addresses
            if one.family == family and "%" not in one.address  # of this link alone
        ]
        for name, addresses in psutil.net_if_addrs().items()
    }
    if interface is not None:
        if interface not in known:
            raise InputError(
                f"cluster.interface: {socket.gethostname()} has no interface {interface!r}; "
                f"{suggestion(interface, known)}"
            )
        yield from known[interface]
        return
    named = list[str]()
    with suppress(OSError):  # a host may not know its own name
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        named = [str(where[0]) for *_, where in sorted(found) if "%" not in str(where[0])]
    every = [*named, *(address for addresses in known.values() for address in addresses)]
    # A name often leads to 127.0.1.1, where only this host finds itself.
    yield from sorted(every, key=lambda address: ipaddress.ip_address(address).is_loopback)
