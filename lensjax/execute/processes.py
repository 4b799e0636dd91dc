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
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from lensjax import __version__, _jax
from lensjax._errors import LensjaxError, PlanError, ProcessError
from lensjax.execute.rendezvous import meet
from lensjax.execute.watch import Watchman
from lensjax.plan.plan import Plan

# How launched processes find each other (see commands/launch).
COORDINATOR, COUNT, RANK = "LENSJAX_COORDINATOR", "LENSJAX_PROCESSES", "LENSJAX_PROCESS"
MEET = 20.0  # seconds until a process that has not come is missing
WORK = 600.0  # seconds that a process which is alive may take to trace or to plan

_calls = itertools.count()  # every process counts its exchanges, as every process runs the same program
_watchman: list[Watchman] = []


def connect(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None, *, timeout: float = MEET
) -> None:
    """Joins this process to the others of its run; the first thing a program does, before JAX makes its devices.

    Without arguments: what `lensjax launch` says, or what `jax.distributed` finds out under SLURM, Open MPI, Kubernetes
    or on TPUs; alone where neither is there. Otherwise `coordinator` is "host:port" of process 0.

    It is `jax.distributed.initialize`, except that a process which does not come within `timeout` seconds, or which
    runs another release, is an error (ProcessError) on every process that did come, and that later on a process whose
    peer failed or died ends with an error that says so, within 30 s, instead of waiting in a collective.
    """
    if _watchman:
        return
    environment = os.environ
    if coordinator is None and COORDINATOR in environment:
        coordinator = environment[COORDINATOR]
        processes, process = int(environment[COUNT]), int(environment[RANK])
    found = (coordinator, processes, process)
    address, count, rank = _jax.cluster_parameters(found[0], found[1], found[2]) if None in found else found
    if address is None or count is None or rank is None or count == 1:
        return
    facts = {"lensjax": __version__, "jax": jax.__version__, "python": ".".join(map(str, sys.version_info[:2]))}
    said = meet(address, count, rank, facts, timeout)
    if told := difference(said):
        raise ProcessError(told, hint="install the same releases everywhere")
    jax.distributed.initialize(
        address, count, rank, initialization_timeout=int(timeout) + 5, heartbeat_timeout_seconds=30,
        shutdown_timeout_seconds=15,
    )  # fmt: skip
    _watchman.append(Watchman(_jax.coordination(), rank, count))


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


def agree(what: str, facts: Mapping[str, Any], kind: type[LensjaxError] = ProcessError) -> None:
    """Returns when every process is here with the same facts. Raises `kind` on every process, naming the first
    difference, when they differ, or ProcessError for who is missing. With one process it returns."""
    if _jax.coordination() is not None and (told := difference(exchange({"next thing to do": what, **facts}))):
        raise kind(told, hint="every process must run the same program, with the same options and files")


def exchange(facts: Mapping[str, Any]) -> dict[int, Any]:
    """What every process said in this exchange, by process."""
    me, count = jax.process_index(), jax.process_count()
    place = f"lensjax/agree/{next(_calls)}"
    client = _jax.coordination()
    client.key_value_set(f"{place}/{me}", json.dumps(facts, default=str))
    missing = f"did not come to what process {me} does next ({facts.get('next thing to do', 'exchange')})"
    return {p: json.loads(wait_for(f"{place}/{p}", p, missing)) for p in range(count)}


def wait_for(key: str, process: int, missing: str) -> str:
    """The value that `process` puts under a key. Raises ProcessError when it is dead, or takes longer than WORK."""
    client, start = _jax.coordination(), time.monotonic()
    while True:
        try:
            return client.blocking_key_value_get(key, 1000)
        except Exception as e:  # the deadline of one second; anything else as well is tried again until ours
            silent = _watchman[0].silent(process) if _watchman else 0.0
            waited = time.monotonic() - start
            if silent > MEET or waited > WORK:
                why = f"has not been heard of for {silent:.0f} s" if silent > MEET else f"took more than {WORK:.0f} s"
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
