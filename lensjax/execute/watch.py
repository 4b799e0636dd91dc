"""A watchman in each process of a run: it tells the others that this one is alive, or why it failed, and ends this one
when another failed or died.

A process that waits in a collective cannot be told anything: nothing of Python runs in it. So the watchman, a thread of
its own, writes why to standard error and ends the process.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
import traceback
from typing import Any

BEAT = 1.0  # seconds between two signs of life
DEAD = 20.0  # seconds without one
GRACE = 4.0  # seconds for a process to raise the error itself


class Watchman:
    """Watches the processes 0..count-1 through JAX's key-value service, from process `rank`."""

    def __init__(self, client: Any, rank: int, count: int):
        self._client, self._rank, self._count = client, rank, count
        self._heard: dict[int, tuple[Any, float]] = {p: (0, time.monotonic()) for p in range(count)}
        self._done = threading.Event()
        self._hook = sys.excepthook
        sys.excepthook = self._failed
        atexit.register(self.leave)
        self._thread = threading.Thread(target=self._watch, name="lensjax-watchman", daemon=True)
        self._thread.start()

    def silent(self, process: int) -> float:
        """Seconds since a sign of life of another process."""
        return 0.0 if process == self._rank else time.monotonic() - self._heard[process][1]

    def leave(self) -> None:
        """This process is through: it will not be missed."""
        if not self._done.is_set():
            self._done.set()
            self._say("done", "")

    def _failed(self, kind: type[BaseException], value: BaseException, trace: Any) -> None:
        """An exception that nobody caught: the others learn of it, and nothing waits for them."""
        self._hook(kind, value, trace)
        self._done.set()
        said = "".join(traceback.format_exception_only(kind, value)).strip().splitlines()[0][:500]
        self._say("failed", said)
        self._linger()
        self._end()

    def _linger(self) -> None:
        """Process 0 holds the service through which the others learn why: it goes last."""
        until = time.monotonic() + DEAD
        while self._rank == 0 and time.monotonic() < until:
            try:
                through = {*self._read("failed"), *self._read("done"), 0}
            except Exception:
                return
            if all(p in through or self.silent(p) > DEAD / 2 for p in range(self._count)):
                return
            time.sleep(0.2)

    def _say(self, what: str, text: str) -> None:
        try:
            self._client.key_value_set(f"lensjax/{what}/{self._rank}", text or "-", allow_overwrite=True)
        except Exception:  # the service is gone: there is nobody left to tell
            pass

    def _watch(self) -> None:
        beat, lost = 0, time.monotonic()
        while not self._done.wait(BEAT):
            beat += 1
            try:
                self._client.key_value_set(f"lensjax/beat/{self._rank}", str(beat), allow_overwrite=True)
                beats = self._read("beat")
                failed, done = self._read("failed"), self._read("done")
                lost = time.monotonic()
            except Exception:
                if time.monotonic() - lost > DEAD / 2:
                    self._leave_because("process 0, where the processes meet, is gone")
                continue
            for p in range(self._count):
                if beats.get(p) != self._heard[p][0]:
                    self._heard[p] = (beats.get(p), time.monotonic())
                if p in failed and p != self._rank:
                    self._leave_because(f"process {p} failed: {failed[p]}")
                elif p not in done and self.silent(p) > DEAD:
                    self._leave_because(
                        f"process {p} has not been heard of for {DEAD:.0f} s: it died, or lost its host"
                    )

    def _read(self, what: str) -> dict[int, str]:
        found = self._client.key_value_dir_get(f"lensjax/{what}/")
        return {int(key.rpartition("/")[2]): value for key, value in found}

    def _leave_because(self, why: str) -> None:
        if self._done.wait(GRACE):  # the main thread found out itself
            return
        print(f"lensjax: process {self._rank} ends: {why}", file=sys.stderr, flush=True)
        self._say("failed", f"it ended because {why}")
        self._linger()
        self._end()

    def _end(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
