"""A real object store for tests: SeaweedFS, in its own folder, on its own ports, ended by the id we started."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from pyarrow.fs import AwsStandardS3RetryStrategy, FileInfo, FileSelector, S3FileSystem

from tests.support.ports import free_port

START_S = 60.0
BUCKET = "tables"
KEY, SECRET = "lake-key", "hidden-lake-secret"
IDENTITY = {
    "name": "lake",
    "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
    "actions": ["Admin", "Read", "Write", "List", "Tagging"],
}
PARTS = ("master", "volume", "filer", "s3")


class ObjectStore:
    """One process that is all of it. Keeps its ports and its objects over `kill` and `start`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports = {part: (free_port(), free_port()) for part in PARTS}
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._ports['s3'][0]}"

    @property
    def environ(self) -> dict[str, str]:
        """What a process needs to reach it."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ALLOW_HTTP": "true",
        }

    @property
    def log(self) -> str:
        return (self.folder / "store.log").read_text(errors="replace")

    def start(self) -> ObjectStore:
        (self.folder / "identities.json").write_text(json.dumps({"identities": [IDENTITY]}))
        ports = [f"-{part}.port={one} -{part}.port.grpc={other}" for part, (one, other) in self._ports.items()]
        command = [
            str(Path(sys.executable).parent / "weed"), "-logtostderr=true", "server", f"-dir={self.folder}",
            "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-master.telemetry=false", "-master.volumeSizeLimitMB=64",
            "-master.volumePreallocate=false", "-volume.max=100", "-filer", "-s3", "-s3.port.iceberg=0",
            "-s3.port.lance=0", f"-s3.config={self.folder / 'identities.json'}", *" ".join(ports).split(),
            f"-filer.localSocket={self.folder / 'filer.sock'}", f"-s3.localSocket={self.folder / 's3.sock'}",
        ]  # fmt: skip
        with (self.folder / "store.log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.folder)
        self._wait_ready()
        return self

    def _wait_ready(self) -> None:
        """Until a file can be stored: it listens before that."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process is not None
            assert self.process.poll() is None, f"the object store ended: {self.log[-2000:]}"
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._ports["s3"][0]), 1):
                self.filesystem.create_dir(BUCKET)
                with self.filesystem.open_output_stream(f"{BUCKET}/ready") as file:
                    file.write(b"1")
                return
            time.sleep(0.05)
        raise TimeoutError(f"the object store did not start: {self.log[-2000:]}")

    @functools.cached_property
    def filesystem(self) -> S3FileSystem:
        return S3FileSystem(
            access_key=KEY,
            secret_key=SECRET,
            region="us-east-1",
            endpoint_override=self.url,
            allow_bucket_creation=True,
            retry_strategy=AwsStandardS3RetryStrategy(max_attempts=1),
        )

    def listed(self, url: str) -> list[FileInfo]:
        """All that is below, markers of folders included."""
        return self.filesystem.get_file_info(FileSelector(url.removeprefix("s3://"), recursive=True))

    def kill(self) -> None:
        """SIGKILL: a stop in order takes it ten seconds, and has no flag."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        for part, (_, port) in self._ports.items():
            Path(f"/tmp/seaweedfs-{part}-grpc-{port}.sock").unlink(missing_ok=True)


@contextlib.contextmanager
def object_store() -> Iterator[ObjectStore]:
    folder = Path(tempfile.mkdtemp(prefix="ow-objects-"))
    store = ObjectStore(folder)
    try:
        yield store.start()
    finally:
        if store.process is not None:
            store.kill()
        shutil.rmtree(folder, ignore_errors=True)
