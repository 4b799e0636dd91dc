"""Promise 1: a decorated step computes what the undecorated step computes on one device."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

import lensjax
from tests.same_numbers import compare
from tests.zoo import FAMILIES

MESHES = {
    "8": ["dp", "zero1", "fsdp:again", "fsdp:once"],
    "2x4": ["dp=2,fsdp=4", "dp=2,fsdp:once=4", "zero1=2,fsdp=4", "dp=2,zero1=4"],
    "4x2": ["dp=4,fsdp=2", "zero1=4,fsdp:once=2", "dp=4,zero1=2"],
    "2x2x2": ["dp=2,zero1=2,fsdp=2"],
}
PRESETS = [p for plans in MESHES.values() for p in plans]
FIRST_SIX = ["mlp", "cnn_batchnorm", "gpt_unrolled", "gpt_scan_remat_dropout", "gpt_tied_dropout", "dlrm"]


@pytest.mark.few(3)
@pytest.mark.parametrize("index", range(len(FIRST_SIX)))
def test_each_family_with_one_preset(index):
    compare(FIRST_SIX[index], PRESETS[(5 * index + 3) % len(PRESETS)])


@pytest.mark.few(3)
@pytest.mark.parametrize("plan", PRESETS)
def test_a_small_model_under_every_preset(plan):
    compare("mlp", plan)


@pytest.mark.slow
@pytest.mark.parametrize("plan", PRESETS)
@pytest.mark.parametrize("family", FIRST_SIX[1:])
def test_every_family_under_every_preset(family, plan):
    compare(family, plan, steps=1)


@pytest.mark.slow
def test_one_device():
    code = (
        "import jax; from tests.same_numbers import compare; assert len(jax.devices()) == 1; "
        "[print(compare('gpt_scan_remat_dropout', p, cluster='cpu:1')) for p in ('dp', 'fsdp')]"
    )
    _run(code, XLA_FLAGS="--xla_force_host_platform_device_count=1")


@pytest.mark.slow
def test_double_precision():
    code = (
        "import jax, jax.numpy as jnp, lensjax; from tests.zoo import FAMILIES, widen; "
        "from tests.same_numbers import difference, assert_close\n"
        "for family, plan in (('mlp', 'dp=2,fsdp=4'), ('gpt_scan_remat_dropout', 'fsdp')):\n"
        "  made = FAMILIES[family].make(with_grads=True)\n"
        "  state, batch = widen(made.init(jax.random.key(0))), widen(made.batch(jax.random.key(1)))\n"
        "  _, expected = jax.jit(made.step)(state, batch)\n"
        "  _, mine = lensjax.parallelize(made.step, plan=plan, donate=False)(state, batch)\n"
        "  assert_close([difference(mine, expected)], 'float64', family)\n"
    )
    _run(code, JAX_ENABLE_X64="1")


def _run(code: str, **env: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


def test_dropout_masks_are_those_of_one_device():
    """The mask itself, bit for bit: a step that returns it, under every kind of batch split."""

    def step(params, batch, key):
        def loss(p):
            hidden = batch @ p
            mask = jax.random.bernoulli(jax.random.fold_in(key, 7), 0.5, hidden.shape)
            return (hidden * mask).mean(), mask

        (_, mask), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return params - 0.1 * grads, mask

    params = np.ones((16, 64), np.float32)
    batch = np.ones((16, 16), np.float32)
    for key in (jax.random.key(3), jax.random.PRNGKey(3)):
        expected = jax.jit(step)(params, batch, key)[1]
        for plan in ("dp", "fsdp", "dp=2,zero1=2,fsdp=2"):
            _, mask = lensjax.parallelize(step, plan=plan)(params, batch, key)
            np.testing.assert_array_equal(mask, expected)


def test_the_zoo_has_the_families_named_here():
    assert set(FIRST_SIX) <= set(FAMILIES)
