"""Where the ranks of a job meet."""

import socket
from pathlib import Path

import psutil
import pytest

from mimo.errors import InputError
from mimo.slurm.rendezvous import address_and_port


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "123")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")


def test_the_address_is_that_of_the_interface() -> None:
    assert address_and_port("lo")[0] == "127.0.0.1"


def test_an_interface_that_is_not_there_is_named_with_those_that_are() -> None:
    with pytest.raises(InputError, match=r"cluster\.interface: .* no interface 'loo'.*'lo'"):
        address_and_port("loo")


def test_a_port_that_is_taken_is_passed_over_and_the_job_gives_the_first() -> None:
    address, port = address_and_port("lo")
    assert address_and_port("lo") == (address, port)
    with socket.create_server((address, port)):
        assert address_and_port("lo") == (address, port + 1)


def test_another_start_of_the_job_and_another_job_have_other_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = [address_and_port("lo")[1]]
    for variable in ("SLURM_RESTART_COUNT", "SLURM_JOB_ID"):
        monkeypatch.setenv(variable, "7")
        ports.append(address_and_port("lo")[1])
    assert len(set(ports)) == 3


def test_a_name_that_leads_to_this_host_alone_gives_way_to_an_address_of_an_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = psutil.net_if_addrs()["lo"][0]._replace(address="10.1.2.3")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"ib0": [one]})
    where = (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [where])
    with pytest.raises(InputError, match=r"ports of 10\.1\.2\.3 is free"):  # not of this host
        address_and_port(None)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this host has no IPv6")
def test_an_interface_with_ipv6_alone_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    one = psutil.net_if_addrs()["lo"][0]._replace(family=socket.AF_INET6, address="::1")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"ib0": [one]})
    assert address_and_port("ib0")[0] == "::1"
