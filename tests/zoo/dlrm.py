"""DLRM (arXiv:1906.00091): two embedding tables, pairwise interactions; a plain dict of state, an optimizer a part."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

from tests.zoo.base import Case, Family, probe

ROWS, DENSE, WIDTH, TABLES = 32, 12, 16, (512, 200)  # 200 = 8 * 25


class DLRM(nn.Module):
    @nn.compact
    def __call__(self, dense, sparse):
        vectors = [nn.relu(nn.Dense(WIDTH, name="bottom")(dense))]
        for i, size in enumerate(TABLES):
            vectors.append(nn.Embed(size, WIDTH, name=f"table_{i}")(sparse[:, i]))
        stacked = jnp.stack(vectors, axis=1)
        pairs = jnp.einsum("bif,bjf->bij", stacked, stacked)
        upper = jnp.triu_indices(len(vectors), k=1)
        features = jnp.concatenate([vectors[0], pairs[:, upper[0], upper[1]]], axis=-1)
        return nn.Dense(1, name="click")(nn.relu(nn.Dense(40, name="top")(features)))[:, 0]


def make(with_grads=False):
    model, note = DLRM(), probe(with_grads)

    def labels(params):
        return {name: "tables" if name.startswith("table") else "dense" for name in params}

    tx = optax.multi_transform({"tables": optax.sgd(0.5), "dense": optax.adamw(1e-3)}, labels)

    def init(rng):
        params = model.init(rng, jnp.zeros((1, DENSE)), jnp.zeros((1, len(TABLES)), jnp.int32))["params"]
        return {"params": params, "opt_state": tx.init(params), "step": jnp.zeros((), jnp.int32)}

    def batch(rng):
        kd, ks, ky = jax.random.split(rng, 3)
        skewed = jax.random.uniform(ks, (ROWS, len(TABLES))) ** 3  # some rows of a table are hit often
        return {
            "dense": jax.random.normal(kd, (ROWS, DENSE)),
            "sparse": (skewed * jnp.array(TABLES)).astype(jnp.int32),
            "clicked": jax.random.bernoulli(ky, 0.3, (ROWS,)),
        }

    def step(state, batch):
        def loss_fn(params):
            logits = model.apply({"params": params}, batch["dense"], batch["sparse"])
            return optax.sigmoid_binary_cross_entropy(logits, batch["clicked"].astype(logits.dtype)).mean()

        loss, grads = jax.value_and_grad(loss_fn)(state["params"])
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        state = {"params": params, "opt_state": opt_state, "step": state["step"] + 1}
        return state, note({"loss": loss}, grads)

    return Case(step, init, batch)


FAMILY = Family(
    "dlrm", make, "multi_transform of sgd and adamw", "two tables of different sizes; state is a plain dict"
)
