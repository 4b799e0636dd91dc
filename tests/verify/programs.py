"""Hand-sharded training steps, as people write them without a planner: a small decoder under the usual schemes.

One model, three ways to write it (scanned, unrolled, NNX) and two sets of names. A `Scheme` says how it is sharded;
faults (`faults.py`) are schemes with one thing wrong.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

SCANNED, UNROLLED, WIDTH, HEADS, HEAD, MLP, VOCAB, SEQ, BATCH = 4, 2, 256, 8, 32, 1024, 2048, 128, 32

PLAIN = {n: n for n in ("embed", "head", "norm", "q", "k", "v", "o", "up", "down", "norm1", "norm2")}
RENAMED = {n: f"w{i:02d}" for i, n in enumerate(sorted(PLAIN))}

SHAPES = {
    "q": (WIDTH, HEADS, HEAD), "k": (WIDTH, HEADS, HEAD), "v": (WIDTH, HEADS, HEAD), "o": (HEADS, HEAD, WIDTH),
    "up": (WIDTH, MLP), "down": (MLP, WIDTH), "norm1": (WIDTH,), "norm2": (WIDTH,),
    "embed": (VOCAB, WIDTH), "head": (WIDTH, VOCAB), "norm": (WIDTH,),
}  # fmt: skip
BLOCK = ("q", "k", "v", "o", "up", "down", "norm1", "norm2")

# How tensor parallelism splits each weight (None: not split), and the dimension that FSDP splits.
TENSOR = {"q": 1, "k": 1, "v": 1, "o": 0, "up": 1, "down": 0, "embed": 0, "head": 1}
FULLY = {"q": 0, "k": 0, "v": 0, "o": 2, "up": 0, "down": 1, "embed": 1, "head": 0}


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a step is sharded by hand.

    `shape`: devices along (data, model). `fsdp`/`tensor`: which mesh axes split the weights. `moments`: spec of an
    optimizer moment from the spec of its parameter. `pin`: activations constrained at layer boundaries. The rest are
    places where a fault can sit: each is a function of the value and the mesh.
    """

    shape: tuple[int, int] = (2, 4)
    fsdp: bool = True
    tensor: bool = True
    pin: bool = True
    donate: bool = True
    remat: Any = None
    moments: Callable[[str, P], P] | None = None
    override: Callable[[str, P], P] | None = None
    weight: Callable[..., Any] | None = None
    stack: Callable[..., Any] | None = None
    inside: Callable[..., Any] | None = None
    logits: Callable[..., Any] | None = None
    gradients: Callable[..., Any] | None = None
    batch_spec: Callable[..., Any] | None = None
    shapes: Any = None  # other sizes of weights
    devices: Callable[[np.ndarray], np.ndarray] | None = None
    sequence: bool = False  # activations between layers split along the sequence as well
    steps: int = 1  # micro-batches
    unroll: int = 1  # layers in one body of the scan


@dataclasses.dataclass(frozen=True)
class Program:
    """What `lint` takes: a jitted step and its arguments (shapes with shardings)."""

    step: Any
    arguments: tuple[Any, ...]
    mesh: Mesh


class Writer:
    """Builds the pieces of one program: specs, pins and weights at their use."""

    def __init__(self, scheme: Scheme, names: dict[str, str], axes: tuple[str, str]):
        self.s, self.names = scheme, names
        devices = np.array(jax.devices()[:8]).reshape(scheme.shape)
        if scheme.devices:
            devices = scheme.devices(np.array(jax.devices()[:8]))
        self.mesh = Mesh(devices, axes, axis_types=(AxisType.Auto,) * 2)
        self.data, self.model = axes
        self.shapes = {**SHAPES, **(scheme.shapes or {})}

    def spec(self, name: str) -> P:
        """How a weight is stored."""
        dims: list[Any] = [None] * len(self.shapes[name])
        if self.s.tensor and name in TENSOR:
            dims[TENSOR[name]] = self.model
        if self.s.fsdp and name in FULLY:
            at = FULLY[name]
            dims[at] = self.data if dims[at] is None else (dims[at], self.data)
        spec = P(*dims)
        return self.s.override(name, spec) if self.s.override else spec

    def use_spec(self, name: str) -> P:
        """How a weight is used: gathered over the data axis."""
        return P(*[self.model if d == self.model else None for d in self.spec(name)])

    def put(self, x: Any, *dims: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P(*dims)))

    def act(self, x: Any) -> Any:
        """An activation at a layer boundary."""
        if not self.s.pin:
            return x
        return self.put(x, self.data, self.model if self.s.sequence else None, None)

    def weight(self, name: str, w: Any) -> Any:
        """A weight at its use: in bfloat16, gathered; its gradient goes back to how it is stored."""
        if self.s.weight:
            return self.s.weight(self, name, w)
        if not self.s.pin:
            return w.astype(jnp.bfloat16)
        return self.gathered(name, w.astype(jnp.bfloat16))

    def gathered(self, name: str, w: Any) -> Any:
        used, stored = (NamedSharding(self.mesh, s) for s in (self.use_spec(name), self.spec(name)))

        @jax.custom_vjp
        def gather(w):
            return jax.lax.with_sharding_constraint(w, used)

        gather.defvjp(lambda w: (gather(w), None), lambda _, g: (jax.lax.with_sharding_constraint(g, stored),))
        return gather(w)


def norm(x: Any, scale: Any) -> Any:
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + 1e-6)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)


def block(wr: Writer, get: Callable[[str], Any], x: Any) -> Any:
    """One layer: [batch, seq, width] -> the same. `get(name)` gives a weight as it is stored."""
    w = {n: (wr.weight(n, get(n)) if n in TENSOR else get(n)) for n in BLOCK}
    h = norm(x, w["norm1"])
    q, k, v = (jnp.einsum("bsd,dhe->bshe", h, w[n]) for n in "qkv")
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / np.sqrt(HEAD)
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    scores = jax.nn.softmax(jnp.where(mask, scores, -1e9).astype(jnp.float32), axis=-1).astype(x.dtype)
    mixed = jnp.einsum("bhqk,bkhe->bqhe", scores, v)
    x = wr.act(x + jnp.einsum("bshe,hed->bsd", mixed, w["o"]))
    h = norm(x, w["norm2"])
    h = jax.nn.gelu(jnp.einsum("bsd,df->bsf", h, w["up"]))
    if wr.s.inside:
        h = wr.s.inside(wr, h)
    return wr.act(x + jnp.einsum("bsf,fd->bsd", h, w["down"]))


def ends(wr: Writer, get: Callable[[str], Any], tokens: Any, layers: Callable[[Any], Any]) -> Any:
    """Embedding, layers, loss."""
    x = wr.act(wr.weight("embed", get("embed"))[tokens])
    x = norm(layers(x), get("norm"))
    logits = jnp.einsum("bsd,dv->bsv", x, wr.weight("head", get("head")))
    logits = wr.put(logits, wr.data, None, wr.model if wr.s.tensor else None) if wr.s.pin else logits
    if wr.s.logits:
        logits = wr.s.logits(wr, logits)
    logits = logits.astype(jnp.float32)
    labels = jnp.roll(tokens, -1, axis=1)
    hot = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(logits * hot, axis=-1))


def _scan(wr: Writer, body: Callable, x: Any, weights: Any) -> Any:
    return jax.lax.scan(lambda x, w: (body(x, w), None), x, weights, unroll=wr.s.unroll)[0]


def _remat(wr: Writer, f: Callable) -> Callable:
    return wr.s.remat(f) if wr.s.remat else f


def _abstract(wr: Writer, shape: tuple[int, ...], spec: P, dtype: Any = jnp.float32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(wr.mesh, spec))


def _batch(wr: Writer) -> Any:
    spec = wr.s.batch_spec(wr) if wr.s.batch_spec else P(wr.data, None)
    return _abstract(wr, (BATCH, SEQ), spec, jnp.int32)


def mixture() -> Program:
    """A layer of experts, one or more on each device of the data axis: tokens travel to them and back."""
    wr = Writer(Scheme(shape=(8, 1)), PLAIN, ("data", "model"))
    tx = optax.sgd(1e-2, momentum=0.9)
    experts, capacity = 8, 64

    def loss(params, tokens):
        x = wr.act(jax.nn.one_hot(tokens, WIDTH, dtype=jnp.bfloat16))
        gate = jax.nn.softmax(jnp.einsum("bsd,de->bse", x, params["router"].astype(jnp.bfloat16)))
        choice = jnp.argmax(gate, axis=-1)
        place = jnp.cumsum(jax.nn.one_hot(choice, experts, dtype=jnp.int32), axis=1) - 1
        place = jnp.take_along_axis(place, choice[..., None], axis=-1)[..., 0]
        hot = jax.nn.one_hot(choice, experts, dtype=jnp.bfloat16)[..., None]
        send = hot * jax.nn.one_hot(place, capacity, dtype=jnp.bfloat16)[:, :, None, :]
        sent = wr.put(jnp.einsum("bsec,bsd->ebcd", send, x), wr.data, None, None, None)
        h = jax.nn.gelu(jnp.einsum("ebcd,edf->ebcf", sent, params["up"].astype(jnp.bfloat16)))
        back = wr.put(jnp.einsum("ebcf,efd->ebcd", h, params["down"].astype(jnp.bfloat16)), wr.data, None, None, None)
        back = wr.put(back, None, wr.data, None, None)
        y = jnp.einsum("ebcd,bsec->bsd", back, send)
        return jnp.mean(wr.act(y).astype(jnp.float32) ** 2)

    def step(state, tokens):
        value, grads = jax.value_and_grad(loss)(state["params"], tokens)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    params = {
        "router": _abstract(wr, (WIDTH, experts), P()),
        "up": _abstract(wr, (experts, WIDTH, MLP), P("data")),
        "down": _abstract(wr, (experts, MLP, WIDTH), P("data")),
    }
    return _finish(wr, step, {"params": params, "opt": _moments(wr, tx, params)}, _batch(wr))


def convolutions() -> Program:
    """A small convolutional classifier under data parallelism."""
    wr = Writer(Scheme(shape=(8, 1)), PLAIN, ("data", "model"))
    tx = optax.sgd(1e-2, momentum=0.9)

    def loss(params, images):
        x = images
        for name in ("one", "two"):
            x = jax.lax.conv_general_dilated(
                x, params[name], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            x = jax.nn.relu(x)
        return jnp.mean((x.mean((1, 2)) @ params["out"]) ** 2)

    def step(state, images):
        value, grads = jax.value_and_grad(loss)(state["params"], images)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    shapes = {"one": (3, 3, 16, 32), "two": (3, 3, 32, 64), "out": (64, 10)}
    params = {n: _abstract(wr, s, P()) for n, s in shapes.items()}
    images = _abstract(wr, (64, 32, 32, 16), P("data"))
    return _finish(wr, step, {"params": params, "opt": _moments(wr, tx, params)}, images)


def forward() -> Program:
    """An evaluation step: no state comes back, nothing is donated."""
    wr = Writer(Scheme(), PLAIN, ("data", "model"))

    def evaluate(params, tokens):
        def layers(x):
            return jax.lax.scan(lambda x, w: (block(wr, w.__getitem__, x), None), x, params["layers"])[0]

        return ends(wr, params.__getitem__, tokens, layers)

    params = {n: _abstract(wr, wr.shapes[n], wr.spec(n), jnp.bfloat16) for n in ("embed", "head", "norm")}
    params["layers"] = {n: _abstract(wr, (SCANNED, *wr.shapes[n]), P(None, *wr.spec(n)), jnp.bfloat16) for n in BLOCK}
    return Program(jax.jit(evaluate), (params, _batch(wr)), wr.mesh)


def _finish(wr: Writer, step: Callable, state: Any, tokens: Any) -> Program:
    out = (jax.tree.map(lambda x: x.sharding, state), None)
    jitted = jax.jit(step, donate_argnums=(0,) if wr.s.donate else (), out_shardings=out)
    return Program(jitted, (state, tokens), wr.mesh)


def plain(scheme: Scheme, *, scan: bool = True, names: dict[str, str] = PLAIN, axes=("data", "model")) -> Program:
    """A step over a dict of arrays with optax, layers scanned or unrolled."""
    wr = Writer(scheme, names, axes)
    tx = optax.adamw(1e-3)

    def loss(params, tokens):
        stack = params["layers"]
        if wr.s.stack:
            stack = {k: wr.s.stack(wr, k, v) for k, v in stack.items()}

        def layers(x):
            body = _remat(wr, lambda x, w: block(wr, lambda n: w[names[n]], x))
            if scan:
                return jax.lax.scan(lambda x, w: (body(x, w), None), x, stack, unroll=wr.s.unroll)[0]
            for i in range(UNROLLED):
                x = body(x, {k: v[i] for k, v in stack.items()})
            return x

        return ends(wr, lambda n: params[names[n]], tokens, layers)

    def step(state, tokens):
        value, grads = _accumulate(wr, loss, state["params"], tokens)
        if wr.s.gradients:
            grads = jax.tree_util.tree_map_with_path(lambda p, g: wr.s.gradients(wr, p, g), grads)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

    params = {names[n]: _abstract(wr, wr.shapes[n], wr.spec(n)) for n in ("embed", "head", "norm")}
    params["layers"] = {
        names[n]: _abstract(wr, (SCANNED if scan else UNROLLED, *wr.shapes[n]), P(None, *wr.spec(n))) for n in BLOCK
    }
    return _finish(wr, step, {"params": params, "opt": _moments(wr, tx, params)}, _batch(wr))


def _accumulate(wr: Writer, loss: Callable, params: Any, tokens: Any) -> Any:
    if wr.s.steps == 1:
        return jax.value_and_grad(loss)(params, tokens)
    parts = wr.put(tokens.reshape(-1, wr.s.steps, SEQ).swapaxes(0, 1), None, wr.data, None)

    def one(total, part):
        value, grads = jax.value_and_grad(loss)(params, part)
        return jax.tree.map(jnp.add, total, (value, grads)), None

    zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
    total, _ = jax.lax.scan(one, zero, parts)
    return jax.tree.map(lambda x: x / wr.s.steps, total)


def _moments(wr: Writer, tx: Any, params: Any) -> Any:
    """Abstract optimizer state: moments sharded as their parameters, or as the scheme says."""

    def one(path, x):
        for keys, p in jax.tree_util.tree_flatten_with_path(params)[0]:
            if tuple(path[-len(keys) :]) == tuple(keys) and p.shape == x.shape:
                spec = p.sharding.spec
                spec = wr.s.moments(keys[-1].key, spec) if wr.s.moments else spec
                return _abstract(wr, x.shape, spec, x.dtype)
        return _abstract(wr, x.shape, P(), x.dtype)

    return jax.tree_util.tree_map_with_path(one, jax.eval_shape(tx.init, params))


class _Block(nnx.Module):
    def __init__(self, wr: Writer, names: dict[str, str], stacked: tuple[int, ...] = ()):
        for n in BLOCK:
            setattr(self, names[n], nnx.Param(jnp.zeros((*stacked, *wr.shapes[n]))))


class _Decoder(nnx.Module):
    def __init__(self, wr: Writer, names: dict[str, str], scan: bool):
        for n in ("embed", "head", "norm"):
            setattr(self, names[n], nnx.Param(jnp.zeros(wr.shapes[n])))
        stacks = [(SCANNED,)] if scan else [()] * UNROLLED
        self.layers = nnx.List([_Block(wr, names, stack) for stack in stacks])


def in_nnx(scheme: Scheme, *, scan: bool = False, names: dict[str, str] = PLAIN, axes=("data", "model")) -> Program:
    """The same step with Flax NNX modules and optimizer; layers unrolled, or one module of stacked weights scanned."""
    wr = Writer(scheme, names, axes)
    back = {v: k for k, v in names.items()}

    def make():
        model = _Decoder(wr, names, scan)
        return nnx.split((model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)))

    graph, state = nnx.eval_shape(make)

    def loss(model, tokens):
        def layers(x):
            for layer in model.layers:
                weights = {n: getattr(layer, names[n])[...] for n in BLOCK}
                if wr.s.stack:
                    weights = {k: wr.s.stack(wr, k, v) for k, v in weights.items()}
                body = _remat(wr, lambda x, w: block(wr, w.__getitem__, x))
                if scan:
                    return _scan(wr, body, x, weights)
                x = body(x, weights)
            return x

        return ends(wr, lambda n: getattr(model, names[n])[...], tokens, layers)

    def step(state, tokens):
        model, optimizer = nnx.merge(graph, state)
        value, grads = nnx.value_and_grad(loss)(model, tokens)
        if wr.s.gradients:
            grads = jax.tree_util.tree_map_with_path(lambda p, g: wr.s.gradients(wr, p, g), grads)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), value

    def placed(path, x):
        words = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", "")))) for k in path]
        name = next(
            (
                back[w]
                for w in reversed(words)
                if w in back and x.shape[-len(wr.shapes[back[w]]) :] == wr.shapes[back[w]]
            ),
            None,
        )
        spec = wr.spec(name) if name else P()
        if name and len(x.shape) > len(wr.shapes[name]):
            spec = P(None, *spec)
        if name and wr.s.moments and ("mu" in words or "nu" in words or "opt_state" in words):
            spec = wr.s.moments(name, spec)
        return _abstract(wr, x.shape, spec, x.dtype)

    return _finish(wr, step, jax.tree_util.tree_map_with_path(placed, state), _batch(wr))
