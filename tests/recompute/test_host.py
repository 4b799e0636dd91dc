"""Offload as it is priced: what is planned in host memory, and what no longer is on the device."""

import jax.numpy as jnp
import pytest

from lensjax.cost.price import price
from lensjax.program.program import analyze
from lensjax.search.presets import preset
from lensjax.topology.cluster import Cluster
from tests.recompute.steps import LAYERS, STEPS, WIDTH

ROWS = 2**13


def priced(name, level):
    step, params, _ = STEPS[name]()
    p = analyze(step, (params, jnp.zeros((ROWS, WIDTH))))
    plan = preset("dp", p, 8)
    return price(p, plan.replace(layers={"*": level}), Cluster.parse("dgx-h100:1")).predicted


@pytest.mark.parametrize("name, moved", [("scanned", LAYERS), ("unrolled", LAYERS - 2)])
def test_offloaded_inputs_are_counted_on_the_host(name, moved):
    on, off = priced(name, "inputs"), priced(name, "offload")
    one = 4 * ROWS * WIDTH / 8
    assert off.memory["host"] == one * moved
    assert "host" not in on.memory
    if name == "scanned":  # the stack of inputs is gone from the device
        assert on.peak_bytes - off.peak_bytes > one * (moved - 3)


def test_a_step_takes_as_long_as_its_host_link():
    off = priced("scanned", "offload")
    assert off.step_s >= off.memory["host"] / 50e9
