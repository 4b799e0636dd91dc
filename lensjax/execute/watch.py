"""A watchman in each process of a run: it tells the others that this one is alive, or why it failed, and ends this one
when another failed or died.

A process that waits in a collective cannot be told anything: nothing of Python runs in it. So the watchman, a thread of
its own, writes why to standard error and ends the process.

A process that is paused alone (a debugger that stops all threads, SIGSTOP) looks from outside like one whose host is
lost, and is taken for that. Where all are paused together (a frozen container, Ctrl-Z, a suspended job or laptop),
nobody is missing: time in which a watchman did not run itself says nothing about the others.
"""

from __future__ import annotations

import atexit
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

BEAT = 1.0  # seconds between two signs of life
DEAD = 20.0  # seconds without one
GRACE = 3.0  # seconds for a process to raise the error itself
ANSWER = 4.0  # seconds for the service to answer
LEAVING = 0.1  # seconds between two looks of a process that is through


class Watchman:
    """Watches the processes 0..count-1 through JAX's key-value service, from process `rank`. One that is silent for
    `dead` seconds (None: DEAD) is taken for dead. `member`: whether this process has not called
    `jax.distributed.shutdown`, after which it is on its own."""

    def __init__(
        self, client: Any, rank: int, count: int, dead: float | None = None, member: Callable[[], bool] = lambda: True
    ):
        self._client, self._rank, self._count, self._member = client, rank, count, member
        self.dead = DEAD if dead is None else dead
        self._paused = 0.0  # seconds in which this process did not run
        self._now = time.monotonic()  # of the last look, less these
        self._heard: dict[int, tuple[Any, float]] = {p: (0, self._now) for p in range(count)}
        self.through: set[int] = set()  # processes that ended well
        self.batches = 0  # global batches that this process made of its own parts
        self._batches: dict[int, int] = {}  # and the others, as of their last signs of life
        self._done = threading.Event()
        self._leaving = False
        self._hook = sys.excepthook
        sys.excepthook = self._failed
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._watch, name="lensjax-watchman", daemon=True)
        self._thread.start()

    def silent(self, process: int) -> float:
        """Seconds since a sign of life of another process, as of the last look."""
        return 0.0 if process == self._rank else self._now - self._heard[process][1]

    def ahead(self, process: int) -> bool:
        """Whether another process has made more global batches than this one: it waits here for nobody."""
        return self._batches.get(process, 0) > self.batches

    def leave(self) -> None:
        """This process is through, and will not be missed; or it failed and somebody else's hook said so. It is
        watched on: JAX lets a process end when all have, and one that dies before would be waited for."""
        if self._done.is_set():
            return
        # Python notes an exception that ends the program before it calls the hook. A prompt notes every one.
        error = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        if error is not None:
            self._fail(error)
        else:
            self._say("done", "")

    def _at_exit(self) -> None:
        """Leaves, and waits until all processes have: nothing of the watchman runs after that. A thread that is asking
        JAX's service while the interpreter ends aborts the process."""
        self.leave()
        self._leaving = True
        self._thread.join()

    def _failed(self, kind: type[BaseException], value: BaseException, trace: Any) -> None:
        """An exception that nobody caught: the others learn of it, and nothing waits for them."""
        self._hook(kind, value, trace)
        self._fail(value)

    def _fail(self, value: BaseException) -> None:
        self._done.set()
        try:  # what failed here may have failed because of them
            told = {p: why for p, why in self._read("failed").items() if p != self._rank}
        except Exception:
            told = {}
        for p, why in sorted(told.items()):
            print(f"lensjax: process {p} failed before: {why}", file=sys.stderr, flush=True)
        said = "".join(traceback.format_exception_only(value)).strip().splitlines()[0][:500]
        self._say("failed", said)
        self._linger()
        self._end()

    def _linger(self) -> None:
        """Process 0 holds the service through which the others learn why: it goes last."""
        until = time.monotonic() + min(self.dead, DEAD)
        while self._rank == 0 and time.monotonic() < until:
            try:
                through = {*self._read("failed"), *self._read("done"), 0}
            except Exception:
                return
            if all(p in through or self.silent(p) > min(self.dead, DEAD) / 2 for p in range(self._count)):
                return
            time.sleep(0.2)

    def _say(self, what: str, text: str) -> None:
        try:
            self._set(what, text or "-")
        except Exception:  # the service is gone: there is nobody left to tell
            pass

    def _watch(self) -> None:
        beat, lost = 0, self._now
        while not self._wait() and self._member():
            if self._leaving and len(self.through) == self._count:
                return
            beat += 1
            try:
                self._set("beat", f"{beat} {self.batches}")
                beats = self._read("beat")
                failed, done = self._read("failed"), self._read("done")
                self.through, lost = set(done), self._now
            except TimeoutError:
                if self._now - lost > self.dead - ANSWER:
                    self._leave_because(self._silence(0))
                continue
            except Exception:
                if self._now - lost > self.dead / 2:
                    self._leave_because("process 0, where the processes meet, is gone")
                continue
            for p in range(self._count):
                if beats.get(p) != self._heard[p][0]:
                    self._heard[p] = (beats.get(p), self._now)
                    self._batches[p] = int(beats.get(p, "").partition(" ")[2] or 0)
                if p in failed and p != self._rank:
                    self._leave_because(f"process {p} failed: {failed[p]}")
                elif p not in done and self.silent(p) > self.dead:
                    self._leave_because(self._silence(p))

    def _silence(self, process: int) -> str:
        why = "it died, was paused or lost its host"
        return f"process {process} has not been heard of for {self.dead:.0f} s: {why}"

    def _wait(self) -> bool:
        """A beat's length. Whether this process is through."""
        start = time.monotonic()
        done = self._done.wait(LEAVING if self._leaving else BEAT)
        self._paused += max(time.monotonic() - start - 2 * BEAT, 0.0)
        self._now = time.monotonic() - self._paused
        return done

    def _read(self, what: str) -> dict[int, str]:
        found = _answer(lambda: self._client.key_value_dir_get(f"lensjax/{what}/"))
        return {int(key.rpartition("/")[2]): value for key, value in found}

    def _set(self, what: str, value: str) -> None:
        _answer(lambda: self._client.key_value_set(f"lensjax/{what}/{self._rank}", value, allow_overwrite=True))

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


def _answer(ask: Callable[[], Any]) -> Any:
    """What `ask()` returns or raises. Raises TimeoutError after ANSWER seconds: where process 0 does not run, the
    service neither answers nor fails, and a call to it has no deadline of its own."""
    told: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            told.put((ask(), None))
        except Exception as e:
            told.put((None, e))

    try:
        threading.Thread(target=run, name="lensjax-watchman-asks", daemon=True).start()
    except RuntimeError:  # the interpreter ends, and starts no thread any more
        run()
    try:
        value, error = told.get(timeout=ANSWER)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return value
