"""What a person is told who points the store to S3 wrongly: the cause, the fix, at once, and never a secret."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from s3 import S3Server

from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore

BAD_SETUPS = {
    "unknown access key": ({"AWS_ACCESS_KEY_ID": "nobody"}, "does not know this access key|access denied"),
    "wrong secret": ({"AWS_SECRET_ACCESS_KEY": "wrong-secret-0123456789"}, "secret key does not belong|access denied"),
    "no credentials": (
        {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None},
        r"no credentials.*Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    ),
    "half of the credentials": ({"AWS_SECRET_ACCESS_KEY": None}, r"(?i)partial credentials.*Set AWS_ACCESS_KEY_ID"),
    "unknown profile": (
        {"AWS_PROFILE": "nobody", "AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None},
        r"nobody.*Check AWS_PROFILE",
    ),
    "address without a scheme": ({"AWS_ENDPOINT_URL": "127.0.0.1:1"}, r"AWS_ENDPOINT_URL: expected http://"),
    "credentials in the address": ({"AWS_ENDPOINT_URL": "http://a:hidden-b@host"}, "without credentials"),
}


@pytest.mark.parametrize("setup", BAD_SETUPS)
def test_a_wrong_setup_is_told_at_once_with_the_fix_and_without_the_secret(
    seaweedfs: S3Server,
    setup: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    changes, expected = BAD_SETUPS[setup]
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in changes.items():
        if value is None:
            monkeypatch.delenv(name)
        else:
            monkeypatch.setenv(name, value)
    caplog.set_level(logging.DEBUG)
    for use in (lambda store: store.publish("a", b"x"), lambda store: store.find("a"), lambda store: store.list()):
        with pytest.raises(StoreError, match=expected) as caught:
            use(ObjectStore.open(seaweedfs.url("setup")))
        said = "\n".join([str(caught.value), repr(caught.value), repr(caught.value.__cause__), caplog.text])
        for secret in (seaweedfs.secret, "wrong-secret-0123456789", "hidden-b"):
            assert secret not in said
        assert "tried" not in str(caught.value)


def test_a_bucket_that_is_missing_is_named_and_not_created(seaweedfs: S3Server) -> None:
    store = ObjectStore.open("s3://no-such-bucket/runs")
    uses: list[Callable[[], Any]] = [
        lambda: store.publish("a", b"x"),
        lambda: store.publish("a", bytes(32 << 20)),
        lambda: store.find("a"),
        lambda: store.read("a"),
        lambda: store.exists("a"),
        lambda: store.list(),
        lambda: store.delete("a"),
    ]
    for use in uses:
        with pytest.raises(StoreError, match=r"bucket 'no-such-bucket' does not exist\. Create it first"):
            use()
    assert [bucket["Name"] for bucket in seaweedfs.client().list_buckets()["Buckets"]] == [seaweedfs.bucket]


def test_the_address_may_be_a_host_name_and_the_one_for_s3_goes_first(
    seaweedfs: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BUCKET.localhost does not exist: the bucket must go into the path."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", seaweedfs.endpoint.replace("127.0.0.1", "localhost"))
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    store = ObjectStore.open(seaweedfs.url("named"))
    store.publish("a", b"x")
    assert store.read("a") == b"x"
    store.delete("")
