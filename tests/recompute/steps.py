"""Small steps of every shape that a backward pass takes: `STEPS[name]() -> (step, parameters, batch)`.

Each step returns its gradients, so that what is compared are gradients, and is wide enough that a layer is worth
recomputing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

WIDTH, ROWS, LAYERS = 16, 32, 4


def _weights(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape) * 0.3, jnp.float32)


def _batch():
    return jnp.asarray(np.random.default_rng(7).normal(size=(ROWS, WIDTH)), jnp.float32)


def _layer(w, x, name="hidden"):
    h = jnp.tanh(x @ w["up"])
    h = checkpoint_name(h, name)
    return x + jnp.sin(h @ w["down"]) * jnp.cos(x)


def _layers():
    return {f"layer_{i}": {"up": _weights(WIDTH, 2 * WIDTH), "down": _weights(2 * WIDTH, WIDTH)} for i in range(LAYERS)}


def _stack():
    return {"up": _weights(LAYERS, WIDTH, 2 * WIDTH), "down": _weights(LAYERS, 2 * WIDTH, WIDTH)}


def _step(loss):
    """params, batch -> (next params, {loss, grads}), with plain gradient descent."""

    def step(params, batch):
        value, grads = jax.value_and_grad(loss)(params, batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": value, "grads": grads}

    return step


def unrolled():
    def loss(params, x):
        for i in range(LAYERS):
            x = _layer(params[f"layer_{i}"], x)
        return jnp.mean((x @ params["head"]) ** 2)

    return _step(loss), {**_layers(), "head": _weights(WIDTH, 4)}, _batch()


def scanned():
    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (_layer(w, x), None), x, params["layers"])
        return jnp.mean((x @ params["head"]) ** 2)

    return _step(loss), {"layers": _stack(), "head": _weights(WIDTH, 4)}, _batch()


def scanned_backwards():
    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (_layer(w, x), None), x, params["layers"], reverse=True)
        return jnp.mean(x**2)

    return _step(loss), {"layers": _stack()}, _batch()


def scanned_with_results():
    """The scan has results of its own (an auxiliary loss), and a mask that is made of nothing."""

    def loss(params, x):
        mask = jnp.where(jnp.arange(x.shape[0])[:, None] < jnp.arange(WIDTH)[None], 0.5, 1.0)

        def body(x, w):
            y = _layer(w, x * mask)
            return y, jnp.mean(y**2)

        x, extra = jax.lax.scan(body, x, params["layers"])
        return jnp.mean(x**2) + 0.1 * extra.sum()

    return _step(loss), {"layers": _stack()}, _batch()


def nested_scans():
    def loss(params, x):
        def group(x, ws):
            return jax.lax.scan(lambda x, w: (_layer(w, x), None), x, ws)[0], None

        ws = jax.tree.map(lambda w: w.reshape(2, LAYERS // 2, *w.shape[1:]), params["layers"])
        x, _ = jax.lax.scan(group, x, ws)
        return jnp.mean(x**2)

    return _step(loss), {"layers": _stack()}, _batch()


def accumulated():
    """Gradients summed over micro-batches in a loop, with layers written out in its body."""

    def loss(params, x):
        for i in range(LAYERS):
            x = _layer(params[f"layer_{i}"], x)
        return jnp.mean((x @ params["head"]) ** 2)

    def step(params, batch):
        def one(total, part):
            value, grads = jax.value_and_grad(loss)(params, part)
            return jax.tree.map(jnp.add, total, grads), value

        zero = jax.tree.map(jnp.zeros_like, params)
        grads, values = jax.lax.scan(one, zero, batch.reshape(2, batch.shape[0] // 2, WIDTH))
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": values.mean(), "grads": grads}

    return step, {**_layers(), "head": _weights(WIDTH, 4)}, _batch()


def shared():
    """One block several times."""

    def loss(params, x):
        for _ in range(LAYERS):
            x = _layer(params["block"], x)
        return jnp.mean((x @ params["head"]) ** 2)

    return _step(loss), {"block": _layers()["layer_0"], "head": _weights(WIDTH, 4)}, _batch()


def skips():
    """Long skips, as in a U-Net: the first layer's result is read by the last."""

    def loss(params, x):
        held = []
        for i in range(LAYERS):
            x = _layer(params[f"layer_{i}"], x + (held.pop() if i >= LAYERS // 2 else 0.0))
            if i < LAYERS // 2:
                held.append(x)
        return jnp.mean((x @ params["head"]) ** 2)

    return _step(loss), {**_layers(), "head": _weights(WIDTH, 4)}, _batch()


def jitted():
    step, params, batch = unrolled()
    return jax.jit(step), params, batch


def checkpointed():
    """The user's own remat, which stays as it is."""

    def loss(params, x):
        for i in range(LAYERS):
            x = jax.checkpoint(_layer)(params[f"layer_{i}"], x)
        return jnp.mean((x @ params["head"]) ** 2)

    return _step(loss), {**_layers(), "head": _weights(WIDTH, 4)}, _batch()


@jax.custom_vjp
def _kernel(x):
    return jnp.tanh(x)


_kernel.defvjp(lambda x: (jnp.tanh(x), (x, jnp.tanh(x))), lambda res, g: (g * (1 - res[1] ** 2) + 0.0 * res[0],))


def custom_backward():
    def loss(params, x):
        for i in range(LAYERS):
            x = x + _kernel(_layer(params[f"layer_{i}"], x))
        return jnp.mean((x @ params["head"]) ** 2)

    return _step(loss), {**_layers(), "head": _weights(WIDTH, 4)}, _batch()


def two_networks():
    """A game: one network is updated, then the other against it; two backward passes in one step."""

    def forward(layers, x):
        for i in range(LAYERS):
            x = _layer(layers[f"layer_{i}"], x)
        return x

    def step(params, batch):
        first = lambda p: jnp.mean((forward(p, batch) - 1.0) ** 2)
        value, grads = jax.value_and_grad(first)(params["one"])
        one = jax.tree.map(lambda p, g: p - 0.1 * g, params["one"], grads)
        second = lambda p: jnp.mean(forward(one, forward(p, batch)) ** 2)
        value2, grads2 = jax.value_and_grad(second)(params["two"])
        two = jax.tree.map(lambda p, g: p - 0.1 * g, params["two"], grads2)
        return {"one": one, "two": two}, {"loss": value + value2, "grads": {"one": grads, "two": grads2}}

    return step, {"one": _layers(), "two": _layers()}, _batch()


def branches():
    """A cond in every layer, and a while loop before the layers."""

    def loss(params, x):
        x = jax.lax.stop_gradient(jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] * 0.9), (0, x))[1])
        for i in range(LAYERS):
            w = params[f"layer_{i}"]
            x = jax.lax.cond(x.sum() > 0, lambda x, w=w: _layer(w, x), lambda x, w=w: x - _layer(w, x), x)
        return jnp.mean((x @ params["head"]) ** 2)

    return _step(loss), {**_layers(), "head": _weights(WIDTH, 4)}, _batch()


def random():
    """Dropout in every layer."""

    def loss(params, x):
        key = jax.random.key(3)
        for i in range(LAYERS):
            kept = jax.random.bernoulli(jax.random.fold_in(key, i), 0.8, x.shape)
            x = jnp.where(kept, _layer(params[f"layer_{i}"], x), 0.0)
        return jnp.mean((x @ params["head"]) ** 2)

    return _step(loss), {**_layers(), "head": _weights(WIDTH, 4)}, _batch()


def by_hand():
    """A backward that the user wrote: no equation is named by JAX."""

    def step(params, x):
        xs, hs = [x], []
        for i in range(LAYERS):
            hs.append(jnp.tanh(xs[-1] @ params[f"layer_{i}"]["up"]))
            xs.append(hs[-1] @ params[f"layer_{i}"]["down"])
        g, grads = 2 * xs[-1] / xs[-1].size, {}
        for i in reversed(range(LAYERS)):
            w = params[f"layer_{i}"]
            h = (g @ w["down"].T) * (1 - hs[i] ** 2)
            grads[f"layer_{i}"] = {"down": hs[i].T @ g, "up": xs[i].T @ h}
            g = h @ w["up"].T
        loss = jnp.mean(xs[-1] ** 2)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss, "grads": grads}

    return step, _layers(), _batch()


STEPS = {
    f.__name__: f
    for f in (
        unrolled, scanned, scanned_backwards, scanned_with_results, nested_scans, accumulated, shared, skips, jitted,
        checkpointed, custom_backward, two_networks, branches, random, by_hand,
    )
}  # fmt: skip
