"""The HTTP client of one replica: what the pool needs of any inference server."""

from __future__ import annotations

from typing import Any, Protocol

import aiohttp

from pa_core.errors import EngineError
from pa_core.rollout.protocol import GenerateRequest, GenerateResponse, VersionMismatch

PROBE_TIMEOUT_S = 1.0


class ReplicaLost(EngineError):
    """The connection to a replica was refused or broke."""


class ReplicaClient(Protocol):
    """How the pool talks to one inference server, whatever its engine."""

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Generate a group; when cancelled, the replica stops working on it. Raises VersionMismatch, ReplicaLost,
        EngineError."""

    async def load(self, version: int, weights_sha256: str) -> str:
        """Load a published version whose digest must be ``weights_sha256``; returns the digest that the replica
        has verified. Only called while nothing is in flight. Raises ReplicaLost, EngineError."""

    async def alive(self, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
        """Whether the server answers within ``timeout_s`` seconds."""


def checked(answer: GenerateResponse, request: GenerateRequest) -> GenerateResponse:
    """The answer, if it has every sample and the asked version sampled every token of them (invariant 1).

    Raises:
        VersionMismatch: some token comes from another version, or its version is not told.
        EngineError: samples are missing.
    """
    if len(answer.generations) != request.samples:
        raise EngineError(
            f"replica {answer.replica} answered group {request.group_id} with {len(answer.generations)} samples "
            f"instead of {request.samples}"
        )
    for number, generation in enumerate(answer.generations):
        try:
            generation.check_versions(request.version)
        except VersionMismatch as error:
            raise VersionMismatch(
                f"replica {answer.replica}, group {request.group_id}, sample {number}: {error}"
            ) from None
    return answer


class HttpReplicaClient:
    """Client of :class:`pa_core.rollout.server.ReplicaServer`.

    Args:
        session: shared client session without a total time-out; deadlines belong to the pool.
        replica_id: used in messages.
        url: base URL of the server.
        api_key: the run's key.
    """

    def __init__(self, session: aiohttp.ClientSession, replica_id: str, url: str, api_key: str) -> None:
        self._session = session
        self._id = replica_id
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"}

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Generate a group.

        Raises:
            VersionMismatch: the replica has loaded another version, or answered with one.
            ReplicaLost: no connection.
            EngineError: the replica could not serve the request.
        """
        answer = GenerateResponse.from_json(await self._post("/generate", request.to_json()))
        if (answer.group_id, answer.version) != (request.group_id, request.version):
            raise VersionMismatch(
                f"replica {self._id} answered group {request.group_id} of version {request.version} with group "
                f"{answer.group_id} of version {answer.version}"
            )
        return checked(answer, request)

    async def load(self, version: int, weights_sha256: str) -> str:
        """Load a version; returns the digest of the weights in the replica's memory. The pool compares it."""
        answer = await self._post("/load", {"version": version})
        if answer.get("version") != version:
            raise EngineError(f"replica {self._id} acknowledged version {answer.get('version')} instead of {version}")
        return str(answer.get("weights_sha256"))

    async def alive(self, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
        """Whether the replica of this very name answers /health within ``timeout_s`` seconds."""
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.get(self._url + "/health", headers=self._headers, timeout=timeout) as response:
                return response.status == 200 and (await response.json()).get("id") == self._id
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return False

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        try:
            async with self._session.post(self._url + path, json=body, headers=self._headers) as response:
                answer = await response.json()
                status = response.status
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise ReplicaLost(f"connection to replica {self._id} at {self._url} failed: {error}") from error
        except (aiohttp.ContentTypeError, ValueError) as error:
            raise EngineError(f"replica {self._id} at {self._url}{path} answered something that is not JSON") from error
        if not isinstance(answer, dict):
            raise EngineError(f"replica {self._id} at {self._url}{path} answered something that is no JSON object")
        if status == 409:
            raise VersionMismatch(str(answer.get("error")))
        if status != 200:
            raise EngineError(f"replica {self._id}: {path[1:]} failed with status {status}: {answer.get('error')}")
        return answer
