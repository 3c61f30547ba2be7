"""What a store's URL and its keys may look like, so that no key ever names something outside its store."""

from __future__ import annotations

import re
from pathlib import Path

from fsspec import available_protocols

from pa_core.errors import StoreError

_MAX_NAME_BYTES = 255
_MAX_KEY_BYTES = 1024
# ASCII only: look-alikes of dots and slashes, percent escapes, globs, URLs and chained URLs all need other characters.
_NAME = re.compile(r"[A-Za-z0-9._=@+,~-]([A-Za-z0-9._=@+,~ -]*[A-Za-z0-9._=@+,~-])?")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]|arn:[A-Za-z0-9:._-]+")


def check_key(key: str) -> None:
    """Refuse a key that is malformed or too long, or could mean something else to some file system.

    Raises:
        ValueError: names the key and the rule.
    """
    if len(key) > _MAX_KEY_BYTES or any(len(name) > _MAX_NAME_BYTES for name in key.split("/")):
        raise ValueError(
            f"store key {key[:60]!r}… has {len(key)} characters: at most {_MAX_KEY_BYTES}, {_MAX_NAME_BYTES} per name"
        )
    for name in key.split("/"):
        if name in (".", "..") or not _NAME.fullmatch(name):
            raise ValueError(
                f"store key {key!r}: expected names joined by '/', of ASCII letters, digits, inner blanks and "
                f"._=@+,~- and not '.', '..' or empty"
            )


def check_url(url: str) -> str:
    """The absolute form of a store's URL or folder.

    Raises:
        StoreError: it is chained, has credentials or a query, or no such bucket can exist. What could be a secret is
            not repeated.
    """
    if "::" in url or "\0" in url:
        raise StoreError("store.url contains '::' or NUL; a store is one folder or URL, not a chain of them")
    if "://" not in url:
        if url.split(":", 1)[0] in available_protocols() and ":" in url:
            raise StoreError(f"store.url={url!r}: write {url.split(':', 1)[0]}:// with two slashes")
        return str(Path(url).expanduser().resolve())
    protocol, _, rest = url.partition("://")
    if protocol in ("file", "local"):
        return url
    bucket, _, prefix = rest.rstrip("/").partition("/")
    if "@" in bucket or ("@" in rest and ":" in rest.split("@", 1)[0]):
        raise StoreError("store.url contains credentials; leave them out and set them in the environment")
    if "?" in rest:
        raise StoreError("store.url contains a query ('?…'); leave it out and set options in the environment")
    if protocol in ("s3", "s3a") and not _BUCKET.fullmatch(bucket):
        raise StoreError(f"store.url: after {protocol}:// comes a bucket of 3 to 63 letters, digits, '.', '-' or '_'")
    if prefix and any(name in ("", ".", "..") for name in prefix.split("/")):
        raise StoreError(f"store.url={url!r}: leave out '.', '..' and empty names")
    return url
