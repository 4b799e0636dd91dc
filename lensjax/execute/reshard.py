"""From the shardings of one plan to those of another: every byte that must move moves once, and no other.

    state = lensjax.reshard(state, train_step.plan, other_plan)

Leaf by leaf, those that shrink first, so that no device ever holds more than the larger of the two states and what one
leaf needs on its way: its new shard and the parts that arrive, at most 1.5 of the leaf.

XLA's own way from one sharding to another is made for inside a step; between two arbitrary ones it may gather the whole
first. Here each device's new shard is cut into the parts that the old shards hold; a part that the device has itself is
copied there, any other comes from the device that has sent least so far.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from lensjax._errors import PlanError, StateError
from lensjax.execute.checks import traced
from lensjax.execute.nnx import is_module, leaves, take
from lensjax.execute.place import device_mesh
from lensjax.passes.shardings import named
from lensjax.plan.plan import Plan, Spec
from lensjax.program.trace import is_dynamic

Box = tuple[tuple[int, int], ...]  # start and stop in each dimension


def reshard(state: Any, plan_a: Plan, plan_b: Plan, *, devices: Sequence[Any] | None = None) -> Any:
    """`state`, which lies as `plan_a` has it, as `plan_b` has it: the same bits in the same tree.

    The old buffers are given up leaf by leaf (a leaf that lies right already is passed on). Where the plans differ in
    size, `devices` are those of `plan_b`, in JAX's order (default: the first of JAX's). With several processes both
    plans must be for all devices, and XLA moves the bytes.

    A leaf is found in a plan by its path: of the whole state, or after an argument's name. NNX modules are updated in
    place. Raises StateError for a state that does not lie as `plan_a` says, PlanError where `plan_b` does not fit.
    """
    for name, plan in (("plan_a", plan_a), ("plan_b", plan_b)):
        if not isinstance(plan, Plan):
            raise PlanError(
                f"{name} is a {type(plan).__name__}; expected a Plan",
                hint="reshard(state, train_step.plan, other_step.plan), or lensjax.Plan.load(file)",
            )
    if any(map(is_module, leaves(state))):
        from lensjax.execute.nnx import write

        taken = take(state)
        new = reshard(taken.tree, plan_a, plan_b, devices=devices)
        write(taken, [x for x in jax.tree.leaves(new, is_leaf=_is_values) if _is_values(x)])
        return state
    flat, tree = jax.tree_util.tree_flatten_with_path(state)
    paths = [jax.tree_util.keystr(p, simple=True, separator="/") for p, _ in flat]
    values = [x for _, x in flat]
    _check_leaves(paths, values)
    old = specs_of(plan_a, paths, [np.shape(x) for x in values])
    new = specs_of(plan_b, paths, [np.shape(x) for x in values])
    _check_program(plan_a, plan_b, values, new)
    given = devices
    if devices is None:
        devices = jax.devices() if jax.process_count() > 1 else jax.devices()[: plan_b.mesh.size]
    if not isinstance(devices, Sequence | np.ndarray):
        raise PlanError(f"devices={str(devices)[:100]}; expected a list of different devices of jax.devices()")
    devices = list(devices)
    if not all(isinstance(d, jax.Device) for d in devices) or len(set(devices)) < len(devices):
        raise PlanError(f"devices={str(devices)[:100]}; expected different devices of jax.devices()")
    if len(devices) != plan_b.mesh.size:
        there = f"JAX sees {len(devices)}" if given is None else f"devices= has {len(devices)}"
        raise PlanError(
            f"the second plan ({plan_b.name!r}) is for {plan_b.mesh.size} devices {plan_b.mesh.shape}; {there}",
            hint="as many devices as plan_b's mesh has, in its order; or leave devices= out for JAX's first ones",
        )
    mesh = device_mesh(plan_b.mesh, devices)
    wanted = [named(mesh, s) for s in new]
    for path, x, spec, sharding in zip(paths, values, old, wanted):
        _check(path, x, plan_a, spec, sharding)
    out = list(values)
    for i in sorted(range(len(out)), key=lambda i: _growth(values[i], wanted[i])):
        out[i] = move(values[i], wanted[i])
    return jax.tree.unflatten(tree, out)


def _is_values(x: Any) -> bool:
    from lensjax.execute.nnx import is_values

    return is_values(x)


def specs_of(plan: Plan, paths: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> list[Spec]:
    """The plan's spec of each leaf of a state. A plan names leaves by the step's arguments ("state/params/w"); a state
    is one of these, or a tuple of several. Raises PlanError where two arguments have a leaf of that name and shape."""
    inner: dict[str, list[tuple[str, Spec]]] = {}
    for path, spec in plan.leaves.items():
        inner.setdefault(path.partition("/")[2], []).append((path, spec))
    # A state that is a tuple of arguments has their positions in front.
    numbered = all(p.partition("/")[0].isdigit() for p in paths)
    found = []
    for path, shape in zip(paths, shapes):
        spec = plan.leaves.get(path)
        if spec is None:
            names = [path, path.partition("/")[2]] if numbered else [path]
            fitting = [x for n in names for x in inner.get(n, []) if len(x[1]) == len(shape)]
            if len({s for _, s in fitting}) > 1:
                raise PlanError(
                    f"{path} of the state may be {' or '.join(p for p, _ in fitting)} of the plan",
                    hint="give the state as a dict with the step's argument names, as in {'params': params, ...}",
                )
            spec = fitting[0][1] if fitting else ((),) * len(shape)
        found.append(spec)
    return found


def _check_leaves(paths: Sequence[str], values: Sequence[Any]) -> None:
    for path, x in zip(paths, values):
        if traced([x]):
            raise StateError(
                f"{path} is traced: reshard moves arrays that are there", hint="call it outside jit, grad and the step"
            )
        if not is_dynamic(x) or isinstance(x, jax.ShapeDtypeStruct):
            raise StateError(f"{path or 'the state'} is a {type(x).__name__}; expected arrays and numbers")


def _check_program(plan_a: Plan, plan_b: Plan, values: Sequence[Any], new: Sequence[Spec]) -> None:
    """Raises PlanError for a plan that knows no leaf of this state: it would leave all of it whole, in silence."""
    programs = {plan_a.provenance.program, plan_b.provenance.program}
    if len(programs) < 2 or "" in programs or not plan_b.leaves or plan_a.leaves.keys() & plan_b.leaves.keys():
        return
    if any(len(spec) == np.ndim(x) and any(spec) for spec, x in zip(new, values)) or not any(map(np.ndim, values)):
        return
    raise PlanError(
        f"the second plan ({plan_b.name!r}) was made for another step: it splits {', '.join(list(plan_b.leaves)[:3])}, "
        "and nothing of this state",
        hint="plan_b is a plan of a step with this state, as in other_step.plan",
    )


def _check(path: str, x: Any, plan: Plan, spec: Spec, sharding: NamedSharding) -> None:
    if not isinstance(x, jax.Array):
        return
    if x.is_deleted():
        raise StateError(f"{path} was given up to an earlier call", code="donated")
    if sharding.mesh.size > 1 or isinstance(x.sharding, NamedSharding):
        axes = plan.mesh.shape
        parts = tuple(int(np.prod([axes[a] for a in names], dtype=int)) for names in spec)
        shard = tuple(-(-n // p) for n, p in zip(x.shape, parts))
        if x.sharding.shard_shape(x.shape) != shard or len(x.sharding.device_set) not in (plan.mesh.size, 1):
            raise StateError(
                f"{path} lies as {x.sharding}; the first plan ({plan.name!r}) splits its {x.shape} as {list(spec)} "
                f"over {plan.mesh.size} devices",
                hint="plan_a is the plan under which the state was made or stepped last",
            )
    try:
        sharding.shard_shape(x.shape)
    except ValueError as e:
        raise PlanError(f"the second plan does not divide {path} {x.shape}: {e}") from e


def _growth(x: Any, wanted: NamedSharding) -> int:
    """Elements by which a device's shard grows, times their size."""
    if not isinstance(x, jax.Array):
        return 0
    count = lambda s: int(np.prod(s.shard_shape(x.shape), dtype=np.int64))
    return (count(wanted) - count(x.sharding)) * _data(x).dtype.itemsize


def _data(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


# ---- one leaf ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Part:
    """What one device's new shard takes from one old shard: `source` (a device) and the box, in the whole array."""

    source: Any
    box: Box


def move(x: Any, wanted: NamedSharding) -> Any:
    """One array with another sharding; its old buffers are given up. Numbers and numpy arrays are placed."""
    if not isinstance(x, jax.Array):
        return jax.device_put(x, wanted)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = move(_data(x), NamedSharding(wanted.mesh, wanted.spec))
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    if not x.is_fully_addressable or not x.size:
        return jax.device_put(x, wanted, donate=True)
    old, new = boxes(x.sharding, x.shape), boxes(wanted, x.shape)
    shards = {s.device: s.data for s in x.addressable_shards}
    if old == new:  # the same places under other names
        return jax.make_array_from_single_device_arrays(x.shape, wanted, [shards[d] for d in new])
    made = _assemble(shards, old, new, assign(old, new))
    out = jax.make_array_from_single_device_arrays(x.shape, wanted, [made[d] for d in new])
    x.delete()
    return out


def boxes(sharding: Any, shape: tuple[int, ...]) -> dict[Any, Box]:
    """Device -> the box of the array that it holds."""
    found = sharding.devices_indices_map(shape)
    return {d: tuple(i.indices(n)[:2] for i, n in zip(index, shape)) for d, index in found.items()}


def assign(old: Mapping[Any, Box], new: Mapping[Any, Box]) -> dict[Any, list[Part]]:
    """For each device of `new`, the parts that make up its shard: disjoint, from itself where it can."""
    holders: dict[Box, list[Any]] = {}
    for device, box in old.items():
        holders.setdefault(box, []).append(device)
    sent = dict.fromkeys(old, 0)
    out: dict[Any, list[Part]] = {}
    for device, target in new.items():
        parts = []
        for box, who in holders.items():
            both = overlap(box, target)
            if both is None:
                continue
            source = device if device in who else min(who, key=lambda d: (sent[d], d.id))
            if source != device:
                sent[source] += size(both)
            parts.append(Part(source, both))
        # The device's own part last: it may be the old shard itself, which is kept until the end in any case.
        out[device] = sorted(parts, key=lambda p: p.source == device)
    return out


def overlap(a: Box, b: Box) -> Box | None:
    both = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b))
    return both if all(p < q for p, q in both) or not both else None


def size(box: Box) -> int:
    return int(np.prod([q - p for p, q in box], dtype=np.int64))


def _assemble(
    shards: Mapping[Any, jax.Array], old: Mapping[Any, Box], new: Mapping[Any, Box], parts: Mapping[Any, list[Part]]
) -> dict[Any, jax.Array]:
    """The new shards, in rounds of one part for each device, each round finished before the next one starts."""
    made: dict[Any, jax.Array] = {}
    for round_ in range(max(map(len, parts.values()), default=0)):
        todo = {d: p[round_] for d, p in parts.items() if round_ < len(p)}
        for device, arrived in _arrive(shards, old, new, todo):
            if len(parts[device]) == 1:
                made[device] = arrived
                continue
            if device not in made:
                shape = tuple(q - p for p, q in new[device])
                with jax.default_device(device):
                    made[device] = jnp.zeros(shape, arrived.dtype)
            at = tuple(p - t for (p, _), (t, _) in zip(todo[device].box, new[device]))
            made[device] = _put(made[device], arrived, np.array(at, np.int32))
        settle(list(made.values()))
    return made


def _arrive(shards: Any, old: Any, new: Any, todo: Mapping[Any, Part]) -> Iterator[tuple[Any, jax.Array]]:
    """(device, its part, on it). A part that several devices take from one source is cut out once."""
    cuts: dict[tuple[Any, Box], jax.Array] = {}
    for device, part in todo.items():
        key = (part.source, part.box)
        held = old[part.source]
        if key not in cuts:
            at = np.array([p - h for (p, _), (h, _) in zip(part.box, held)], np.int32)
            sizes = tuple(q - p for p, q in part.box)
            cuts[key] = shards[part.source] if part.box == held else _cut(shards[part.source], at, sizes)
        cut = cuts[key]
        if part.source != device:
            yield device, send(cut, device)
        else:
            alone = part.box == new[device] and cut is shards[device]
            yield device, jnp.copy(cut) if alone else cut


def send(part: jax.Array, device: Any) -> jax.Array:
    """One transfer between two devices."""
    return jax.device_put(part, device)


def settle(arrays: Any) -> None:
    """Waits: what one round needs is gone before the next one starts."""
    jax.block_until_ready(arrays)


@functools.partial(jax.jit, static_argnums=2)
def _cut(x: jax.Array, at: Any, sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(x, [at[i] for i in range(x.ndim)], sizes)


@functools.partial(jax.jit, donate_argnums=0)
def _put(buffer: jax.Array, part: jax.Array, at: Any) -> jax.Array:
    return jax.lax.dynamic_update_slice(buffer, part, [at[i] for i in range(buffer.ndim)])
