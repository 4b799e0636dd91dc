"""Values that change their sharding, and matmuls that devices repeat."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from lensjax.partition import partition, repeated, reshards
from tests.partition.decoder import Config, Rules, abstract_mesh, fsdp, lowered, tensor


def test_fsdp_gathers_show_as_reshards_of_the_weights():
    p = partition(lowered(Config(), Rules(abstract_mesh(d=8), fsdp("d"), P("d"), gather=True), P("d")))
    weights = [r for r in reshards(p) if r.ops == ("all_gather",) and r.trips == Config().layers]
    assert len(weights) == 14  # seven in the forward, seven in the recomputation
    assert all(not any(r.after) and any(r.before) for r in weights)
    assert not any(r.involuntary for r in reshards(p))
    assert repeated(p) == ()


def test_a_move_that_no_collective_makes_is_involuntary():
    mesh = abstract_mesh(a=2, b=2, c=2)

    def step(x):
        x = jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P(("a", "b"), "c")))
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("c", ("b", "a")))) * 2

    lowered_ = jax.jit(step).trace(jax.ShapeDtypeStruct((64, 64), jnp.float32)).lower(lowering_platforms=("cpu",))
    assert [r.involuntary for r in reshards(partition(lowered_))] == [True]


def test_a_batch_that_is_lost_inside_the_layers_is_found():
    # FSDP and tensor parallelism without a pin on the activations: the weights' splits win.
    c = Config(embed=256, mlp=1024)
    free = Rules(abstract_mesh(d=2, t=4), tensor("t", "d"), P(*[P.UNCONSTRAINED] * 3))
    pinned = Rules(abstract_mesh(d=2, t=4), tensor("t", "d"), P("d", None, None))
    lost = repeated(partition(lowered(c, free, P("d"))))
    kept = repeated(partition(lowered(c, pinned, P("d"))))
    assert sum(r.flops for r in lost) > sum(r.flops for r in kept)


def test_replicated_weights_on_a_replicated_batch_repeat_everything():
    p = partition(lowered(Config(), Rules(abstract_mesh(d=8), {}), P()))
    found = repeated(p)
    assert {r.times for r in found} == {8}
    assert sum(r.flops for r in found) == sum(o.flops * o.trips for o in p.operations if o.name == "dot_general")
