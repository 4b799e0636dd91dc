"""Layers of unrolled code: found by structure, in linen, NNX and plain JAX, forward and backward."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from lensjax import _jax
from lensjax.program.edit import is_var
from lensjax.program.program import analyze
from lensjax.program.unrolled import body_of, inputs, outputs

WIDTH, ROWS = 16, 12


class Block(nn.Module):
    wide: int = 2
    dropout: float = 0.0

    @nn.compact
    def __call__(self, x):
        h = nn.Dense(self.wide * WIDTH)(nn.LayerNorm()(x))
        h = nn.Dropout(self.dropout, deterministic=False)(h)
        return x + nn.Dense(WIDTH)(nn.gelu(h))


class Model(nn.Module):
    """`wides[i]`: how much wider than the stream block i is inside."""

    wides: tuple[int, ...]
    remat: bool = False
    dropout: float = 0.0
    shared: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(WIDTH, name="first")(x)
        block = nn.remat(Block) if self.remat else Block
        one = Block(name="block") if self.shared else None
        for i, wide in enumerate(self.wides):
            x = one(x) if one is not None else block(wide, self.dropout, name=f"block_{i}")(x)
        return nn.Dense(3, name="last")(nn.LayerNorm()(x))


def linen(model, tx=None):
    tx = tx or optax.adam(1e-3)
    x, y = jnp.zeros((ROWS, 5)), jnp.zeros((ROWS, 3))
    params = jax.eval_shape(lambda: model.init(jax.random.key(0), x))["params"]
    opt = jax.eval_shape(tx.init, params)

    def step(params, opt, key, batch):
        def loss(p):
            out = model.apply({"params": p}, batch[0], rngs={"dropout": key})
            return jnp.mean((out - batch[1]) ** 2)

        grads = jax.grad(loss)(params)
        updates, new = tx.update(grads, opt, params)
        return optax.apply_updates(params, updates), new

    return analyze(step, (params, opt, jax.random.key(1), (x, y)))


def names(stack):
    return [r.name.rpartition("/")[2] for r in stack.repeats]


def check(program, stack):
    """What the account promises, for any stack: equal operations on equal shapes, disjoint spans, every repeat fed by
    the one before, inputs and outputs in step, the backward in the opposite order."""
    body = body_of(program.jaxpr, stack.body)
    seen = set()
    for side in ("forward", "backward"):
        spans = [getattr(r, side) for r in stack.repeats if getattr(r, side)]
        if not spans:
            continue
        assert len({len(s) for s in spans}) == 1
        assert not seen & {i for s in spans for i in s} and len({i for s in spans for i in s}) == sum(map(len, spans))
        seen |= {i for s in spans for i in s}
        for span in spans:
            for i, j in zip(spans[0], span):
                a, b = body.eqns[i], body.eqns[j]
                assert a.primitive is b.primitive and [v.aval for v in a.outvars] == [v.aval for v in b.outvars]
                assert stack.first(j) == i
        ins, outs = inputs(body, spans), outputs(body, spans)
        assert len({len(x) for x in ins}) == 1 and len({len(x) for x in outs}) == 1
        for one, two in itertools.pairwise(ins):
            assert [v.aval for v in one if v is not None] and all(
                a.aval == b.aval for a, b in zip(one, two) if a is not None and b is not None
            )
        order = range(len(spans)) if side == "forward" else range(len(spans) - 1, -1, -1)
        for r, following in itertools.pairwise(order):
            assert set(map(id, outs[r])) & set(map(id, ins[following])), (stack.name, side, r)
    first = [r.backward.start for r in stack.repeats if r.backward]
    assert first == sorted(first, reverse=True)
    for r in stack.repeats:
        assert all(program.arguments[i].role == "parameter" for i in r.parameters)


def repeats_replayed(program, stack, values):
    """The program evaluated with every repeat computed by the equations of the first one."""
    body = body_of(program.jaxpr, ())
    env = dict(zip(body.invars, values))
    role = {}
    for side in ("forward", "backward"):
        spans = [getattr(r, side) for r in stack.repeats if getattr(r, side)]
        role.update((j, i) for s in spans for i, j in zip(spans[0], s))
    read = lambda a: env[a] if is_var(a) else a.val
    for i, eqn in enumerate(body.eqns):
        like = body.eqns[role.get(i, i)]
        out = like.primitive.bind(*[read(a) for a in eqn.invars], **like.params)
        env.update(zip(eqn.outvars, out if like.primitive.multiple_results else [out]))
    return [read(a) for a in body.outvars]


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_equal_blocks_are_layers_forward_and_backward(count):
    program = linen(Model((2,) * count))
    (stack,) = program.unrolled
    check(program, stack)
    assert stack.name == "params/block_*" and names(stack) == [f"block_{i}" for i in range(count)]
    for r in stack.repeats:
        assert r.forward and r.backward and len(r.parameters) == 6
        assert {program.arguments[i].path.split("/")[1] for i in r.parameters} == {r.name.rpartition("/")[2]}


@pytest.mark.slow
def test_every_second_block_differs():
    program = linen(Model((2, 3) * 4))
    (stack,) = program.unrolled
    check(program, stack)
    assert stack.count == 4 and all(len(r.parameters) == 12 and r.backward for r in stack.repeats)
    kernels = [
        {program.arguments[i].shape for i in r.parameters if len(program.arguments[i].shape) == 2}
        for r in stack.repeats
    ]
    assert all(k == kernels[0] and len(k) == 4 for k in kernels)


@pytest.mark.few(1)
@pytest.mark.parametrize("wides, equal", [((3, 2, 2, 2), [1, 2, 3]), ((2, 2, 2, 3), [0, 1, 2]), ((4, 2, 2, 3), [1, 2])])
def test_a_first_or_last_block_that_differs_stands_outside(wides, equal):
    program = linen(Model(wides))
    (stack,) = program.unrolled
    check(program, stack)
    assert names(stack) == [f"block_{i}" for i in equal] and all(r.backward for r in stack.repeats)


@pytest.mark.slow
def test_two_kinds_of_blocks_in_a_row_are_two_stacks():
    program = linen(Model((2, 2, 2, 3, 3, 3)))
    assert [names(s) for s in program.unrolled] == [[f"block_{i}" for i in k] for k in ((0, 1, 2), (3, 4, 5))]
    for stack in program.unrolled:
        check(program, stack)
        assert all(r.backward for r in stack.repeats)


def test_no_layers_where_nothing_repeats():
    assert linen(Model((2,))).unrolled == () and linen(Model((2, 3, 4))).unrolled == ()


def test_blocks_with_dropout_differ_in_their_seeds_only():
    program = linen(Model((2,) * 3, dropout=0.1))
    (stack,) = program.unrolled
    check(program, stack)
    assert stack.count == 3 and all(r.backward for r in stack.repeats)


@pytest.mark.slow
def test_blocks_under_remat():
    program = linen(Model((2,) * 4, remat=True))
    (stack,) = program.unrolled
    check(program, stack)
    assert names(stack) == [f"block_{i}" for i in range(4)] and all(r.backward for r in stack.repeats)


@pytest.mark.slow
def test_one_block_applied_several_times():
    program = linen(Model((2,) * 4, shared=True))
    (stack,) = program.unrolled
    check(program, stack)
    # The last application (the first backward) starts the sums of the gradients that the others add to.
    assert stack.count == 4 and [bool(r.backward) for r in stack.repeats] == [True, True, True, False]
    assert not any(r.parameters for r in stack.repeats) and len({r.name for r in stack.repeats}) == 4


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 32, rngs=rngs), nnx.Linear(32, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class NnxModel(nnx.Module):
    def __init__(self, count, rngs):
        self.first = nnx.Linear(5, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(count)])
        self.last = nnx.Linear(WIDTH, 3, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def test_nnx_which_records_no_names():
    graph, state = nnx.split(NnxModel(4, nnx.Rngs(0)))

    def step(state, batch):
        def loss(state):
            return jnp.mean((nnx.merge(graph, state)(batch[0]) - batch[1]) ** 2)

        return jax.tree.map(lambda p, g: p - 0.1 * g, state, jax.grad(loss)(state))

    program = analyze(step, (state, (jnp.zeros((ROWS, 5)), jnp.zeros((ROWS, 3)))))
    (stack,) = program.unrolled
    check(program, stack)
    assert stack.count == 4
    assert [r.name.split("/")[-1] for r in stack.repeats] == ["0", "1", "2", "3"] and "blocks" in stack.name
    assert all(r.backward and len(r.parameters) == 6 for r in stack.repeats)


def plain(depth, accumulate=0):
    def init(key):
        keys = jax.random.split(key, depth)
        return [{"w": jax.random.normal(k, (WIDTH, WIDTH)) / 4, "b": jnp.zeros(WIDTH)} for k in keys]

    def loss(params, x):
        for p in params:
            x = x + jnp.tanh(x @ p["w"] + p["b"])
        return (x**2).mean()

    def step(params, x):
        if accumulate:
            parts = x.reshape(-1, accumulate, WIDTH).swapaxes(0, 1)
            add = lambda total, part: (jax.tree.map(jnp.add, total, jax.grad(loss)(params, part)), None)
            grads, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
        else:
            grads = jax.grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    return step, init(jax.random.key(0)), jax.random.normal(jax.random.key(1), (ROWS, WIDTH))


@pytest.mark.slow
def test_plain_jax_and_the_repeats_really_compute_alike():
    step, params, x = plain(5)
    program = analyze(step, (params, x))
    (stack,) = program.unrolled
    check(program, stack)
    assert [r.name for r in stack.repeats] == [f"params/{i}" for i in range(5)]
    got = repeats_replayed(program, stack, [*jax.tree.leaves(params), x])
    for a, b in zip(got, jax.tree.leaves(step(params, x)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_layers_inside_an_accumulation_loop():
    step, params, x = plain(4, accumulate=3)
    program = analyze(step, (params, x))
    (stack,) = program.unrolled
    check(program, stack)
    ((i, k),) = stack.body
    assert _jax.open_jaxpr(program.jaxpr).eqns[i].primitive.name == "scan" and k == 0
    # Nobody asks for the gradient of the input: the backward of the first layer is shorter than the others.
    assert [bool(r.backward) for r in stack.repeats] == [False, True, True, True]
    assert all(len(r.parameters) == 2 for r in stack.repeats)


def test_siblings_are_not_layers():
    """Projections of one value and per-leaf optimizer arithmetic repeat, but are not one after the other."""

    def step(params, x):
        def loss(p):
            q, k, v = (jnp.tanh(x @ p[n]) for n in "qkv")
            return (q * k * v).mean()

        return jax.tree.map(lambda p, g: p - 0.1 * g / (1 + jnp.abs(g)), params, jax.grad(loss)(params))

    params = {n: jnp.ones((WIDTH, WIDTH)) for n in "qkv"}
    assert analyze(step, (params, jnp.ones((ROWS, WIDTH)))).unrolled == ()
