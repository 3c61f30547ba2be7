"""One side of a comparison, in a process of its own: memory and threads are its own, and so may be its environment.

The parent asks one thing at a time, so that the sides can be timed alternately while the others wait. Requests and
replies are JSON, one per line; the worker's own output goes to its log.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pa_core.errors import UserError

_TAIL_CHARACTERS = 2000
_CLOSE_S = 20
_ORPHAN_S = 5


class Side:
    """A worker that serves requests until it is closed.

    Args:
        module: what to run with ``python -m``; it calls :func:`serve`.
        python: interpreter; default this one.
        threads: CPU threads of its libraries.
    """

    def __init__(self, module: str, *, python: str | Path | None = None, threads: int | None = None) -> None:
        self.name = module.rpartition(".")[2]
        count = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self._process = subprocess.Popen(
            [str(python or sys.executable), "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env={**os.environ, **count, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        )
        self._replies: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._replies.put(line)
        self._replies.put("")

    def ask(self, do: str, timeout_s: float = 3600.0, **arguments: Any) -> Any:
        """What the worker's function ``do`` returns.

        Raises:
            UserError: it raised, the worker died, or there was no answer in time.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, "with": arguments}) + "\n")
            self._process.stdin.flush()
            line = self._replies.get(timeout=timeout_s)
        except queue.Empty:
            raise UserError(f"{self.name}: no answer to {do!r} within {timeout_s:.0f} s") from None
        except BrokenPipeError:
            line = ""
        if not line:
            raise UserError(f"{self.name} died at {do!r}; the end of its log:\n{self._tail()}")
        reply = json.loads(line)
        if "error" in reply:
            raise UserError(f"{self.name} failed at {do!r}: {reply['error']}; the end of its log:\n{self._tail()}")
        return reply["value"]

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")[-_TAIL_CHARACTERS:]

    def close(self) -> None:
        """End the worker: politely, then not."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            self._process.wait(_CLOSE_S)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self._process.kill()
            self._process.wait()
        self._log.close()

    def kill(self) -> None:
        """End the worker at once, whatever it computes."""
        self._process.kill()
        self.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.kill()


def serve(functions: Mapping[str, Callable[..., Any]]) -> None:
    """The worker's loop: call what is asked for until stdin ends. Whatever libraries print goes to stderr.

    Where stdin ends in the middle of a call, the parent is gone: the process ends soon, whatever it computes.
    """
    requests: queue.SimpleQueue[str] = queue.SimpleQueue()
    idle = threading.Event()
    threading.Thread(target=_read_requests, args=(requests, idle), daemon=True).start()
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as replies:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        while line := requests.get():
            request = json.loads(line)
            try:
                reply = {"value": functions[request["do"]](**request["with"])}
            except Exception as error:  # told to the parent, which decides
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}"}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
    idle.set()


def _read_requests(requests: queue.SimpleQueue[str], idle: threading.Event) -> None:
    for line in sys.stdin:
        requests.put(line)
    requests.put("")
    if not idle.wait(_ORPHAN_S):
        os._exit(1)
