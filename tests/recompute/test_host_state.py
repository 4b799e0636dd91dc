"""Optimizer state that waits in the host's memory between steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend import core as jcore
from jax.sharding import Mesh

from lensjax import _jax
from lensjax._errors import PlanError
from lensjax.cost.price import price
from lensjax.models.targets import target
from lensjax.passes.emit import abstract_mesh, emit, lower
from lensjax.passes.host_state import fetched, on_host
from lensjax.plan.plan import Micro
from lensjax.program.boundary import BACKWARD, direction
from lensjax.program.program import analyze
from lensjax.search.presets import preset
from lensjax.topology.cluster import Cluster
from lensjax.verify import compile_for
from tests.gpu_compiler import needs_gpu_compiler

CLUSTER = Cluster.parse("dgx-h100:1")
WIDTH, LAYERS = 128, 3  # a moment of a layer is exactly what is worth moving
MOMENTS = 2 * LAYERS * 4 * WIDTH * WIDTH
EVERY = ("state/opt/*",)


def step_and_arguments():
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def step(state, x):
        def loss_fn(params):
            h = x
            for w in params:
                h = jnp.tanh(h @ w)
            return (h**2).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) * 0.1, jnp.float32) for _ in range(LAYERS)]
    x = jnp.asarray(rng.normal(size=(16, WIDTH)), jnp.float32)
    return step, ({"params": params, "opt": tx.init(params)}, x)


def planned(devices=8, host=EVERY):
    step, arguments = step_and_arguments()
    p = analyze(step, arguments)
    return p, preset("dp", p, devices).replace(host=host), arguments


def test_what_waits_on_the_host_is_priced_there():
    p, plan, _ = planned()
    here, away = (price(p, plan.replace(host=h), CLUSTER).predicted for h in ((), EVERY))
    assert "host" not in here.memory and away.memory["host"] == MOMENTS
    assert here.memory["optimizer"] - away.memory.get("optimizer", 0.0) == MOMENTS
    assert away.peak_bytes < here.peak_bytes
    # It is fetched after the last gradient, and sent back: nothing hides either way.
    crossed = 2 * MOMENTS / CLUSTER.device.host_bandwidth
    assert away.step_s >= here.step_s + crossed


def test_moments_are_fetched_after_the_backward_one_parameter_after_the_other():
    p, plan, _ = planned()
    eqns = _jax.open_jaxpr(emit(p, plan, abstract_mesh(plan)).pinned).eqns
    gates = [i for i, e in enumerate(eqns) if "lensjax.gate" in str(e.source_info.name_stack)]
    last = max(i for i, e in enumerate(eqns) if direction(e) == BACKWARD)
    assert len(gates) == LAYERS and min(gates) > last
    for n, i in enumerate(gates):  # two moments and their gradient; the parameter and the moments made before
        assert len(eqns[i].invars) == (3 if n == 0 else 6)


def test_the_numbers_are_the_same():
    """The rewritten body itself, on a CPU; where the plan runs on CPUs, it has nothing to move."""
    p, plan, arguments = planned(devices=1)
    mesh = Mesh(np.array(jax.devices()[:1]), ["dp"])
    plain = emit(p, plan, mesh)
    assert all(s.memory_kind != "pinned_host" for s in plain.arguments)
    leaves = jax.tree.leaves(arguments)
    moved = jcore.jaxpr_as_fun(_jax.close(fetched(plain.pinned, p, on_host(p, plan))))
    for x, y in zip(jax.jit(plain.run)(*leaves), jax.jit(moved)(*leaves), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7)


def test_what_cannot_wait_on_the_host_is_said():
    p, plan, _ = planned()
    with pytest.raises(PlanError, match=r"matches no optimizer state(.|\n)*state/opt/"):
        emit(p, plan.replace(host=("state/params/*",)), abstract_mesh(plan))
    with pytest.raises(PlanError, match="computes shares of the batch apart"):
        emit(p, plan.replace(micro=Micro(count=2)), abstract_mesh(plan))


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("text", ["dp", "fsdp"])
def test_compiled_for_h100_the_host_holds_what_is_planned(text):
    t = target("llama3-tiny", 8, 512, remat="full", vocab=8192, width=1024, mlp=4096, layers=8)
    p = analyze(t.step, (t.state, t.batch))
    made, predicted = {}, {}
    for host in ((), ("state/opt_state/*",)):
        plan = preset(text, p, 8).replace(host=host)
        made[host] = compile_for(lower(emit(p, plan, abstract_mesh(plan)), "cuda"), CLUSTER, fallback=False).memory
        predicted[host] = price(p, plan, CLUSTER).predicted
        peaks = f"predicted {predicted[host].peak_bytes / 1e9:.2f} GB, compiled {made[host].peak / 1e9:.2f} GB"
        print(f"{text}, {host}: {peaks}, host {made[host].host / 1e9:.3f} GB")
    (here, away), (_, now) = made.values(), predicted.values()
    assert away.host == now.memory["host"] > 0 and here.host == 0
    assert away.peak < here.peak
    assert 0.75 * away.peak < now.peak_bytes < away.peak  # XLA writes new moments beside the old ones
