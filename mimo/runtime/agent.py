"""torchrun whose hosts find each other as ranks do: through a door that only the job's own pass.

torchrun's own store listens at every address of the first host and asks nobody who he is. Else all
is torchrun's: `python -m mimo.runtime.agent --rdzv-backend=mimo --rdzv-endpoint=HOST:PORT
--rdzv-conf=rank=0 ...`, as `mimo launch --hosts` prints it.
"""

from __future__ import annotations

import sys

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.run import main

from mimo.errors import InputError
from mimo.runtime.door import Peers, find_store, open_store, secret_of

_NAME = "mimo"
_HOSTS = Peers("host", "--rdzv-endpoint", "--rdzv-endpoint")
_MEETING_SECONDS = 600  # how far apart in time a person may start the hosts


class _ThroughTheDoor(StaticTCPRendezvous):
    def get_backend(self) -> str:
        """What torchrun calls it in its messages."""
        return _NAME

    def next_rendezvous(self) -> RendezvousInfo:
        """The same for every attempt; the first opens the store. Raises StartError."""
        place = (self.master_addr, self.master_port, secret_of(self.world_size))
        if self._store is None and self.rank == 0:
            self._store = open_store(*place, self.timeout, _HOSTS)
        elif self._store is None:
            port = find_store(*place, self.timeout.total_seconds(), self.rank, _HOSTS)
            given = (self.master_addr, port, None, False, self.timeout)
            self._store = TCPStore(*given, wait_for_workers=False)
        assert isinstance(self._store, TCPStore), "nobody else sets it"
        at = RendezvousStoreInfo(self.master_addr, self._store.port)
        return RendezvousInfo(PrefixStore(self.run_id, self._store), self.rank, self.world_size, at)


def _handler(given: RendezvousParameters) -> StaticTCPRendezvous:
    address, port = parse_rendezvous_endpoint(given.endpoint, -1)
    rank = given.get_as_int("rank")
    if rank is None or port < 0:
        raise InputError(
            "--rdzv-backend=mimo needs --rdzv-endpoint=HOST:PORT, the same on all hosts, and "
            "--rdzv-conf=rank=N; `mimo launch --hosts` prints the whole line of each host"
        )
    return _ThroughTheDoor(address, port, rank, given.max_nodes, given.run_id, _MEETING_SECONDS)


if __name__ == "__main__":
    rendezvous_handler_registry.register(_NAME, _handler)
    try:
        main()
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
