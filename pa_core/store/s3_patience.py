"""Which failures of an S3 server pass, how long they are waited for, and what the others mean.

The client's own retries are switched off: nested, they would multiply, and nobody could say how often or how long a
request was tried. What is here is the only place that repeats a request.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import aiohttp
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError
from tenacity import RetryCallState, RetryError, Retrying, retry_if_exception, wait_random_exponential

from pa_core.store.fsspec_files import ExplainedError

_T = TypeVar("_T")
_PASSING_STATUS = (429, 500, 502, 503, 504)
_PASSING_CODES = (
    "ConditionalRequestConflict",
    "IncompleteBody",
    "InternalError",
    "OperationAborted",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
)
_PASSING_ERRORS = (
    boto.ConnectionError,
    boto.FlexibleChecksumError,
    boto.HTTPClientError,
    boto.IncompleteReadError,
    ResponseParserError,
    aiohttp.ClientError,
    asyncio.TimeoutError,
    ConnectionError,
    TimeoutError,
)
_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
_MEANINGS = {
    "AccessDenied": ("access denied", f"Check {_KEYS}, and what they may do in this bucket."),
    "AllAccessDisabled": ("access denied", "The bucket's owner has disabled all access to it."),
    "ExpiredToken": ("the credentials have expired", f"Renew AWS_SESSION_TOKEN with {_KEYS}."),
    "InvalidAccessKeyId": ("the server does not know this access key", f"Check {_KEYS}."),
    "InvalidBucketName": ("no bucket can have this name", "Check store.url."),
    "PermanentRedirect": ("the bucket is in another region", "Set AWS_DEFAULT_REGION to the bucket's region."),
    "RequestTimeTooSkewed": ("this machine's clock differs from the server's", "Set the clock."),
    "SignatureDoesNotMatch": ("the secret key does not belong to the access key", f"Check {_KEYS}."),
}
_MEANINGS["403"] = _MEANINGS["AccessDenied"]
_MEANINGS["301"] = _MEANINGS["PermanentRedirect"]


@dataclass(frozen=True)
class Patience:
    """How long one request may take, with everything that is tried for it.

    Attributes:
        connect_s: seconds to connect, each time.
        read_s: seconds without a byte, each time.
        total_s: seconds after which a request is not tried again.
        first_s: the same before the server has ever answered: a mistyped address should not take minutes.
    """

    connect_s: float = 10.0
    read_s: float = 60.0
    total_s: float = 120.0
    first_s: float = 15.0


class Retrier:
    """Repeats requests that fail in passing, with random growing pauses, and explains those that fail for good."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._process = os.getpid()
        self.answered = False

    def call(self, request: Callable[[], _T], bucket: str) -> _T:
        """The result of ``request``.

        Raises:
            FileNotFoundError: no such object or upload.
            FileExistsError: a condition was not met.
            ExplainedError: anything else.
        """
        if os.getpid() != self._process:
            raise ExplainedError(
                f"it was opened by process {self._process}, of which this one is a fork",
                "Open store.url anew in this process, and start processes with 'spawn'.",
            )
        retrying = Retrying(
            retry=retry_if_exception(is_passing),
            stop=self._is_enough,
            wait=wait_random_exponential(multiplier=0.2, max=8),
        )
        try:
            result = retrying(request)
        except RetryError as error:
            cause = error.last_attempt.exception()
            tried = error.last_attempt.attempt_number
            seconds = retrying.statistics["delay_since_first_attempt"]
            raise ExplainedError(
                f"{describe(cause)} (tried {tried} times in {seconds:.0f} s)",
                "Check that the server is up, reachable (AWS_ENDPOINT_URL) and has room, then go on.",
            ) from cause
        except Exception as error:
            self.answered = self.answered or response_of(error) is not None
            explained = _explained(error, bucket)
            if explained is error:
                raise
            raise explained from error
        self.answered = True
        return result

    def _is_enough(self, state: RetryCallState) -> bool:
        outcome = state.outcome
        if outcome is not None and response_of(outcome.exception()) is not None:
            self.answered = True
        limit = self._patience.total_s if self.answered else self._patience.first_s
        return (state.seconds_since_start or 0.0) + state.upcoming_sleep >= limit


def response_of(error: BaseException | None) -> dict[str, Any] | None:
    """The server's answer behind an error, which may have been translated into another."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict) and "Error" in response:
            return response
        error = error.__cause__
    return None


def code_of(error: BaseException | None) -> str:
    """The S3 error code behind an error, or ``""``."""
    response = response_of(error)
    return "" if response is None else str(response["Error"].get("Code", ""))


def is_passing(error: BaseException) -> bool:
    """Whether a failed request is worth repeating as it is."""
    response = response_of(error)
    if response is not None:
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status in _PASSING_STATUS or code_of(error) in (*_PASSING_CODES, *map(str, _PASSING_STATUS), "409")
    return isinstance(error, _PASSING_ERRORS) and not isinstance(error, boto.SSLError)


def describe(error: BaseException | None) -> str:
    """An error in one line: what the server says and its code, or what went wrong on the way to it."""
    response = response_of(error)
    code = code_of(error)
    text = str(error) if response is None else str(response["Error"].get("Message") or code)
    text = (text or type(error).__name__).strip().rstrip(".")
    return f"{text} ({code})" if code not in text else text


def _explained(error: Exception, bucket: str) -> Exception:
    """What a failure that does not pass means to the caller, or to the person who runs the program."""
    code = code_of(error)
    if code == "NoSuchBucket":
        return ExplainedError(f"bucket {bucket!r} does not exist", "Create it first, or correct store.url.")
    if code in ("PreconditionFailed", "412"):
        return FileExistsError(describe(error))
    if code in _MEANINGS:
        cause, fix = _MEANINGS[code]
        return ExplainedError(f"{cause} ({code})", fix)
    if isinstance(error, boto.NoCredentialsError):
        return ExplainedError("no credentials were found", f"Set {_KEYS}.")
    if isinstance(error, boto.PartialCredentialsError):
        return ExplainedError(describe(error), f"Set {_KEYS}.")
    if isinstance(error, boto.ProfileNotFound | boto.CredentialRetrievalError):
        return ExplainedError(describe(error), "Check AWS_PROFILE and the configuration that it names.")
    if isinstance(error, FileNotFoundError | FileExistsError | ExplainedError):
        return error
    return ExplainedError(describe(error), "Check store.url, AWS_ENDPOINT_URL and AWS_DEFAULT_REGION.")
