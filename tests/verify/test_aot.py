"""Compiling for a cluster that is not here: cache, limits, flags, fallback."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from lensjax._errors import CompileError
from lensjax.topology.cluster import Cluster
from lensjax.verify import cache
from lensjax.verify.aot import compile_for, parse_flags
from lensjax.verify.artifact import Artifact
from lensjax.verify.hlo import parse_hlo
from lensjax.verify.memory import peak
from tests.gpu_compiler import needs_gpu_compiler

BIG = 512 * 1024


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LENSJAX_CACHE", str(tmp_path))


def traced(width=512):
    mesh = AbstractMesh((2, 4), ("node", "data"), axis_types=(AxisType.Auto,) * 2)

    def step(w, x):
        def loss(w):
            return jnp.mean(jnp.tanh(x @ w) ** 2)

        value, grad = jax.value_and_grad(loss)(w)
        return w - grad, value

    w = jax.ShapeDtypeStruct((width, width), jnp.float32, sharding=NamedSharding(mesh, P("data", None)))
    x = jax.ShapeDtypeStruct((64, width), jnp.float32, sharding=NamedSharding(mesh, P(("node", "data"), None)))
    return jax.jit(step, donate_argnums=0, out_shardings=(w.sharding, None)).trace(w, x)


def test_a_cpu_compile_says_what_it_does_not_prove():
    made = compile_for(traced(), Cluster.parse("dgx-h100:1"), backend="cpu")
    assert (made.backend, made.devices) == ("cpu", 8)
    assert "emulated" in made.notes[0]
    assert made.memory.peak >= made.memory.arguments + made.memory.temporaries
    assert parse_hlo(made.hlo).aliases == {0: 0}


@pytest.mark.slow
def test_the_second_time_comes_from_the_cache_and_a_change_does_not():
    cluster = Cluster.parse("cpu:8")
    step = traced()  # its source lines, those of the callers included, are part of the program
    first = compile_for(step, cluster)
    (entry,) = list((cache.folder() / "compiled").iterdir())
    assert compile_for(step, cluster) == first
    entry.write_bytes(b"damaged")
    again = compile_for(step, cluster)
    assert again.hlo == first.hlo and again.seconds != first.seconds
    compile_for(traced(256), cluster)
    compile_for(step, cluster, flags="--xla_cpu_enable_fast_math=false")
    assert len(list((cache.folder() / "compiled").iterdir())) == 3
    cache.trim(limit=0)
    assert not list((cache.folder() / "compiled").iterdir())


def test_artifact_round_trip():
    made = compile_for(traced(), Cluster.parse("cpu:8"))
    assert Artifact.from_json(made.to_json()) == made


def test_limits_and_flags():
    cluster = Cluster.parse("cpu:8")
    with pytest.raises(CompileError, match="0 s") as e:
        compile_for(traced(), cluster, time_limit=0.05, use_cache=False)
    assert e.value.code == "timeout"
    with pytest.raises(CompileError) as e:
        compile_for(traced(), cluster, memory_limit=2e6, use_cache=False)
    assert e.value.code == "memory"
    with pytest.raises(CompileError, match="xla_gpu_no_such_flag") as e:
        compile_for(traced(), cluster, flags={"xla_gpu_no_such_flag": 1})
    assert e.value.code == "flag"
    assert parse_flags("--xla_a=1 --xla_b") == {"xla_a": "1", "xla_b": True}


def test_a_step_lowered_for_another_platform():
    lowered = traced().lower(lowering_platforms=("tpu",))
    with pytest.raises(CompileError, match="lowered for tpu"):
        compile_for(lowered, Cluster.parse("cpu:8"))


def test_too_few_devices():
    with pytest.raises(Exception, match="has 4"):
        compile_for(traced(), Cluster.parse("cpu:4"))


def test_a_device_without_a_compiler_falls_back():
    made = compile_for(traced(), Cluster.parse("dgx1-v100:1"))
    assert made.backend == "cpu" and "V100" in made.notes[0]
    with pytest.raises(Exception, match="no compiler target"):
        compile_for(traced(), Cluster.parse("dgx1-v100:1"), fallback=False)


@needs_gpu_compiler
def test_a_gpu_compile_names_its_buffers_and_hides_nothing():
    made = compile_for(traced(), Cluster.parse("dgx-h100:1"))
    module = parse_hlo(made.hlo)
    assert made.backend == "cuda" and module.scheduled and module.devices == 8
    found = peak(made, module)
    assert found.bytes == made.memory.peak
    largest = [b for b in found.buffers if b.shape == "f32[512,512]"]
    assert largest and largest[0].line.endswith("in traced.<locals>.step.<locals>.loss")
    names = {b.what for b in found.buffers if b.kind == "argument"}
    assert names == {"w", "x"}


@pytest.mark.slow
@needs_gpu_compiler
def test_quick_machine_code_leaves_the_program_alone():
    """The flags that save time in a compile for devices that are not here change no buffer and no collective."""
    step = traced()
    quick = compile_for(step, Cluster.parse("dgx-h100:1"))
    full = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    slow = compile_for(step, Cluster.parse("dgx-h100:1"), flags=full)
    assert quick.hlo == slow.hlo
    assert quick.memory == slow.memory
