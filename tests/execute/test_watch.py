"""The watchman: who failed or fell silent ends the others with the reason; who is through is not missed."""

import sys
import threading
import time

import pytest

from lensjax.execute import watch


class Store:
    """The part of JAX's key-value client that is used, for several processes in one."""

    def __init__(self):
        self.values, self.gone = {}, False

    def key_value_set(self, key, value, allow_overwrite=False):
        if self.gone:
            raise RuntimeError("UNAVAILABLE")
        self.values[key] = value

    def key_value_dir_get(self, prefix):
        if self.gone:
            raise RuntimeError("UNAVAILABLE")
        return [(k, v) for k, v in list(self.values.items()) if k.startswith(prefix)]


@pytest.fixture
def start(monkeypatch):
    """start(store, rank, count): a watchman whose end of the process is an event instead."""
    monkeypatch.setattr(watch, "BEAT", 0.02)
    monkeypatch.setattr(watch, "DEAD", 3.0)
    monkeypatch.setattr(watch, "GRACE", 0.05)
    made, hook = [], sys.excepthook

    class Ends(watch.Watchman):
        def __init__(self, *args):
            self.ended = threading.Event()
            made.append(self)
            sys.excepthook = hook  # each stands for a process of its own
            super().__init__(*args)

        def _end(self):
            self.ended.set()
            self._done.set()

    yield Ends
    for w in made:
        w._done.set()
    sys.excepthook = hook


def test_a_failure_is_told_to_the_others_and_ends_them(start, capsys):
    store = Store()
    first, second = start(store, 0, 2), start(store, 1, 2)
    second._failed(RuntimeError, RuntimeError("the disk is full"), None)
    assert second.ended.is_set() and first.ended.wait(60)
    assert "process 0 ends: process 1 failed: RuntimeError: the disk is full" in capsys.readouterr().err


def test_a_process_that_falls_silent_ends_the_others(start, capsys):
    store = Store()
    first, second = start(store, 0, 2), start(store, 1, 2)
    time.sleep(0.2)
    assert first.silent(1) < 3.0 and not first.ended.is_set()
    second._done.set()  # as a killed process: not a word more
    assert first.ended.wait(60)
    assert "process 1 has not been heard of for" in capsys.readouterr().err


def test_a_failure_that_another_hook_reported_is_told_at_the_end(start, monkeypatch):
    store = Store()
    first, second = start(store, 0, 2), start(store, 1, 2)
    monkeypatch.setattr(sys, "last_value", RuntimeError("the disk is full"), raising=False)
    second.leave()
    assert second.ended.is_set() and first.ended.wait(60)
    assert store.values["lensjax/failed/1"] == "RuntimeError: the disk is full"


def test_who_is_through_is_not_missed(start):
    store = Store()
    first, second = start(store, 0, 2), start(store, 1, 2)
    second.leave()
    second._done.set()  # it is gone
    assert not first.ended.wait(4.0) and first.silent(1) > 3.0


def test_who_is_through_still_watches(start, capsys):
    store = Store()
    first, second = start(store, 0, 2), start(store, 1, 2)
    second.leave()
    first._done.set()  # killed while the other waits for its end
    assert second.ended.wait(60) and "process 0 has not been heard of" in capsys.readouterr().err


def test_time_in_which_a_watchman_was_paused_itself_does_not_count(start, monkeypatch):
    store = Store()
    first, second = start(store, 0, 2), start(store, 1, 2)
    time.sleep(0.2)
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 100)  # both wake 100 s later
    time.sleep(0.5)
    assert not first.ended.is_set() and not second.ended.is_set() and first.silent(1) < 3.0


def test_silence_may_be_allowed(start):
    store = Store()
    first, second = start(store, 0, 2, float("inf")), start(store, 1, 2)
    second._done.set()
    assert not first.ended.wait(4.0)


def test_the_end_of_the_service_is_an_end(start, capsys):
    store = Store()
    second = start(store, 1, 2)
    store.gone = True
    assert second.ended.wait(60)
    assert "process 0, where the processes meet, is gone" in capsys.readouterr().err


def test_process_0_goes_last(start):
    store = Store()
    first = start(store, 0, 2)
    store.key_value_set("lensjax/beat/1", "1")
    thread = threading.Thread(target=first._failed, args=(ValueError, ValueError("bad"), None))
    thread.start()
    time.sleep(0.2)
    assert store.values["lensjax/failed/0"] == "ValueError: bad" and not first.ended.is_set()
    store.key_value_set("lensjax/failed/1", "-")
    assert first.ended.wait(60)
    thread.join()


def test_at_its_end_a_process_waits_for_the_others_and_asks_nothing_afterwards(start):
    """A thread that is in JAX's client while the interpreter ends aborts the process."""
    store = Store()
    first, second = start(store, 0, 2), start(store, 1, 2)
    ending = threading.Thread(target=first._at_exit)
    ending.start()
    ending.join(0.5)
    assert ending.is_alive() and first._thread.is_alive()  # watched on
    second._at_exit()
    ending.join(60)
    assert not ending.is_alive() and not first._thread.is_alive() and not second._thread.is_alive()
    assert not first.ended.is_set() and not second.ended.is_set()
