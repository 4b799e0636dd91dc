"""Checkpoints: what is saved under one plan comes back under any other, into any framework's tree, and nothing that was
interrupted is ever chosen."""

import functools
import os
import pathlib
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import lensjax
from lensjax import StateError
from lensjax.execute import checkpoint, executable
from tests.execute.edges import close, data
from tests.zoo import FAMILIES

TX = optax.adam(1e-2)


def create(key=None):
    params = {"w": jnp.full((16, 64), 0.05, jnp.float32), "v": jnp.full((64, 16), 0.1, jnp.float32)}
    raw = jax.random.PRNGKey(7)
    return {"params": params, "opt": TX.init(params), "key": jax.random.key(3), "raw": raw, "step": 0}


def train_step(state, x):
    key, sub = jax.random.split(state["key"])
    raw, other = jax.random.split(state["raw"])

    def loss_fn(p):
        mask = jax.random.bernoulli(sub, 0.9, (x.shape[0], 64)) * jax.random.bernoulli(other, 0.9, (x.shape[0], 64))
        return ((jnp.tanh(x @ p["w"]) * mask @ p["v"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    updates, opt = TX.update(grads, state["opt"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt": opt, "key": key, "raw": raw, "step": state["step"] + 1}, loss


def run(step, state, count):
    losses = []
    for _ in range(count):
        state, loss = step(state, data())
        losses.append(float(loss))
    return state, losses


@functools.cache
def straight(count):
    return run(lensjax.parallelize(train_step, plan="dp"), create(), count)[1]


@pytest.mark.parametrize("plan", ["dp=2,tp=4", pytest.param("dp=4,zero1=2", marks=pytest.mark.slow)])
def test_training_goes_on_under_another_plan_as_if_nothing_had_happened(tmp_path, plan):
    first = lensjax.parallelize(train_step, plan="dp=2,fsdp=4")
    state, before = run(first, first.init(create, batch=data()), 3)
    first.save(tmp_path / "run", state, 3)
    run(first, state, 1)  # which gives the saved buffers up while they are being written
    first.wait()
    second = lensjax.parallelize(train_step, plan=plan)
    second.plan_for(jax.eval_shape(create), data())
    state = second.restore(tmp_path / "run")
    assert all(
        x.sharding.is_equivalent_to(s.sharding, x.ndim)
        for x, s in zip(*map(jax.tree.leaves, (state, second.abstract_state)))
    )
    assert jnp.issubdtype(state["key"].dtype, jax.dtypes.prng_key) and state["raw"].dtype == jnp.uint32
    _, after = run(second, state, 3)
    np.testing.assert_allclose(before + after, straight(6), rtol=1e-5)
    assert len(second._ready) == 1, second.notices  # the counter is as weakly typed as it was: one compile


def test_many_saves_in_a_row_each_hold_their_own_values(tmp_path):
    step = lensjax.parallelize(train_step, plan="fsdp")
    state, wanted = step.init(create, batch=data()), {}
    for i in range(1, 5):
        state, _ = step(state, data())
        wanted[i] = np.array(state["params"]["w"])
        step.save(tmp_path, state, i)
    assert step.saved(tmp_path) == (1, 2, 3, 4)
    for i, w in wanted.items():
        np.testing.assert_array_equal(step.restore(tmp_path, i)["params"]["w"], w)


def test_plain_orbax_reads_it_without_lensjax(tmp_path):
    step = lensjax.parallelize(train_step, plan="fsdp")
    state = step.init(create, batch=data())
    step.save(tmp_path / "run", state, 1)
    step.wait()
    one = SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), jax.eval_shape(create))
    close(ocp.StandardCheckpointer().restore(tmp_path / "run" / "1" / "state", like)["params"], state["params"], 0)
    into_mesh = ocp.StandardCheckpointer().restore(tmp_path / "run" / "1" / "state", step.abstract_state)
    assert into_mesh["params"]["w"].sharding.is_equivalent_to(
        NamedSharding(jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,)), P(None, "a")), 2
    )


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)])
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.drop(nnx.tanh(self.layers[0](x))))


def create_modules(seed):
    model = Net(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


def modules_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: (m(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.slow
def test_modules_come_back_as_modules(tmp_path):
    first = lensjax.parallelize(modules_step, plan="fsdp")
    model, optimizer = first.init(create_modules, 0, batch=data())
    first(model, optimizer, data())
    first.save(tmp_path, (model, optimizer), 1)
    first.wait()
    expected = first(model, optimizer, data())
    second = lensjax.parallelize(modules_step, plan="dp=2,zero1=4")
    second.init(create_modules, 5, batch=data())
    model, optimizer = second.restore(tmp_path)
    assert isinstance(model, Net) and isinstance(optimizer, nnx.Optimizer)
    assert float(second(model, optimizer, data())) == pytest.approx(float(expected), rel=1e-5)
    held = ocp.StandardCheckpointer().metadata(tmp_path / "1" / "state")  # nested names, no class of ours
    assert list(held.item_metadata[0]["layers"]["0"]) == ["bias", "kernel"]


@pytest.mark.slow
def test_values_of_split_modules_come_back(tmp_path):
    family = FAMILIES["nnx_mlp_split"]
    made = family.make()
    batch = made.batch(jax.random.key(1))
    first = lensjax.parallelize(made.step, plan="fsdp")
    state, _ = family.call(first, first.init(made.init, jax.random.key(0), batch=batch), batch)
    first.save(tmp_path, state[1], 1)
    first.wait()
    _, expected = family.call(first, state, batch)
    second = lensjax.parallelize(made.step, plan="dp=2,zero1=4")
    second.init(made.init, jax.random.key(5), batch=batch)
    _, got = family.call(second, (state[0], second.restore(tmp_path)), batch)
    assert float(got["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-5)


def test_a_train_state_keeps_its_functions(tmp_path):
    def make():
        return TrainState.create(apply_fn=jnp.matmul, params={"w": jnp.full((16, 64), 0.1)}, tx=TX)

    def step(state, x):
        grads = jax.grad(lambda p: (state.apply_fn(x, p["w"]) ** 2).mean())(state.params)
        return state.apply_gradients(grads=grads)

    train = lensjax.parallelize(step, plan="fsdp")
    state = train(train.init(make, batch=data()), data())
    train.save(tmp_path, state, 1)
    back = train.restore(tmp_path)
    assert back.apply_fn is jnp.matmul and int(back.step) == 1
    close(train(back, data()).params, train(state, data()).params, 0)


def test_without_lensjax_the_same_calls_work(tmp_path):
    off = lensjax.parallelize(train_step, plan="off")
    state, _ = run(off, off.init(create, batch=data()), 2)
    off.save(tmp_path, state, 2)
    off.wait()
    on = lensjax.parallelize(train_step, plan="fsdp")
    on.plan_for(jax.eval_shape(create), data())
    close(on.restore(tmp_path)["params"], state["params"], 0)
    assert off.saved(tmp_path) == (2,)
    np.testing.assert_allclose(run(off, off.restore(tmp_path), 1)[1], straight(3)[2:], rtol=1e-5)


# ---- what is not there, or not this --------------------------------------------------------------------------------


def planned():
    step = lensjax.parallelize(train_step, plan="fsdp")
    return step, step.init(create, batch=data())


def test_nothing_to_restore_says_what_there_is(tmp_path):
    step, state = planned()
    with pytest.raises(StateError, match=r"no checkpoint to restore in .*: there is no such folder"):
        step.restore(tmp_path / "none")
    step.save(tmp_path, state, 4)
    with pytest.raises(StateError, match=r"no checkpoint 5 to restore in .*complete ones: 4"):
        step.restore(tmp_path, 5)
    with pytest.raises(StateError, match="checkpoint 4 is there already"):
        step.save(tmp_path, state, 4)


def test_a_state_that_was_given_up_is_not_saved(tmp_path):
    step, state = planned()
    step(state, data())
    with pytest.raises(StateError, match="were given up to an earlier call"):
        step.save(tmp_path, state, 1)


def test_another_states_checkpoint_is_refused_by_the_name_of_the_leaf(tmp_path):
    step, state = planned()
    step.save(tmp_path, state, 1)
    step.wait()  # the reader below is another step
    wider = lambda: {**create(), "params": {"w": jnp.ones((16, 32)), "v": jnp.ones((32, 16))}}

    def other(state, x):
        p = state["params"]
        grads = jax.grad(lambda p: ((x @ p["w"] @ p["v"]) ** 2).mean())(p)
        return {**state, "params": jax.tree.map(lambda a, g: a - g, p, grads)}

    narrow = lensjax.parallelize(other, plan="fsdp")
    narrow.plan_for(jax.eval_shape(wider), data())
    with pytest.raises(
        StateError, match=r"of another state: params/v is float32\[64, 16\] in it and float32\[32, 16\]"
    ):
        narrow.restore(tmp_path)


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda d, s: (d, s, "5"), "'5' is no number of a checkpoint; expected an integer"),
        (lambda d, s: (d, s, 5.0), "5.0 is no number"),
        (lambda d, s: (d, s, True), "True is no number"),
        (lambda d, s: (d, s, -1), "-1 is no number"),
        (lambda d, s: (s, d, 1), "dict .* where the folder of the checkpoints is expected"),
        (lambda d, s: (None, s, 1), "NoneType .* where the folder"),
        (lambda d, s: (d, {}, 1), "there is no array in what is to be saved"),
        (lambda d, s: (d, s["params"], 1), "not the state of this step: key is not there, and uint32"),
        (lambda d, s: (d, {**s, "more": jnp.ones(3)}, 1), r"not the state of this step: more is float32\[3\], and not"),
        (lambda d, s: (d, {**s, "name": "mine"}, 1), "name is no array in one of them"),
        (lambda d, s: (d / "file", s, 1), "cannot write to .*/file: FileExistsError"),
        (lambda d, s: (d / "file" / "inside", s, 1), "cannot write to .*/inside: NotADirectoryError"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(tmp_path, change, words):
    step, state = planned_once()
    (tmp_path / "file").write_text("")
    with pytest.raises(StateError, match=words):
        step.save(*change(tmp_path, state))
    assert os.listdir(tmp_path) == ["file"]


@functools.cache
def planned_once():
    return planned()


def test_numbers_and_folders_as_scripts_have_them(tmp_path, monkeypatch):
    step, state = planned_once()
    monkeypatch.chdir(tmp_path)
    for number, folder in ((np.int64(3), "my run %1"), (jnp.int32(7), pathlib.Path("my run %1")), (5, "./my run %1/")):
        step.save(folder, state, number)
    for name in ("99", "best"):  # not ours, or left by who copies folders about
        (tmp_path / "my run %1" / name).mkdir()
    assert step.saved(tmp_path / "my run %1") == (3, 5, 7)
    close(step.restore("my run %1", np.int64(5))["params"], state["params"], 0)


def test_keys_come_back_typed_or_raw_as_the_step_has_them(tmp_path):
    step, state = planned_once()
    step.save(tmp_path, state, 1)
    step.wait()
    turned = lambda: {**create(), "key": jax.random.PRNGKey(3), "raw": jax.random.key(7)}
    other = lensjax.parallelize(train_step, plan="dp")
    other.plan_for(jax.eval_shape(turned), data())
    back = other.restore(tmp_path)
    close({k: back[k] for k in ("key",)}, {"key": jax.random.key_data(state["key"])}, 0)
    close(jax.random.key_data(back["raw"]), state["raw"], 0)
    assert [x.dtype for x in jax.tree.leaves(back)] == [x.dtype for x in jax.tree.leaves(other.abstract_state)]
    rbg = lensjax.parallelize(train_step, plan="dp")
    rbg.plan_for(jax.eval_shape(lambda: {**create(), "key": jax.random.key(3, impl="rbg")}), data())
    with pytest.raises(StateError, match=r"key is uint32\[2\] in it and uint32\[4\] in the step's"):
        rbg.restore(tmp_path)


def test_a_narrower_type_is_not_cast_to_in_silence(tmp_path):
    def half(state, x):
        return {**state, "w": state["w"] - jax.grad(lambda w: ((x @ w) ** 2).mean())(state["w"])}

    make = lambda dtype: {"w": jnp.full((16, 64), 0.1, dtype)}
    wide, narrow = (lensjax.parallelize(half, plan="fsdp") for _ in range(2))
    state = wide.init(lambda: make(jnp.float32), batch=data())
    narrow.plan_for(jax.eval_shape(lambda: make(jnp.bfloat16)), data())
    wide.save(tmp_path / "wide", state, 1)
    wide.wait()
    with pytest.raises(StateError, match=r"w is float32\[16, 64\] in it and bfloat16\[16, 64\] in the step's"):
        narrow.restore(tmp_path / "wide")
    narrow.save(tmp_path / "narrow", make(jnp.bfloat16), 1)
    narrow.wait()
    assert wide.restore(tmp_path / "narrow")["w"].dtype == jnp.float32


KINDS = "bool int4 uint4 int8 uint8 int16 uint16 int32 uint32 int64 uint64 float8_e4m3fn float8_e5m2 bfloat16 float16 "
KINDS += "float32 float64 complex64 complex128"


@pytest.mark.parametrize("old", KINDS.split())
def test_a_type_holds_another_where_its_extremes_come_back(old):
    a = jnp.dtype(old)
    if a.kind == "b":
        values = np.array([0, 1], a)
    elif jnp.issubdtype(a, np.integer):
        values = np.array([jnp.iinfo(a).min, jnp.iinfo(a).max], a)
    else:
        part = jnp.finfo(a)
        values = np.array([part.max, part.min, part.tiny, 1 + np.float64(part.eps)], a)
        if jnp.issubdtype(a, np.complexfloating):
            values = values * np.array(1j, a)
    for new in KINDS.split():
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            there = values.astype(jnp.dtype(new))
            back = there.astype(a)
        kept = np.array_equal(back, values) and (a.kind == "b") == (there.dtype.kind == "b")
        kept &= not jnp.issubdtype(a, np.integer) or (np.asarray(there) >= 0).tolist() == (values >= 0).tolist()
        number = lambda t: jnp.issubdtype(t, np.inexact)
        assert checkpoint._holds(old, new) == (kept and number(a) == number(there.dtype)), (old, new)


def test_an_unsigned_counter_is_not_read_as_a_signed_one(tmp_path):
    def counts(state, x):
        return {"w": state["w"] - jax.grad(lambda w: ((x @ w) ** 2).mean())(state["w"]), "n": state["n"] + 1}

    make = lambda dtype: {"w": jnp.full((16, 64), 0.1), "n": jnp.asarray(1, dtype)}
    unsigned, signed = (lensjax.parallelize(counts, plan="fsdp") for _ in range(2))
    unsigned.save(tmp_path, unsigned.init(lambda: make(jnp.uint32), batch=data()), 1)
    unsigned.wait()
    signed.plan_for(jax.eval_shape(lambda: make(jnp.int32)), data())
    with pytest.raises(StateError, match=r"n is uint32\[\] in it and int32\[\] in the step's"):
        signed.restore(tmp_path)


def test_where_nothing_is_to_be_restored_from_is_said(tmp_path):
    step, _ = planned_once()
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name, said in (("none", "there is no such folder"), ("file", "it is a file"), ("empty", "no complete one")):
        with pytest.raises(StateError, match=said) as e:
            step.restore(tmp_path / name)
        assert "abstract_state" in e.value.hint


def test_a_damaged_checkpoint_says_so(tmp_path):
    step, state = planned_once()
    step.save(tmp_path, state, 1)
    step.wait()
    for path in (tmp_path / "1" / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(b"garbage")
    with pytest.raises(StateError, match=r"cannot be read: its 'state' is damaged"):
        step.restore(tmp_path)
    shutil.rmtree(tmp_path / "1" / "state")
    with pytest.raises(StateError, match=r"checkpoint 1 in .* holds nothing; expected 'state'"):
        step.restore(tmp_path)


def test_before_there_is_a_plan():
    with pytest.raises(lensjax.PlanError, match="there is no plan yet"):
        lensjax.parallelize(train_step, plan="fsdp").restore("anywhere")


# ---- the hidden state of a plan ------------------------------------------------------------------------------------


def counting(emitted):
    """An emitted step that counts its calls in hidden state, as a codec would keep its residuals."""
    import dataclasses

    whole = NamedSharding(emitted.mesh, P())
    calls = jax.ShapeDtypeStruct((), jnp.int32, sharding=whole)
    run = lambda *leaves: [*emitted.run(*leaves[:-1]), leaves[-1] + 1]
    return dataclasses.replace(emitted, run=run, extra={"calls": calls})


def test_hidden_state_is_threaded_through_the_calls_saved_and_restored(tmp_path, monkeypatch):
    original = executable.emit
    monkeypatch.setattr(executable, "emit", lambda *a: counting(original(*a)))
    step, state = planned()
    state, losses = run(step, state, 2)
    old = step.extra["calls"]
    state, _ = step(state, data())
    assert int(step.extra["calls"]) == 3 and old.is_deleted()
    np.testing.assert_allclose(losses, straight(2), rtol=1e-5)
    step.save(tmp_path, state, 3)
    step.wait()
    other, _ = planned()
    other.restore(tmp_path)
    assert int(other.extra["calls"]) == 3
    monkeypatch.undo()
    plain, _ = planned()
    plain.restore(tmp_path)  # a plan without it leaves it where it is
    assert plain.extra == {}
    plain.save(tmp_path / "plain", state, 1)
    plain.wait()
    monkeypatch.setattr(executable, "emit", lambda *a: counting(original(*a)))
    again, _ = planned()
    again.restore(tmp_path / "plain")
    assert int(again.extra["calls"]) == 0 and "starts from zeros" in again.notices[-1]
