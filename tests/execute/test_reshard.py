"""Re-sharding between any two plans: bit for bit, no byte more than must move, and little memory on the way."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

import lensjax
from lensjax import PlanError, StateError
from lensjax.execute import reshard as module
from lensjax.execute.place import device_mesh
from lensjax.passes.shardings import named
from lensjax.plan.plan import Axis, MeshPlan, Plan, Provenance

SHAPES = {"a": (24, 8), "b": (8, 4, 2), "c": (5, 3), "d": ()}
TYPES = {"a": "float32", "b": "bfloat16", "c": "uint8", "d": "int32"}


@st.composite
def plans(draw):
    """A plan for 1 to 8 devices: any mesh, any device order, any split that divides."""
    sizes = draw(st.sampled_from([(8,), (2, 4), (4, 2), (2, 2, 2), (1, 8), (4,), (2,), (1,), (6,), (3, 2)]))
    axes = tuple(Axis(f"x{i}", n) for i, n in enumerate(sizes))
    count = int(np.prod(sizes))
    order = draw(st.one_of(st.none(), st.permutations(range(count)).map(tuple)))
    leaves = {}
    for name, shape in SHAPES.items():
        spec = [()] * len(shape)
        for axis in draw(st.permutations(axes)):
            d = draw(st.integers(-1, len(shape) - 1))
            parts = int(np.prod([dict((a.name, a.size) for a in axes)[n] for n in spec[d]])) if d >= 0 else 0
            if d >= 0 and shape[d] % (parts * axis.size) == 0:
                spec[d] = (*spec[d], axis.name)
        if any(spec):
            leaves[f"state/{name}"] = tuple(spec)
    return Plan(MeshPlan(axes, order), leaves=leaves)


def place(plan, devices=None):
    mesh = device_mesh(plan.mesh, (devices or jax.devices())[: plan.mesh.size])
    specs = module.specs_of(plan, list(SHAPES), list(SHAPES.values()))
    whole = {n: np.arange(np.prod(s, dtype=int)).reshape(s).astype(jnp.dtype(TYPES[n])) for n, s in SHAPES.items()}
    return whole, {n: jax.device_put(whole[n], named(mesh, s)) for n, s in zip(SHAPES, specs)}


class Meter:
    """Counts, at the two points that everything passes, what crosses between devices and what each of them holds."""

    def __init__(self, monkeypatch):
        self.moved, self.peak = 0, collections.Counter()
        send, settle = module.send, module.settle

        def counted(part, device):
            (source,) = part.devices()
            assert source != device
            self.moved += part.nbytes
            return send(part, device)

        def looked(arrays):
            settle(arrays)
            for device, held in resident().items():
                self.peak[device] = max(self.peak[device], held)

        monkeypatch.setattr(module, "send", counted)
        monkeypatch.setattr(module, "settle", looked)


def resident():
    """Bytes of all live arrays on each device; an array that shares a buffer with another counts once."""
    held, seen = collections.Counter(), set()
    for x in jax.live_arrays():
        for s in x.addressable_shards:
            at = (s.device, s.data.unsafe_buffer_pointer())
            if at not in seen:
                seen.add(at)
                held[s.device] += s.data.nbytes
    return held


def owned(x):
    """Device -> which elements of the array it holds."""
    out = {}
    for device, index in x.sharding.devices_indices_map(x.shape).items():
        out[device] = np.zeros(x.shape, bool)
        out[device][index] = True
    return out


def must_move(before, after):
    total = 0
    for x, y in zip(before.values(), after.values()):
        had = owned(x)
        total += sum((m & ~had.get(d, False)).sum() for d, m in owned(y).items()) * x.dtype.itemsize
    return int(total)


@pytest.mark.parametrize("examples", [3, pytest.param(200, marks=pytest.mark.slow)])
def test_any_two_plans(examples):
    largest = max(np.prod(s, dtype=int) * jnp.dtype(TYPES[n]).itemsize for n, s in SHAPES.items())

    @settings(max_examples=examples, deadline=None, derandomize=True, database=None)
    @given(plans(), plans())
    def check(a, b):
        with pytest.MonkeyPatch.context() as patch:
            empty = resident()
            whole, state = place(a)
            before = resident() - empty
            places = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for n, x in state.items()}
            meter = Meter(patch)
            out = lensjax.reshard(state, a, b)
            _, expected = place(b)
            for n in whole:
                assert out[n].sharding == expected[n].sharding and out[n].dtype == whole[n].dtype
                np.testing.assert_array_equal(np.asarray(out[n]), whole[n])
                for mine, theirs in zip(out[n].addressable_shards, expected[n].addressable_shards):
                    np.testing.assert_array_equal(np.asarray(mine.data), np.asarray(theirs.data))
            assert meter.moved <= 1.1 * must_move(places, out)
            del state, expected
            after = resident() - empty
            for device, peak in meter.peak.items():
                above = peak - empty[device] - max(before[device], after[device])
                assert above <= 1.6 * largest, (device, above, largest)

    check()


def test_the_old_buffers_are_given_up_and_what_lies_right_is_passed_on():
    a = Plan(MeshPlan((Axis("x", 8),)), leaves={"state/a": (("x",), ())})
    b = Plan(MeshPlan((Axis("x", 8),)), leaves={"state/a": ((), ("x",))})
    _, state = place(a)
    out = lensjax.reshard(state, a, b)
    assert state["a"].is_deleted() and not state["c"].is_deleted()
    assert out["c"].addressable_shards[0].data.unsafe_buffer_pointer() == (
        state["c"].addressable_shards[0].data.unsafe_buffer_pointer()
    )


def test_other_devices_of_the_process():
    a = Plan(MeshPlan((Axis("x", 4),)), leaves={"state/a": (("x",), ()), "state/b": ((), ("x",), ())})
    whole, state = place(a)
    out = lensjax.reshard(state, a, a, devices=jax.devices()[4:])
    assert out["a"].devices() == set(jax.devices()[4:])
    np.testing.assert_array_equal(out["b"], whole["b"])


def test_keys_and_numbers():
    a = Plan(MeshPlan((Axis("x", 8),)))
    b = Plan(MeshPlan((Axis("x", 2),)))
    whole = NamedSharding(device_mesh(a.mesh), jax.sharding.PartitionSpec())
    state = {"key": jax.device_put(jax.random.key(3), whole), "n": 3}
    out = lensjax.reshard(state, a, b)
    np.testing.assert_array_equal(jax.random.key_data(out["key"]), jax.random.key_data(jax.random.key(3)))
    assert out["key"].devices() == set(jax.devices()[:2]) and int(out["n"]) == 3


def test_a_state_of_several_arguments_and_a_doubtful_name():
    a = Plan(MeshPlan((Axis("x", 8),)), leaves={"params/w": (("x",), ()), "opt/0/mu/w": (("x",), ())})
    b = a.replace(leaves={"params/w": ((), ("x",)), "opt/0/mu/w": ((), ("x",))})
    mesh = device_mesh(a.mesh)
    make = lambda: jax.device_put(np.ones((8, 8), np.float32), named(mesh, (("x",), ())))
    out = lensjax.reshard(({"w": make()}, ({"mu": {"w": make()}},)), a, b)
    assert out[0]["w"].sharding == out[1][0]["mu"]["w"].sharding == named(mesh, ((), ("x",)))
    twice = a.replace(leaves={"one/w": (("x",), ()), "two/w": ((), ("x",))})
    with pytest.raises(PlanError, match="0/w of the state may be one/w or two/w of the plan"):
        lensjax.reshard(({"w": make()},), twice, b)
    named_ = lensjax.reshard({"one": {"w": make()}}, twice, b)
    assert named_["one"]["w"].sharding.is_fully_replicated


def test_a_state_that_lies_otherwise_is_refused_before_anything_is_given_up():
    a = Plan(MeshPlan((Axis("x", 8),)), leaves={"state/a": (("x",), ())}, name="a")
    b = Plan(MeshPlan((Axis("x", 8),)), name="b")
    _, state = place(b)
    with pytest.raises(StateError, match=r"a lies as .*; the first plan \('a'\) splits its \(24, 8\)"):
        lensjax.reshard(state, a, b)
    assert not any(x.is_deleted() for x in state.values())


def test_what_cannot_be_resharded_is_refused_by_name():
    a, big = (Plan(MeshPlan((Axis("x", n),)), name="a") for n in (8, 16))
    for state, plans, kw, error, words in (
        ({"w": jnp.ones(8)}, ("fsdp", a), {}, PlanError, "plan_a is a str; expected a Plan"),
        (a, (jnp.ones(8), a), {}, PlanError, "plan_a is a "),
        ({"w": jnp.ones(8)}, (a, None), {}, PlanError, "plan_b is a NoneType"),
        ({"w": {"name": "x"}}, (a, a), {}, StateError, "w/name is a str; expected arrays"),
        ({"w": jax.ShapeDtypeStruct((8,), "float32")}, (a, a), {}, StateError, "w is a ShapeDtypeStruct"),
        ({"w": jnp.ones(8)}, (a, a), {"devices": 8 * jax.devices()[:1]}, PlanError, "expected different devices"),
        ({"w": jnp.ones(8)}, (a, a), {"devices": "cpu"}, PlanError, "expected different devices"),
        ({"w": jnp.ones(8)}, (a, a), {"devices": jax.devices()[:2]}, PlanError, "is for 8 devices .*devices= has 2"),
        ({"w": jnp.ones(8)}, (a, a), {"devices": []}, PlanError, "is for 8 devices .*devices= has 0"),
        ({"w": jnp.ones(8)}, (a, big), {}, PlanError, "is for 16 devices .*JAX sees 8"),
    ):
        with pytest.raises(error, match=words):
            lensjax.reshard(state, *plans, **kw)
    with pytest.raises(StateError, match="w is traced"):
        jax.jit(lambda s: lensjax.reshard(s, a, a))({"w": jnp.ones(8)})


def test_a_plan_of_another_step_is_refused_and_parts_of_a_state_are_not():
    mesh, split = MeshPlan((Axis("x", 8),)), (("x",), ())
    a = Plan(mesh, leaves={"state/a": split}, provenance=Provenance(program="1"))
    b = Plan(mesh, leaves={"s/weights": split}, name="b", provenance=Provenance(program="2"))
    _, state = place(a)
    with pytest.raises(PlanError, match="'b'\\) was made for another step: it splits s/weights, and nothing"):
        lensjax.reshard(state, a, b)
    assert not any(x.is_deleted() for x in state.values())
    # The same step at another batch size is another program, and a part of the state may have nothing to split.
    c = Plan(mesh, leaves={"state/a": ((), ("x",))}, provenance=Provenance(program="3"))
    part = {k: v for k, v in state.items() if k != "a"}
    assert lensjax.reshard(part, a, c).keys() == part.keys()
    assert lensjax.reshard({"a": state["a"]}, a, c)["a"].sharding.spec == jax.sharding.PartitionSpec(None, "x")
    numpy = lensjax.reshard({"a": np.ones((24, 8), np.float32)}, a, c)
    assert numpy["a"].sharding.spec == jax.sharding.PartitionSpec(None, "x")


def test_nothing_and_types_of_all_sizes_come_through():
    a, b = (Plan(MeshPlan((Axis("x", 8),)), leaves={"state/w": s}) for s in ((("x",), ()), ((), ("x",))))
    mesh = device_mesh(a.mesh)
    assert lensjax.reshard({}, a, b) == {}
    empty = jax.device_put(jnp.zeros((0, 8)), named(mesh, ((), ())))
    assert lensjax.reshard({"z": empty}, a, b)["z"].shape == (0, 8)
    for dtype in ("bool", "complex64", "int4", "float8_e4m3fn", "float16"):
        whole = np.arange(64).reshape(8, 8).astype(jnp.dtype(dtype))
        out = lensjax.reshard({"w": jax.device_put(whole, named(mesh, (("x",), ())))}, a, b)["w"]
        np.testing.assert_array_equal(np.asarray(out), whole)
        assert out.sharding == named(mesh, ((), ("x",)))


def test_training_goes_on_under_the_other_plan():
    def step(p, x):
        loss, grads = jax.value_and_grad(lambda p: ((jnp.tanh(x @ p["w"]) @ p["v"]) ** 2).mean())(p)
        return jax.tree.map(lambda a, g: a - 0.1 * g, p, grads), loss

    create = lambda: {"w": jnp.full((16, 64), 0.05, jnp.float32), "v": jnp.full((64, 16), 0.1, jnp.float32)}
    x = np.asarray(jax.random.normal(jax.random.key(0), (16, 16)))
    one, two = lensjax.parallelize(step, plan="fsdp"), lensjax.parallelize(step, plan="dp=2,tp=4")
    two.plan_for(jax.eval_shape(create), x)
    state, _ = one(one.init(create, batch=x), x)
    expected = float(one(jax.tree.map(jnp.copy, state), x)[1])
    state, loss = two(lensjax.reshard(state, one.plan, two.plan), x)
    assert float(loss) == pytest.approx(expected, rel=1e-5) and len(two._ready) == 1
