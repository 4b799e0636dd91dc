"""From the options of the decorator to a plan: off, a file, a preset, or the search."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from lensjax import __version__, _jax
from lensjax._collect import seldom_collected
from lensjax._errors import PlanError, UnsupportedJax
from lensjax.cost.price import price
from lensjax.cost.pricer import Pricer
from lensjax.execute.options import check
from lensjax.execute.processes import agree, described, plan_hash, shared_plan
from lensjax.plan.grammar import is_file
from lensjax.plan.pins import Pin, normalize
from lensjax.plan.plan import Plan, Provenance
from lensjax.plan.validate import validate
from lensjax.program.program import Program
from lensjax.search.cache import PlanCache, key_of
from lensjax.search.candidates import Candidate
from lensjax.search.choose import Choice, choose, tier_names
from lensjax.search.compressed import compressed
from lensjax.search.judged import by_judging, judged, priced_by
from lensjax.search.presets import pinned, preset
from lensjax.search.secondary import copied
from lensjax.topology.cluster import Cluster
from lensjax.verify.judge import judge


@dataclasses.dataclass(frozen=True)
class Options:
    """What `parallelize` was given; see there. Raises a LensjaxError for what cannot be meant."""

    cluster: Any = None
    memory: float | None = None
    plan: Any = None
    pins: Mapping[str, Any] | None = None
    batch_argnums: Sequence[int] | None = None
    batch_axes: Any = None
    donate: bool = True
    report: Any = None
    search: str | None = None
    budget: float | None = None
    cache: Any = None
    judge: bool = False
    compress: str | Mapping[str, str] = "off"
    secondary: str | None = None

    def __post_init__(self):
        check(self)


def cluster_for(spec: Any) -> Cluster:
    """The cluster that was named, or the devices that JAX sees."""
    if spec is not None:
        return Cluster.parse(spec)
    devices = jax.devices()
    if devices[0].platform == "cpu":
        processes = jax.process_count()
        count = len(devices)
        return Cluster.parse(f"cpu:{processes}x{count // processes}" if processes > 1 else f"cpu:{count}")
    raise PlanError(
        f"which cluster these {len(devices)} {devices[0].device_kind} devices are part of is not known",
        hint='name it, as in parallelize(cluster="dgx-h100:4")',
    )


def provenance(program: Program, cluster: Cluster) -> Provenance:
    x64, prng = _jax.settings()
    return Provenance(
        program=program.fingerprint,
        cluster=cluster.name,
        versions={"lensjax": __version__, "jax": jax.__version__},
        x64=x64,
        prng=prng,
    )


def agreed_plan(program: Program, options: Options, name: str) -> Choice:
    """As `make_plan` for the options' cluster; in a run of several processes made once, by process 0, and only when all
    have the same program and options. Raises ProcessError on every process where they differ."""
    cluster = cluster_for(options.cluster)
    if _jax.coordination() is None:
        return make_plan(program, cluster, options)
    agree(
        f"plan {name}",
        {
            "release of lensjax": __version__,
            "release of jax": jax.__version__,
            "settings of JAX": _jax.numerics(),
            "cluster": cluster.name,
            "memory limit": options.memory,
            "plan that was given": described(options.plan),
            "pins": options.pins,
            "compress": options.compress,
            "secondary": options.secondary,
            "size of the batch": program.batch.size,
            "program of the step": program.fingerprint,
        },
    )
    if options.plan is not None:
        choice = make_plan(program, cluster, options)
    else:
        limit = options.memory if options.memory is not None else cluster.device.memory
        choice = shared_plan(
            lambda: make_plan(program, cluster, options),
            lambda plan: Choice(plan, (Candidate(plan.name, plan),), limit),
        )
    agree(f"run {name}", {"plan": f"{choice.plan.name} ({plan_hash(choice.plan)})"})
    return choice


@seldom_collected()
def make_plan(program: Program, cluster: Cluster, options: Options) -> Choice:
    """The plan and what it was compared with. Raises PlanError, BatchError or DoesNotFit.

    Where XLA's partitioner cannot be driven (a newer jax), plans are priced by compiling them.
    """
    pins = normalize(options.pins)
    if why := _undriven():
        return _compiled_plan(program, cluster, options, pins, why)
    limit = options.memory if options.memory is not None else cluster.device.memory
    given = options.plan
    if given is None and (replayed := _replay(program, cluster, options, pins, limit)) is not None:
        return replayed
    if given is None:
        choice = choose(
            program,
            cluster,
            memory=options.memory,
            pins=pins,
            progress=_progress(options.report),
            search=options.search,
            budget=options.budget,
        )
        if options.judge:
            choice = judged(choice, judge(program, cluster), progress=_progress(options.report))
    elif isinstance(given, str) and not is_file(given):
        plan = preset(given, program, cluster.devices, pins=pins, tier_of=tier_names(cluster))
        plan = price(program, plan, cluster)
        choice = Choice(plan, (Candidate(given, plan),), limit, pricer=Pricer(program, cluster))
    else:
        plan = _given(program, cluster, given, pins)
        choice = Choice(plan, (Candidate(plan.name or "plan", plan),), limit, pricer=Pricer(program, cluster))
        return _compressed(choice, program, cluster, options)
    choice = _compressed(choice, program, cluster, options)
    plan = dataclasses.replace(choice.plan, provenance=provenance(program, cluster))
    if given is None and options.cache is not None and choice.complete:
        PlanCache(pathlib.Path(options.cache).expanduser()).put(_key(program, cluster, options, pins, limit), plan)
    return dataclasses.replace(choice, plan=plan)


def _compressed(choice: Choice, program: Program, cluster: Cluster, options: Options) -> Choice:
    pricer = choice.pricer or Pricer(program, cluster)
    choice = copied(choice, program, cluster, options.secondary, pricer)
    return compressed(choice, program, cluster, options.compress, pricer, _progress(options.report))


def _undriven() -> str:
    """Why the partitioner cannot be driven, "" where it can."""
    try:
        _jax.mlir()
    except UnsupportedJax as e:
        return e.message
    return ""


def _compiled_plan(program: Program, cluster: Cluster, options: Options, pins: Sequence[Pin], why: str) -> Choice:
    """`make_plan` without the partitioner."""
    given, judge_ = options.plan, judge(program, cluster)
    if given is None or (isinstance(given, str) and not is_file(given)):
        choice = by_judging(
            program,
            cluster,
            judge_,
            why,
            memory=options.memory,
            pins=pins,
            names=[given] if given is not None else None,
            progress=_progress(options.report),
        )
        choice = copied(choice, program, cluster, options.secondary, priced_by(judge_))
        choice = compressed(choice, program, cluster, options.compress, priced_by(judge_), _progress(options.report))
        plan = dataclasses.replace(choice.plan, provenance=provenance(program, cluster))
        return dataclasses.replace(choice, plan=plan)
    plan = _given(program, cluster, given, pins, judge_)
    limit = options.memory if options.memory is not None else cluster.device.memory
    return Choice(plan, (Candidate(plan.name or "plan", plan),), limit)


def _key(program: Program, cluster: Cluster, options: Options, pins: Sequence[Pin], limit: float) -> str:
    return key_of(
        program, cluster, limit, pins, f"{options.search or 'milp'} {options.compress} {options.secondary}", __version__
    )


def _replay(program: Program, cluster: Cluster, options: Options, pins: Sequence[Pin], limit: float) -> Choice | None:
    """The plan that an earlier search of the same problem chose, priced anew; None where there is none, or it does not
    fit any more."""
    if options.cache is None:
        return None
    plan = PlanCache(pathlib.Path(options.cache).expanduser()).get(_key(program, cluster, options, pins, limit))
    if plan is None:
        return None
    plan = price(program, plan, cluster)
    candidate = Candidate(plan.name, plan)
    return Choice(plan, (candidate,), limit) if candidate.fits(limit) else None


def _given(
    program: Program, cluster: Cluster, given: Any, pins: Sequence[Pin], by: Callable[[Plan], Plan] | None = None
) -> Plan:
    """A plan file or a Plan, checked and with the pins applied. It is priced anew (`by`: by what): it may have been
    edited, and what it once predicted was for the old fields."""
    plan = given if isinstance(given, Plan) else Plan.load(pathlib.Path(given))
    plan = validate(plan, layers=[n.name for n in program.layers], tiers=[t.name for t in cluster.tiers])
    check_plan(program, cluster, plan)
    if pins:
        plan = plan.replace(leaves=pinned(program, pins, plan.leaves, plan.mesh.shape))
    return by(plan) if by is not None else price(program, plan, cluster)


def check_plan(program: Program, cluster: Cluster, plan: Plan) -> None:
    """Raises PlanError naming the field in which a replayed plan does not belong to this program or cluster."""
    if plan.mesh.size != cluster.devices:
        raise PlanError(
            f"field 'mesh' of the plan is for {plan.mesh.size} devices ({plan.mesh.shape}); the cluster "
            f"{cluster.name} has {cluster.devices}",
            hint="plan again for this cluster",
        )
    here = provenance(program, cluster)
    made = plan.provenance
    if made.program and made.program != here.program:
        raise PlanError(
            f"field 'provenance.program' of the plan is {made.program}; this step is program {here.program}",
            hint="the plan was made for another program (or other shapes): plan again, or clear the field to use its "
            "shardings all the same",
        )
    for name in ("x64", "prng"):
        if made.program and getattr(made, name) != getattr(here, name):
            raise PlanError(
                f"field 'provenance.{name}' of the plan is {getattr(made, name)!r}; here it is {getattr(here, name)!r}",
                hint="the setting changes the program's numbers: set it as it was, or plan again",
            )


def _progress(report: Any) -> Any:
    return report if callable(report) else None
