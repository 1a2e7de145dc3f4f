"""A master and a process that lends memory to it: what a Mooncake Store is made of."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from tests.storage.engines import Engine, free_port

OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 64 << 20, 16 << 20, "tcp", "", sys.argv[1]) == 0
print("ready", flush=True)
sys.stdin.read()
"""


class MooncakeServers(Engine):
    """A master with one owner of 64 MiB. Killed together; what they held is gone."""

    def __init__(self, folder: Path) -> None:
        spec = find_spec("mooncake")
        assert spec is not None and spec.origin is not None
        self.port = free_port()
        folder.mkdir(exist_ok=True)
        flags = {
            "rpc_address": "127.0.0.1",
            "rpc_port": self.port,
            "metrics_host": "127.0.0.1",
            "metrics_port": free_port(),
            "default_kv_lease_ttl": 200,
        }
        master = str(Path(spec.origin).with_name("mooncake_master"))
        command = [master, *(f"-{name}={value}" for name, value in flags.items())]
        super().__init__(command, [self.port], folder / "mooncake.log")

    def start(self) -> None:
        super().start()
        self.start_owner()

    def start_owner(self) -> None:
        with self.log.open("ab") as log:
            self.owner = subprocess.Popen(
                [sys.executable, "-c", OWNER, f"127.0.0.1:{self.port}"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self.owner.stdout is not None
        assert self.owner.stdout.readline() == b"ready\n", self.log.read_text()[-2000:]

    def kill(self) -> None:
        super().kill()
        self.kill_owner()

    def kill_owner(self) -> None:
        owner = self.__dict__.get("owner")
        if owner is not None:
            owner.kill()
            owner.wait()
