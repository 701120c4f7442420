"""Where the ranks of a job meet: an address of this host, and a port of it that is free.

`mimo rendezvous` prints them, on the node that runs rank 0.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from ipaddress import ip_address

import psutil

from mimo.errors import InputError, StartError, suggestion

FIRST_PORT, NUM_PORTS = 20000, 10000  # below those that systems give to clients
_APART = 37  # ports of one job before those of the next
_TRIES = 500


def address_and_port(interface: str | None) -> tuple[str, int]:
    """Of the interface, or of the one that this host's name leads to; rather IPv4.

    The port follows from the job and how often it was started. Raises InputError for no such
    interface, StartError without a free port.
    """
    address = _address(interface)
    job, start = (int(os.environ.get(f"SLURM_{n}", "0")) for n in ("JOB_ID", "RESTART_COUNT"))
    for number in range(_TRIES):
        port = FIRST_PORT + (job * _APART + start + number) % NUM_PORTS
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with suppress(OSError), socket.socket(family) as probe:
            probe.bind((address, port))
            return address, port
    raise StartError(f"none of {_TRIES} ports of {address} is free for the ranks to meet")


def _address(interface: str | None) -> str:
    """The best one by which other hosts may reach this one."""
    known, host = psutil.net_if_addrs(), socket.gethostname()
    if interface is not None and interface not in known:
        raise InputError(
            f"cluster.interface: {host} has no interface {interface!r}; "
            f"{suggestion(interface, known)}"
        )
    of = known.values() if interface is None else [known[interface]]
    found = [(one.family, one.address) for addresses in of for one in addresses]
    if interface is None:
        with suppress(OSError):  # a host may not know its own name
            named = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            found = [*((family, str(where[0])) for family, *_, where in named), *found]
    families = [socket.AF_INET, socket.AF_INET6]
    usable = [one for one in found if one[0] in families and "%" not in one[1]]
    # A name often leads to 127.0.1.1, where only this host finds itself.
    usable.sort(key=lambda one: (ip_address(one[1]).is_loopback, families.index(one[0])))
    if not usable:
        raise InputError(f"cluster.interface: {interface} has no address on {host}")
    return usable[0][1]
