"""Several processes of one training run: they meet, and they agree on what they run before the first collective.

    lensjax.connect()        first line of the program: under `lensjax launch`, SLURM, Kubernetes, or with addresses

A collective that one process does not take part in waits for ever, and says nothing. So everything that could make two
processes run different programs is compared first, over JAX's own coordination service, and every wait has a deadline:
what differs is an error on *every* process that names the difference.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from lensjax import __version__, _jax
from lensjax._errors import LensjaxError, PlanError, ProcessError
from lensjax.execute.rendezvous import meet
from lensjax.execute.watch import DEAD, Watchman
from lensjax.plan.plan import Plan

# How launched processes find each other (see commands/launch).
COORDINATOR, COUNT, RANK = "LENSJAX_COORDINATOR", "LENSJAX_PROCESSES", "LENSJAX_PROCESS"
MEET = 20.0  # seconds until a process that has not come is missing
# JAX's own deadlines, in seconds. After them it ends processes without an exception: those that were paused together as
# well, and those of which one has more to do at the end. The watchman is there long before.
LONG = 7 * 86400
WORK = 600.0  # seconds that a process which is alive may take to trace or to plan

_calls = itertools.count()  # every process counts its exchanges, as every process runs the same program
_watchman: list[Watchman] = []


def connect(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None, *, timeout: float = MEET,
    silence: float = DEAD,
) -> None:  # fmt: skip
    """Joins this process to the others of its run; the first thing a program does, before JAX makes its devices.

    Without arguments: what `lensjax launch` says, or what `jax.distributed` finds out under SLURM, Open MPI, Kubernetes
    or on TPUs; alone where neither is there. Otherwise `coordinator` is "host:port" of process 0.

    It is `jax.distributed.initialize`, except that a process which does not come within `timeout` seconds, or which
    runs another release, is an error (ProcessError) on every process that did come, and that later on a process whose
    peer failed or died ends with an error that says so, within 30 s, instead of waiting in a collective.

    `silence`: seconds without a sign of life after which a process is taken for dead. One that is paused alone for
    longer, as by a debugger that stops all its threads, ends the run: pass more, or math.inf, for that. Processes that
    are paused together go on together.
    """
    for name, seconds, most in (("timeout", timeout, 86400), ("silence", silence, math.inf)):
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 1 <= seconds <= most:
            raise ProcessError(f"{name}={seconds!r}; expected a number of seconds from 1 to {most:g}")
    if _watchman:
        return
    facts = {"lensjax": __version__, "jax": jax.__version__, "python": ".".join(map(str, sys.version_info[:2]))}
    if _jax.coordination() is not None:  # the program called jax.distributed.initialize itself
        agree("connect", facts)
        _watchman.append(Watchman(_jax.coordination(), jax.process_index(), jax.process_count(), silence, _member))
        return
    address, count, rank = _where(coordinator, processes, process)
    if address is None or count is None or rank is None or count == 1:
        return
    if _jax.has_devices():
        raise ProcessError(
            f"process {rank} of {count} has made its devices already, and cannot join the others any more",
            hint="lensjax.connect() comes before anything that asks JAX for devices or makes an array",
        )
    if told := difference(meet(address, count, rank, facts, timeout)):
        raise ProcessError(told, hint="install the same releases everywhere")
    jax.distributed.initialize(
        address, count, rank, initialization_timeout=int(timeout) + 5, heartbeat_timeout_seconds=LONG,
        shutdown_timeout_seconds=LONG,
    )  # fmt: skip
    _watchman.append(Watchman(_jax.coordination(), rank, count, silence, _member))


def _member() -> bool:
    return _jax.coordination() is not None


def unconnected() -> list[str]:
    """What to tell the user of a process that `lensjax launch` started and that trains by itself; nothing elsewhere."""
    count = os.environ.get(COUNT, "")
    if _member() or not count.isdigit() or int(count) < 2:
        return []
    return [
        f"this is process {os.environ.get(RANK, '?')} of {count} that `lensjax launch` started, and it runs alone: "
        "call lensjax.connect() before anything of JAX"
    ]


def _where(coordinator: str | None, processes: int | None, process: int | None) -> tuple[Any, Any, Any]:
    """(address of process 0, number of processes, this one), as given, as `lensjax launch` says, or as JAX finds."""
    given = {"coordinator": coordinator, "processes": processes, "process": process}
    found = (coordinator, processes, process)
    if coordinator is None and COORDINATOR in os.environ:
        found = tuple(os.environ.get(name, "") for name in (COORDINATOR, COUNT, RANK))
        if not (found[1].isdigit() and found[2].isdigit()):
            raise ProcessError(
                f"{COORDINATOR} is set, {COUNT} is {found[1]!r} and {RANK} is {found[2]!r}; expected two numbers",
                hint="`lensjax launch` sets all three",
            )
        return found[0], int(found[1]), int(found[2])
    if None in found:
        found = _jax.cluster_parameters(*found)
    if None in found and any(x is not None for x in given.values()):
        lacking = [name for name, x in zip(given, found) if x is None]
        raise ProcessError(
            f"connect was not told {' and '.join(lacking)}, and no launcher says so",
            hint='lensjax.connect("host0:9731", processes=4, process=RANK)',
        )
    return found


def difference(said: Mapping[int, Mapping[str, Any]]) -> str:
    """The first field in which processes differ, as a sentence; "" where they agree. `said`: process -> its facts."""
    for name in dict.fromkeys(k for facts in said.values() for k in facts):
        groups: dict[str, list[int]] = {}
        for process, facts in sorted(said.items()):
            groups.setdefault(str(facts.get(name)), []).append(process)
        if len(groups) > 1:
            who = lambda ps: f"process{'es' * (len(ps) > 1)} {', '.join(map(str, ps[:8]))}{', ...' * (len(ps) > 8)}"
            return f"the processes do not agree on the {name}: " + "; ".join(
                f"{value} in {who(ps)}" for value, ps in groups.items()
            )
    return ""


def agree(
    what: str, facts: Mapping[str, Any], kind: type[LensjaxError] = ProcessError, passed_by: str | None = None
) -> None:
    """Returns when every process is here with the same facts. Raises `kind` on every process, naming the first
    difference, when they differ, or ProcessError for who is missing. With one process it returns. `passed_by`: what it
    means that another process, which saw nothing new, has made its batch and does not come here."""
    if _jax.coordination() is None:
        return
    if told := difference(exchange({"next thing to do": what, **facts}, passed_by)):
        raise kind(told, hint="every process must run the same program, with the same options and files")


def batch_made() -> None:
    """Tells the others, with the next sign of life, that this process has made one more global batch."""
    if _watchman:
        _watchman[0].batches += 1


def exchange(facts: Mapping[str, Any], passed_by: str | None = None) -> dict[int, Any]:
    """What every process said in this exchange, by process."""
    me, count = jax.process_index(), jax.process_count()
    place = f"lensjax/agree/{next(_calls)}"
    client = _jax.coordination()
    client.key_value_set(f"{place}/{me}", json.dumps(facts, default=str))
    missing = f"did not come to what process {me} does next ({facts.get('next thing to do', 'exchange')})"
    return {p: json.loads(wait_for(f"{place}/{p}", p, missing, passed_by)) for p in range(count)}


def wait_for(key: str, process: int, missing: str, passed_by: str | None = None) -> str:
    """The value that `process` puts under a key. Raises ProcessError when it ended, is dead, takes longer than WORK,
    or (where `passed_by` says what that means) has made a batch more than this one."""
    client, start, left_behind = _jax.coordination(), time.monotonic(), False
    while True:
        try:
            return client.blocking_key_value_get(key, 1000)
        except Exception as e:  # the deadline of one second; anything else as well is tried again until ours
            silent = _watchman[0].silent(process) if _watchman else 0.0
            waited = time.monotonic() - start
            if left_behind:
                raise ProcessError(
                    f"process {process} {passed_by}",
                    hint="every process must bring a part of the same shape and type to each step",
                ) from e
            # Raised after one more look: it may have come between the last one and this line.
            left_behind = passed_by is not None and bool(_watchman) and _watchman[0].ahead(process)
            dead = bool(_watchman) and silent > _watchman[0].dead
            ended = bool(_watchman) and process in _watchman[0].through and waited > 2
            if dead or ended or waited > WORK:
                why = "ended" if ended else f"took more than {WORK:.0f} s"
                why = f"has not been heard of for {silent:.0f} s" if dead and not ended else why
                raise ProcessError(
                    f"process {process} {missing}: it {why}",
                    hint="its own output says what happened to it; start all processes again",
                ) from e


def shared_plan(make: Callable[[], Any], receive: Callable[[Plan], Any]) -> Any:
    """Process 0's `make()` (a Choice), its plan given to all: the others do not search, and get `receive(plan)`. What
    process 0 raises, all raise."""
    key = f"lensjax/plan/{next(_calls)}"
    if jax.process_index() == 0:
        try:
            choice = make()
        except LensjaxError as e:
            _jax.coordination().key_value_set(key, json.dumps({"error": e.message, "hint": e.hint, "code": e.code}))
            raise
        _jax.coordination().key_value_set(key, json.dumps({"plan": choice.plan.to_dict()}))
        return choice
    told = json.loads(wait_for(key, 0, "did not make the plan"))
    if "error" in told:
        raise ProcessError(f"process 0 could not plan: {told['error']}", hint=told["hint"], code=told["code"])
    return receive(Plan.from_dict(told["plan"]))


def plan_hash(plan: Plan) -> str:
    """A hash of everything that decides what runs (not of what is predicted)."""
    fields = {k: v for k, v in plan.to_dict().items() if k not in ("predicted",)}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]


def described(plan: Any) -> str:
    """What was given as `plan=`, in a word and a hash."""
    if isinstance(plan, Plan):
        return f"{plan.name or 'a plan'} ({plan_hash(plan)})"
    if plan is None or (isinstance(plan, str) and not plan.endswith(".json")):
        return str(plan)
    try:
        return described(Plan.load(plan))
    except PlanError as e:  # said to all: a file that one host lacks is a difference
        return e.message
