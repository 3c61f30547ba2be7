"""Whole objects in S3: conditional creates, multipart uploads that leave nothing behind, streamed reads.

s3fs supplies the session: credentials and endpoint from the environment or the provider chain, one event loop in the
background, translated errors. Requests are made one by one through it, so that each is repeated by itself.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import fsspec

from pa_core.errors import StoreError
from pa_core.store.fsspec_files import Chunks, ExplainedError, FsspecFiles, KeyExistsError
from pa_core.store.s3_patience import Patience, Retrier, code_of

PART_BYTES = 16 << 20
READ_AHEAD = 2
_DELETE_AT_ONCE = 1000
_UNTOLD = ("AccessDenied", "MethodNotAllowed", "NotImplemented")


def open_s3(url: str, patience: Patience) -> tuple[S3Files, str]:
    """The objects of a bucket, and the path that ``url`` names in it. Nothing is sent yet."""
    config: dict[str, Any] = {
        "connect_timeout": patience.connect_s,
        "read_timeout": patience.read_s,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
    }
    name = next((name for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL") if os.environ.get(name)), None)
    if name is not None:
        endpoint = urlsplit(os.environ[name])
        if endpoint.scheme not in ("http", "https") or not endpoint.hostname or endpoint.username is not None:
            raise StoreError(f"{name}: expected http://HOST:PORT or https://HOST:PORT, without credentials")
        # Other servers than Amazon's are seldom reachable as BUCKET.HOST.
        config["s3"] = {"addressing_style": "path"}
    filesystem, root = fsspec.core.url_to_fs(
        url, use_listings_cache=False, skip_instance_cache=True, max_concurrency=1, config_kwargs=config
    )
    filesystem.retries = 1
    return S3Files(filesystem, Retrier(patience)), root


class S3Files(FsspecFiles):
    """Objects by their paths ``bucket/key``. Safe to use from several threads, not after a fork."""

    def __init__(self, filesystem: Any, retrier: Retrier) -> None:
        super().__init__(filesystem)
        self._retrier = retrier
        self._bucket_seen = False

    def put(self, path: str, chunks: Chunks, *, exclusive: bool, durable: bool) -> None:
        """Make an object visible in one step: one PUT, or one completed multipart upload of any size.

        Holds one part (16 MiB) in memory. ``exclusive`` is the server's ``If-None-Match: *``. A request whose answer
        was lost is repeated and then meets its own object, so finding exactly this content counts as having written it.
        """
        digest = hashlib.sha256()
        sent = 0

        def hashed() -> Iterator[bytes | memoryview]:
            nonlocal sent
            for chunk in chunks:
                digest.update(chunk)
                sent += len(chunk)
                yield chunk

        condition = {"IfNoneMatch": "*"} if exclusive else {}
        parts = _parts(hashed())
        first = next(parts, bytearray())
        second = next(parts, None)
        try:
            if second is None:
                self._call("put_object", path, Body=first, **condition)
            else:
                etag = self._put_parts(path, itertools.chain([first, second], parts), condition)
                # SeaweedFS looks and writes in two steps when it completes an upload: of two at once, the later stays.
                if exclusive and self._etag(path) != etag:
                    raise FileExistsError(path)
        except OSError as error:
            taken = isinstance(error, FileExistsError)
            if not taken and code_of(error) != "NoSuchUpload":
                raise
            if self._holds(path, sent, digest.digest()):
                return
            if taken:
                raise KeyExistsError(self.url(path)) from None
            raise

    def _put_parts(self, path: str, parts: Iterator[bytearray], condition: dict[str, str]) -> str:
        """A multipart upload that is either completed or aborted; the tag of the object it became."""
        upload = self._call("create_multipart_upload", path)["UploadId"]
        try:
            done = []
            for number, part in enumerate(parts, 1):
                answer = self._call("upload_part", path, UploadId=upload, PartNumber=number, Body=part)
                done.append({"PartNumber": number, "ETag": answer["ETag"]})
            whole = {"UploadId": upload, "MultipartUpload": {"Parts": done}}
            return _tag(self._call("complete_multipart_upload", path, **whole, **condition))
        except BaseException as error:
            try:
                self._abort(path, upload)
            except OSError as failure:
                error.add_note(f"and aborting its multipart upload failed: {failure}")
            raise

    def _abort(self, path: str, upload: str) -> None:
        try:
            self._call("abort_multipart_upload", path, UploadId=upload)
        except FileNotFoundError:
            return

    def _holds(self, path: str, size: int, digest: bytes) -> bool:
        """Whether an object has this size and sha256; read piece by piece, and only if the size agrees."""
        try:
            if self._size(path) != size:
                return False
            found = hashlib.sha256()
            for piece in self.pieces(path):
                found.update(piece)
        except FileNotFoundError:
            return False
        return found.digest() == digest

    def read(self, path: str) -> bytes:
        """An object's content, by one request."""
        return bytes(self._retrier.call(lambda: self._fs.cat_file(path), self._bucket(path)))

    def pieces(self, path: str) -> Generator[bytes, None, None]:
        """An object's content in order, by ranges of 16 MiB, of which :data:`READ_AHEAD` are under way at a time."""
        size = self._size(path)
        with ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="s3-read") as threads:
            pending: deque[Future[bytes]] = deque()
            for start in range(0, size, PART_BYTES):
                pending.append(threads.submit(self._read_range, path, start, min(start + PART_BYTES, size)))
                if len(pending) == READ_AHEAD:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def _read_range(self, path: str, start: int, end: int) -> bytes:
        data = bytes(self._retrier.call(lambda: self._fs.cat_file(path, start=start, end=end), self._bucket(path)))
        if len(data) != end - start:
            raise ExplainedError(f"{end - start} bytes at {start} were asked for, {len(data)} came", "Read it again.")
        return data

    def _etag(self, path: str) -> str:
        return _tag(self._call("head_object", path))

    def _size(self, path: str) -> int:
        return int(self._call("head_object", path)["ContentLength"])

    def exists(self, path: str) -> bool:
        """Whether there is an object at this path."""
        try:
            self._size(path)
        except FileNotFoundError:
            # HEAD cannot say which of object and bucket is missing.
            if not self._bucket_seen:
                self._require_bucket(self._bucket(path))
            return False
        return True

    def _require_bucket(self, bucket: str) -> None:
        try:
            self._retrier.call(lambda: self._fs.call_s3("head_bucket", Bucket=bucket), bucket)
        except FileNotFoundError as error:
            raise ExplainedError(
                f"bucket {bucket!r} does not exist", "Create it first, or correct store.url."
            ) from error
        self._bucket_seen = True

    def delete(self, path: str) -> None:
        """Remove an object, or everything below a prefix, and abort what is being uploaded there."""
        bucket = self._bucket(path)
        keys = self._keys(path)
        for start in range(0, len(keys), _DELETE_AT_ONCE):
            named = {"Objects": [{"Key": key} for key in keys[start : start + _DELETE_AT_ONCE]], "Quiet": True}
            answer = self._list_call("delete_objects", bucket, Delete=named)
            for problem in answer.get("Errors", []):
                raise ExplainedError(
                    f"{problem.get('Key')}: {problem.get('Message')} ({problem.get('Code')})",
                    "Check what the credentials may do in this bucket.",
                )
        for key, upload in self._uploads(path):
            self._abort(f"{bucket}/{key}", upload)

    def find(self, path: str, *, unfinished: bool) -> list[str]:
        """Paths of the object at ``path`` and of all below it; ``unfinished``: also of multipart uploads."""
        bucket = self._bucket(path)
        keys = {key for key in self._keys(path) if not key.endswith("/")}
        if unfinished:
            keys |= {key for key, _ in self._uploads(path)}
        return [f"{bucket}/{key}" for key in sorted(keys)]

    def _keys(self, path: str) -> list[str]:
        bucket, prefix = self._split(path)
        keys: list[str] = []
        more: dict[str, str] = {}
        while True:
            page = self._list_call("list_objects_v2", bucket, Prefix=prefix, **more)
            keys += [item["Key"] for item in page.get("Contents", []) if _is_within(item["Key"], prefix)]
            if not page.get("IsTruncated"):
                return keys
            more = {"ContinuationToken": page["NextContinuationToken"]}

    def _uploads(self, path: str) -> list[tuple[str, str]]:
        """Key and id of the unfinished uploads at and below a path; none where the server does not tell."""
        bucket, prefix = self._split(path)
        uploads: list[tuple[str, str]] = []
        more: dict[str, str] = {}
        while True:
            try:
                page = self._list_call("list_multipart_uploads", bucket, Prefix=prefix, **more)
            except ExplainedError as error:
                if code_of(error) in _UNTOLD:
                    return uploads
                raise
            uploads += [
                (item["Key"], item["UploadId"]) for item in page.get("Uploads", []) if _is_within(item["Key"], prefix)
            ]
            if not page.get("IsTruncated"):
                return uploads
            more = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _call(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        bucket, key = self._split(path)
        return self._list_call(method, bucket, Key=key, **arguments)

    def _list_call(self, method: str, bucket: str, **arguments: Any) -> dict[str, Any]:
        return dict(self._retrier.call(lambda: self._fs.call_s3(method, Bucket=bucket, **arguments), bucket))

    def _split(self, path: str) -> tuple[str, str]:
        bucket, key, _ = self._fs.split_path(path)
        return bucket, key

    def _bucket(self, path: str) -> str:
        return self._split(path)[0]


def _tag(answer: dict[str, Any]) -> str:
    """An answer's entity tag, which some servers quote and others do not."""
    return str(answer["ETag"]).strip('"')


def _is_within(key: str, prefix: str) -> bool:
    return not prefix or key == prefix or key.startswith(f"{prefix}/")


def _parts(chunks: Chunks) -> Iterator[bytearray]:
    """Regroup chunks into parts of :data:`PART_BYTES`, the last one shorter; none for no bytes."""
    part = bytearray()
    for chunk in chunks:
        view = memoryview(chunk)
        while len(view) > 0:
            taken = view[: PART_BYTES - len(part)]
            part += taken
            view = view[len(taken) :]
            if len(part) == PART_BYTES:
                yield part
                part = bytearray()
    if part:
        yield part
