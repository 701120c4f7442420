"""Hosts on this machine: processes with a network, a name and shared memory of their own.

The kernel removes all of it with the last process, so nothing is left of a test that is killed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

INTERFACE = "eth0"
_TOOLS = ("ip", "unshare", "nsenter", "mount")


class Host:
    """One of two. address: in the network between them, where it is called ``name``."""

    def __init__(self, name: str, address: str, holder: int) -> None:
        self.name, self.address, self._holder = name, address, holder

    def _inside(self, command: Sequence[str]) -> list[str]:
        spaces = ("--net", "--uts", "--mount")
        return ["nsenter", f"--target={self._holder}", *spaces, *command]

    def start(
        self, command: Sequence[str], log: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """A command there; stdout and stderr go to a file."""
        with log.open("wb") as file:
            return subprocess.Popen(
                self._inside(command), stdout=file, stderr=file, env=environment
            )

    def cut(self) -> None:
        """Take its link down: what is sent from now on goes nowhere."""
        self.run("ip", "link", "set", INTERFACE, "down")

    def run(self, *command: str) -> None:
        subprocess.run(self._inside(command), check=True)


@contextmanager
def two_hosts(folder: Path) -> Iterator[list[Host]]:
    """Two hosts with a link between them and all files in common; skips where that cannot be."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)} (Debian: apt-get install iproute2 util-linux)")
    names = folder / "hosts"
    names.write_text("127.0.0.1 localhost\n10.77.0.1 first\n10.77.0.2 second\n")
    with ExitStack() as stack:
        hosts = []
        for number, name in enumerate(("first", "second"), 1):
            make = ["unshare", "--net", "--uts", "--mount", "sh", "-c", "echo ready; exec cat"]
            pipe = subprocess.PIPE
            holder = subprocess.Popen(make, stdin=pipe, stdout=pipe, stderr=pipe)
            stack.enter_context(holder)
            stack.callback(holder.kill)
            assert holder.stdout is not None
            assert holder.stderr is not None
            if holder.stdout.readline() != b"ready\n":
                pytest.skip(f"no namespaces here: {holder.stderr.read().decode().strip()}")
            host = Host(name, f"10.77.0.{number}", holder.pid)
            hosts.append(host)
            host.run("hostname", name)
            host.run("mount", "-t", "tmpfs", "tmpfs", "/dev/shm")
            host.run("mount", "--bind", str(names), "/etc/hosts")
            host.run("ip", "link", "set", "lo", "up")
        first, second = hosts
        peer = ("peer", "name", INTERFACE, "netns", str(second._holder))
        first.run("ip", "link", "add", INTERFACE, "type", "veth", *peer)
        for host in hosts:
            host.run("ip", "address", "add", f"{host.address}/24", "dev", INTERFACE)
            host.run("ip", "link", "set", INTERFACE, "up")
        yield hosts
