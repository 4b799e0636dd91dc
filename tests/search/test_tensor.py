"""Column and row are found from logical axes: what tensor parallelism splits, in programs that name nothing."""

import jax
import jax.numpy as jnp
import pytest

from lensjax import Cluster, PlanError
from lensjax.cost.price import price
from lensjax.models.targets import target
from lensjax.program.program import analyze
from lensjax.search.presets import preset
from lensjax.search.tensor import expert_axes, tensor_axes
from tests.zoo import FAMILIES


def decoder(**changes):
    step, state, batch = target("llama3-tiny", 16, 32, **changes)
    return analyze(step, (state, batch))


def family(name):
    made = FAMILIES[name].make()
    state, batch = jax.eval_shape(made.init, jax.random.key(0)), jax.eval_shape(made.batch, jax.random.key(1))
    return analyze(made.step, (state, batch))


@pytest.mark.few(1)
@pytest.mark.parametrize("scan", [True, False])
def test_a_decoder_is_split_as_megatron_splits_it(scan):
    """Heads, hidden and vocabulary; never the residual stream, the head's inner dimension or the layer index."""
    leaves = preset("tp=4", decoder(scan=scan), 8).leaves
    split = {
        path.rsplit("/", 3)[-2] + "/" + path.rsplit("/", 3)[-1]: spec
        for path, spec in leaves.items()
        if "/params/" in path
    }
    stack = ((),) if scan else ()
    assert split["gate/kernel"] == split["up/kernel"] == (*stack, (), ("tp",))
    assert split["down/kernel"] == (*stack, ("tp",), ())
    assert split["query/kernel"] == split["key/kernel"] == split["value/kernel"] == (*stack, (), ("tp",), ())
    assert split["out/kernel"] == (*stack, ("tp",), (), ())
    assert split["embed/embedding"] == (("tp",), ())
    assert split["head/kernel"] == ((), ("tp",))
    assert not any("norm" in path for path in leaves)


@pytest.mark.parametrize("changes", [{}, {"width": 768, "heads": 12, "kv_heads": 12, "mlp": 3072, "vocab": 50_257}])
def test_the_residual_stream_is_not_split_whatever_else_is_not(changes):
    """A table of positions, a vocabulary that does not divide: what is left whole for it is small beside what splitting
    the stream of every layer would send."""
    step, state, batch = target("gpt3-tiny", 16, 32, **changes)
    leaves = preset("tp=4", analyze(step, (state, batch)), 8).leaves
    split = {path.removeprefix("state/params/layers/"): spec for path, spec in leaves.items() if "layers" in path}
    assert split["attention/query/kernel"] == ((), (), ("tp",), ()) and split["attention/out/kernel"][1] == ("tp",)
    assert split["mlp/up/kernel"] == ((), (), ("tp",)) and split["mlp/down/kernel"] == ((), ("tp",), ())
    assert ("state/params/embed/embedding" in leaves) == ("vocab" not in changes)
    assert "state/params/positions" not in leaves


def test_an_mlp_alternates_column_and_row():
    def step(params, x):
        def loss(p):
            h = x
            for i in range(4):
                h = jnp.tanh(h @ p[f"w{i}"])
            return h.mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    sizes = [32, 64, 128, 64, 32]
    params = {f"w{i}": jnp.ones((sizes[i], sizes[i + 1])) for i in range(4)}
    leaves = preset("tp=4", analyze(step, (params, jnp.ones((16, 32)))), 8).leaves
    assert leaves["params/w0"] == ((), ("tp",)) and leaves["params/w1"] == (("tp",), ())
    assert leaves["params/w2"] == ((), ("tp",)) and leaves["params/w3"] == (("tp",), ())


def test_experts_are_the_axis_that_selects_a_weight():
    program = family("moe_dense")
    axes = expert_axes(program)
    leaves = preset("ep=4", program, 8).leaves
    assert any(("ep",) in spec for spec in leaves.values())
    assert axes and not axes & set(tensor_axes(program, 2).axes)


def test_a_router_stays_whole_beside_matmuls_that_pay():
    """Its scores are wanted whole, and its input's gradient would be summed in every layer, to save next to nothing."""

    def step(params, x):
        def loss(p):
            h = x * p["scale"]
            scores, _ = jax.lax.top_k(jax.nn.softmax(h @ p["router"]), 2)
            return ((jnp.tanh(h @ p["up"]) @ p["down"]) * scores.sum(-1, keepdims=True)).mean()

        return jax.tree.map(lambda p, g: p - g, params, jax.grad(loss)(params))

    shape = jax.ShapeDtypeStruct
    params = {"router": shape((512, 8), jnp.float32), "up": shape((512, 8192), jnp.float32)}
    params |= {"down": shape((8192, 512), jnp.float32), "scale": shape((512,), jnp.float32)}
    program = analyze(step, (params, shape((4096, 512), jnp.float32)))
    leaves = preset("tp=4", program, 8).leaves
    assert leaves == {"params/up": ((), ("tp",)), "params/down": (("tp",), ())}
    assert any("next to none of the weights" in why for why in tensor_axes(program, 4).reasons.values())


@pytest.mark.parametrize(
    "text, message",
    [
        ("ep=4", "no matmul selects a weight by an axis"),
        ("tp=7,dp=1", "multiple of 7"),
        ("hsdp=2,fsdp=4", "two names of one way to split"),
        ("tp=2,tp_sp=4", "two names of one way to split"),
    ],
)
def test_what_cannot_apply_says_why(text, message):
    with pytest.raises(PlanError, match=message):
        preset(text, family("mlp"), 8)


def test_no_axis_that_divides_lists_the_reasons():
    def step(p, x):
        return p - jax.grad(lambda p: (x @ p).mean())(p)

    with pytest.raises(
        PlanError, match=r"no logical axis of the weights can be split in 4: .*its size 6 does not divide"
    ):
        preset("tp=4", analyze(step, (jnp.ones((5, 6)), jnp.ones((16, 5)))), 8)


def test_a_weight_that_nothing_multiplies_is_named_so():
    """A table that is only added: there is no better axis beside it to name."""

    def step(p, x):
        read = lambda p: jnp.tanh(jnp.tanh(x @ jnp.ones((6, 8)))[:, None] + p) @ jnp.ones((8, 3))
        return p - jax.grad(lambda p: (read(p) ** 2).mean())(p)

    with pytest.raises(PlanError, match="no matmul multiplies a weight that has it"):
        preset("tp=4", analyze(step, (jnp.ones((3, 8)), jnp.ones((16, 6)))), 8)


@pytest.mark.parametrize("name, text", [("moe_dense", "dp=2,fsdp=2,tp=2"), ("resnet", "fsdp=2,tp_sp=4")])
def test_odd_programs_are_priced(name, text):
    """A weight with one logical axis twice; a permutation between parts of a mesh axis."""
    program = family(name)
    plan = price(program, preset(text, program, 8), Cluster.parse("cpu:2x4"))
    assert plan.predicted is not None and plan.predicted.step_s > 0
