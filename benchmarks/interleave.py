"""Peers in processes of their own, one awake at a time, timed in turn.

A thread pool that spins would disturb the others, so every process but the one being timed is stopped.
Alternating round by round makes a ratio hold while the machine's speed drifts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent


class Worker:
    """A process that runs one peer; asleep unless it is answering."""

    def __init__(self, script: str, name: str, threads: int) -> None:
        self.name = name
        environment = dict(
            os.environ, OMP_NUM_THREADS=str(threads), PYTHONPATH=os.pathsep.join([str(_HERE), *sys.path])
        )
        # A BLAS told to run slowly for old processors would not be a fair peer.
        environment.pop("OPENBLAS_CORETYPE", None)
        command = [sys.executable, str(_HERE / script), "--worker", name]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.awake = True

    def ask(self, **question: Any) -> dict[str, Any]:
        """Wakes the process, asks, and puts it to sleep again. A dead process answers with ``error``."""
        assert self.process.stdin and self.process.stdout
        if self.process.poll() is not None:
            return {"error": f"the process ended with {self.process.returncode}"}
        os.kill(self.process.pid, signal.SIGCONT)
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            for line in self.process.stdout:
                if line.startswith("@@"):
                    os.kill(self.process.pid, signal.SIGSTOP)
                    answer: dict[str, Any] = json.loads(line[2:])
                    return answer
        except BrokenPipeError:
            pass
        return {"error": f"the process ended with {self.process.wait()}"}

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def answer(**content: Any) -> None:
    """What a worker says."""
    print("@@" + json.dumps(content), flush=True)


def time_calls(calls: list[Any], seconds: float, cpu_time: bool) -> list[float]:
    """Microseconds per call, one number per pass through ``calls``, for about ``seconds``.

    CPU time does not count what other users of the machine do to one thread; with several threads it would
    count their waiting, so wall time is taken.
    """
    clock = time.process_time if cpu_time else time.perf_counter
    once = time.perf_counter()
    for call in calls:
        call()
    once = max(time.perf_counter() - once, 1e-6)
    repeats = max(1, min(50, int(2e-3 / once)))
    samples, end = [], time.perf_counter() + seconds
    while True:
        start = clock()
        for _ in range(repeats):
            for call in calls:
                call()
        samples.append((clock() - start) / repeats / len(calls) * 1e6)
        if time.perf_counter() > end:
            return samples


def pin(threads: int) -> None:
    """The last cores of this machine, where less else runs."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, set(cores[-threads:]))
