"""The built-in targets beside the decoders: published sizes, and steps that run."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lensjax import LensjaxError
from lensjax.models import more
from lensjax.models.targets import names, target

# Parameters as published, in billions, and how near the module comes.
PUBLISHED = {
    "mixtral-8x7b": (46.7, 0.01),  # arXiv:2401.04088, section 2: 47B
    "deepseek-v3": (671.0, 0.01),  # arXiv:2412.19437, section 4.2, without the multi-token prediction module
    "t5-11b": (11.3, 0.02),  # google-research/text-to-text-transfer-transformer: 11,307 M
    "vit-g": (1.01, 0.03),  # arXiv:2106.04560, table 2: 1,011 M with its head
    "wide-resnet-250m": (0.25, 0.1),  # arXiv:2201.12023, table 6 (rounded there)
    "wide-resnet-1b": (1.0, 0.1),
    "wide-resnet-13b": (13.0, 0.1),
    "unet-sd": (0.86, 0.03),  # CompVis/stable-diffusion: 860 M
    "dlrm": (24.0, 0.01),  # 187.8 M rows x 128 columns, and 2.4 M in the MLPs
}
TINY = [n for n in more.NAMES if n.endswith("-tiny")]


def shape_of(name):
    return target(name, 8, 16 if more.NAMES[name].sequence else None)


@pytest.mark.few(4)
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name):
    state = shape_of(name).state
    count = sum(x.size for x in jax.tree.leaves(state.params)) / 1e9
    published, tolerance = PUBLISHED[name]
    assert count == pytest.approx(published, rel=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_small_one_learns(name):
    """Loss is finite and falls when the same batch is seen again: gradients reach what they should."""
    kind = more.NAMES[name]
    module = __import__(f"lensjax.models.{kind.module}", fromlist=["_"])
    import optax

    config = module.CONFIGS[name]
    state = module.create_state(config, jax.random.key(0), optax.adam(3e-3))
    batch = {}
    for i, (k, v) in enumerate(kind.batch(config, 4, 16 if kind.sequence else None).items()):
        rng = jax.random.key(i)
        whole = jnp.issubdtype(v.dtype, jnp.integer)
        batch[k] = jax.random.randint(rng, v.shape, 0, 16) if whole else jax.random.uniform(rng, v.shape)
    step, losses = jax.jit(module.train_step), []
    for _ in range(4):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all() and losses[-1] < losses[0]


def test_a_sequence_is_asked_for_where_there_is_one():
    with pytest.raises(LensjaxError, match="mixtral-8x7b needs --seq"):
        target("mixtral-8x7b", 8)
    with pytest.raises(LensjaxError, match="vit-g has no sequence"):
        target("vit-g", 8, 128)
    with pytest.raises(LensjaxError, match="cannot change vit-g"):
        target("vit-g", 8, depth=3)
    assert {"dlrm", "t5-11b", "llama3-8b"} <= set(names())
