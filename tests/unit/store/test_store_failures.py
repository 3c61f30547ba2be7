"""What a person sees when the store cannot be written. Tests may run as root, so permissions are no obstacle here."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore
from pa_core.store.weights import WeightStore


def test_a_store_below_a_regular_file_is_refused_with_the_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    store = ObjectStore.open(str(tmp_path / "file" / "runs"))
    with pytest.raises(StoreError) as caught:
        store.publish("run.json", b"{}")
    message = str(caught.value)
    assert f"file://{tmp_path}/file/runs" in message
    assert "cannot write 'run.json'" in message
    assert "ENOTDIR" in message
    assert "point store.url to a folder" in message
    assert not isinstance(caught.value, OSError)


def test_a_parent_that_is_an_object_is_a_store_error_not_a_taken_key(store: ObjectStore) -> None:
    if store.url.startswith("s3:"):
        pytest.skip("S3 has no folders, so nothing stands in the way of a/b")
    store.publish("a", b"x")
    with pytest.raises(StoreError, match="cannot write 'a/b'"):
        store.publish("a/b", b"x")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc, which nobody can write to")
def test_an_unwritable_store_is_refused_even_for_root() -> None:
    store = ObjectStore.open("/proc/periodic-asynchrony")
    with pytest.raises(StoreError, match=r"store file:///proc/periodic-asynchrony: cannot write 'run\.json'"):
        store.publish("run.json", b"{}")
    with pytest.raises(StoreError, match="cannot write"):
        WeightStore(store).publish(0, {"w": torch.ones(2)})


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "Free space"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "Grant write access"),
        (errno.EOPNOTSUPP, "hard links"),
    ],
)
def test_errors_name_their_cause_and_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fix: str
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    store = ObjectStore.open(str(tmp_path))
    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match=fix) as caught:
        store.publish("key", b"x")
    assert os.strerror(number) in str(caught.value)
    assert errno.errorcode[number] in str(caught.value)
    assert store.list(unfinished=True) == []


PUBLISH_UNTIL_FULL = """
import sys, torch
from pa_core.errors import StoreError
from pa_core.store.objects import ObjectStore
from pa_core.store.weights import WeightStore

store = ObjectStore.open(sys.argv[1])
weights = WeightStore(store)
small = {"w": torch.full((1000,), 1.0)}
weights.publish(1, small)
before = store.list(unfinished=True)
LIMIT
try:
    weights.publish(2, {"w": torch.ones(4_000_000), "v": torch.ones(4_000_000)}, {"config.json": b"{}"})
except StoreError as error:
    print(error)
else:
    sys.exit("published although there is no space")
assert weights.manifest(2) is None
assert store.list(unfinished=True) == before, store.list(unfinished=True)
assert weights.latest() == 1
assert torch.equal(weights.load(1)["w"], small["w"])
weights.publish(2, small)
assert torch.equal(weights.load(2)["w"], small["w"])
"""


def test_a_file_size_limit_while_publishing_leaves_the_earlier_version_loadable(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
    done = subprocess.run(
        [sys.executable, "-c", PUBLISH_UNTIL_FULL.replace("LIMIT", limit), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert f"store file://{tmp_path}/weights: cannot write 'v000002/model-" in done.stdout
    assert "File too large (EFBIG)" in done.stdout
    assert "store.url" in done.stdout


def test_no_space_left_while_publishing_leaves_the_earlier_version_loadable(tmp_path: Path) -> None:
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed, so no small file system can be made")
    mount = 'mount -t tmpfs -o size=8m none "$0" || exit 77; exec "$1" -c "$2" "$0"'
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, str(tmp_path), sys.executable, PUBLISH_UNTIL_FULL.replace("LIMIT", "")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this user may not mount a small file system")
    assert done.returncode == 0, done.stderr
    assert "No space left on device (ENOSPC)" in done.stdout
    assert "Free space there, lower store.keep_versions" in done.stdout


def test_a_full_disk_at_the_manifest_takes_the_version_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = ObjectStore.open(str(tmp_path))
    weights = WeightStore(store)
    weights.publish(1, {"w": torch.ones(3)})
    before = store.list(unfinished=True)
    link = os.link

    def full(source: Path, target: Path) -> None:
        if target.name == "manifest.json":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        link(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", full)
        with pytest.raises(StoreError, match=r"cannot write 'v000002/manifest\.json': No space left on device"):
            weights.publish(2, {"w": torch.zeros(3)}, {"config.json": b"{}"})
    assert store.list(unfinished=True) == before
    assert torch.equal(weights.load(1)["w"], torch.ones(3))
