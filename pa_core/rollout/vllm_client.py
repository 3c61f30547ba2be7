"""The client of one vLLM server: token ids in and out by ``/inference/v1/generate``, weights by its RL routes."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import json
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from pa_core.errors import EngineError
from pa_core.rollout.client import PROBE_TIMEOUT_S, ReplicaLost, checked
from pa_core.rollout.protocol import GenerateRequest, GenerateResponse, Generation, VersionMismatch
from pa_core.rollout.vllm_guard import GENERATE_PATH

if TYPE_CHECKING:
    from pa_core.rollout.fabric import FabricTransfer

_SEED_BITS = 31


class VllmReplicaClient:
    """Client of a vLLM server that has this package's plugin, worker extension and guard.

    Args:
        session: shared client session without a total time-out; deadlines belong to the pool.
        replica_id: used in messages and as the origin of answers.
        url: base URL of the server.
        api_key: the run's key.
        store_url: the run's folder in the store, as the server reaches it.
        fabric: sends weights over a fabric instead of by the store.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        replica_id: str,
        url: str,
        api_key: str,
        store_url: str,
        fabric: FabricTransfer | None = None,
    ) -> None:
        self._session = session
        self._id = replica_id
        self._url = url.rstrip("/")
        self._api_key = api_key
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._store_url = store_url
        self._fabric = fabric

    async def generate(self, request: GenerateRequest) -> GenerateResponse:
        """Generate a group; cancelling closes the connection, upon which vLLM aborts the request.

        Raises:
            VersionMismatch: not every token comes from the asked version, by vLLM's own version spans.
            ReplicaLost: no connection.
            EngineError: the server could not serve the request.
        """
        body = {
            "token_ids": request.token_ids.tolist(),
            # The prefix cache is emptied when weights change; the salt makes a stale hit impossible besides.
            "cache_salt": f"v{request.version}",
            "sampling_params": {
                "n": request.samples,
                "temperature": request.temperature,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "max_tokens": request.max_tokens,
                "logprobs": 0,
                "seed": group_seed(request),
                "stop_token_ids": list(request.stop_token_ids),
                "detokenize": False,
            },
        }
        started = time.time()
        answer = await self._request("POST", GENERATE_PATH, body)
        try:
            generations = [_generation(choice) for choice in sorted(answer["choices"], key=lambda one: one["index"])]
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"replica {self._id}: vLLM's answer is malformed: {type(error).__name__}: {error}"
            ) from None
        return checked(
            GenerateResponse(request.group_id, request.version, generations, started, time.time(), self._id), request
        )

    async def load(self, version: int, weights_sha256: str) -> str:
        """Have the server load a version; returns the digest its workers have verified.

        The server drains, empties its prefix cache, loads, and only then takes the version's name. One that fails to
        load from the store keeps its old weights and their name. Over a fabric there are no files to verify: the
        version was read from the trainer's memory, and its digest is returned as it was given.

        Raises:
            ReplicaLost: no connection.
            EngineError: the server refused the weights, or its workers do not agree on what they have.
        """
        await self._request("POST", "/pause?mode=wait&clear_cache=true")
        try:
            if self._fabric is None:
                digest = await self._load_from_store(version, weights_sha256)
            else:
                await asyncio.to_thread(self._fabric.send, version, self._url, self._api_key)
                await self._request("POST", "/update_weight_version", {"new_version": str(version)})
                digest = weights_sha256
        except EngineError:
            await self._resume()
            raise
        await self._resume()
        if (served := await self.version()) != version:
            raise EngineError(f"replica {self._id} says it has version {served}, not {version}")
        return digest

    async def _resume(self) -> None:
        """End the pause. vLLM closes a connection on which a request failed, which the next request may find out."""
        try:
            await self._request("POST", "/resume")
        except ReplicaLost:
            await self._request("POST", "/resume")

    async def _load_from_store(self, version: int, weights_sha256: str) -> str:
        await self._request("POST", "/start_weight_update")
        update = {"store_url": self._store_url, "version": version, "weights_sha256": weights_sha256}
        await self._request("POST", "/update_weights", {"update_info": update})
        await self._request("POST", "/finish_weight_update", {"weight_version": str(version)})
        loaded = await self._loaded()
        if loaded.get("version") != version:
            raise EngineError(f"workers of replica {self._id} have version {loaded.get('version')}, not {version}")
        return str(loaded["weights_sha256"])

    async def _loaded(self) -> dict[str, Any]:
        """What the server's workers have in memory, by their own word."""
        answer = await self._request("POST", "/collective_rpc", {"method": "loaded_weights"})
        words = answer.get("results") or [None]
        if any(word != words[0] for word in words) or not isinstance(words[0], dict):
            raise EngineError(f"replica {self._id}: its workers do not agree on the weights they have: {words}")
        return words[0]

    async def alive(self, timeout_s: float = PROBE_TIMEOUT_S) -> bool:
        """Whether the server answers /health within ``timeout_s`` seconds."""
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_s)
            async with self._session.get(self._url + "/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def version(self) -> int | None:
        """The policy version the server says it has; None before the first."""
        name = str((await self._request("GET", "/weight_info")).get("weight_version"))
        return int(name) if name.isdigit() else None

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            async with self._session.request(method, self._url + path, json=body, headers=self._headers) as response:
                text = await response.text()
                status = response.status
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as error:
            raise ReplicaLost(f"connection to replica {self._id} at {self._url} failed: {error}") from error
        try:
            answer = json.loads(text)
        except ValueError:
            answer = {"error": text[:500]}
        if status != 200 or not isinstance(answer, dict):
            route = path.partition("?")[0]
            raise EngineError(f"replica {self._id}: {route} failed with status {status}: {_reason(answer)}")
        return answer


def group_seed(request: GenerateRequest) -> int:
    """The seed of a group's first sample, a function of (seed, version, group id); vLLM adds 1 for each further."""
    name = f"{request.seed}:{request.version}:{request.group_id}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> (64 - _SEED_BITS)


def _generation(choice: Mapping[str, Any]) -> Generation:
    """One choice of vLLM's answer."""
    token_ids = np.asarray(choice["token_ids"], dtype=np.int32)
    logprobs = np.asarray([entry["logprob"] for entry in choice["logprobs"]["content"]], dtype=np.float32)
    if len(logprobs) != len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens with {len(logprobs)} log-probabilities")
    if choice["finish_reason"] not in ("stop", "length"):
        raise ValueError(f"finish_reason {choice['finish_reason']!r}")
    mask = choice.get("sampling_mask")
    return Generation(
        token_ids=token_ids,
        logprobs=logprobs,
        finish_reason=choice["finish_reason"],
        versions=_spans(choice.get("weight_versions") or (), len(token_ids)),
        routed_experts=_array(choice.get("routed_experts")),
        sampling_mask=None if mask is None else tuple(np.asarray(ids, dtype=np.int32) for ids in mask),
    )


def _spans(spans: Any, tokens: int) -> tuple[tuple[int, int], ...]:
    """``(version, tokens)`` from ``{"version", "start", "end"}`` spans.

    Raises:
        VersionMismatch: a span has no number for a version, or the spans do not join.
    """
    result = []
    position = 0
    for span in spans:
        if not str(span["version"]).isdigit() or span["start"] != position:
            raise VersionMismatch(f"vLLM reports version spans {spans} for {tokens} tokens")
        position = span["end"]
        result.append((int(span["version"]), span["end"] - span["start"]))
    return tuple(result)


def _array(encoded: str | None) -> NDArray[np.int32] | None:
    """An array that vLLM sends as base64 of a ``.npy`` file."""
    if encoded is None:
        return None
    array: NDArray[np.int32] = np.load(io.BytesIO(base64.b64decode(encoded)), allow_pickle=False).astype(np.int32)
    return array


def _reason(answer: Any) -> str:
    """The error text inside vLLM's answer."""
    error = answer.get("error", answer.get("detail", answer)) if isinstance(answer, dict) else answer
    return str(error.get("message", error) if isinstance(error, dict) else error)
