"""Three servers on this machine that share the slots of a cluster."""

from pathlib import Path

from hicache.storage.valkey.servers import SLOTS
from tests.storage.engines import ValkeyServer, free_port, wait_until

NODES = 3


class ClusterServers:
    def __init__(self, folder: Path) -> None:
        self.servers: list[ValkeyServer] = []
        try:
            for _ in range(NODES):
                # The port on which nodes talk to each other is given too: by default it is another one, 10000 higher.
                self.servers.append(
                    ValkeyServer(
                        folder,
                        "--cluster-enabled",
                        "yes",
                        "--cluster-port",
                        str(free_port()),
                        "--cluster-config-file",
                        f"nodes-{len(self.servers)}.conf",
                    )
                )
            self._form()
        except BaseException:
            self.kill()
            raise

    def flush(self) -> None:
        for server in self.servers:
            assert server.call("FLUSHALL") == b"OK"

    def kill(self) -> None:
        for server in self.servers:
            server.kill()

    def _form(self) -> None:
        bounds = [SLOTS * i // NODES for i in range(NODES + 1)]
        for i, server in enumerate(self.servers):
            assert server.call("CLUSTER", "ADDSLOTSRANGE", str(bounds[i]), str(bounds[i + 1] - 1)) == b"OK"
            bus_port = server.command[server.command.index("--cluster-port") + 1]
            for other in self.servers:
                if other is not server:
                    assert other.call("CLUSTER", "MEET", "127.0.0.1", str(server.port), bus_port) == b"OK"
        wait_until(lambda: all(map(_knows_all, self.servers)), "the cluster")


def _knows_all(server: ValkeyServer) -> bool:
    info, ranges = server.call("CLUSTER", "INFO"), server.call("CLUSTER", "SLOTS")
    assert isinstance(info, bytes) and isinstance(ranges, list)
    return b"cluster_state:ok" in info and len(ranges) == NODES
