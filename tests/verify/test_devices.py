"""Compile-only devices: right numbers, right order, and a step that compiles on them in this process."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lensjax._errors import ClusterError, CompileError
from lensjax.verify.devices import Layout, compile_only, gpu_names, missing, target
from tests.gpu_compiler import needs_gpu_compiler


def test_unknown_device_names_the_known_ones():
    with pytest.raises(ClusterError, match="h100-80gb"):
        target("riva-128")


def test_every_description_states_its_sources_and_a_plausible_memory():
    for name in gpu_names():
        text = target(name).config
        assert "Sources:" in text
        bytes_ = int(text.split("device_memory_size: ")[1].split()[0])
        assert bytes_ / 2**30 == pytest.approx(float(name.split("-")[1].removesuffix("gb")), rel=0.07)


def test_cpu_says_how_to_get_more_devices():
    assert len(compile_only("cpu", Layout(1, 8))) == 8
    with pytest.raises(CompileError, match="device_count=512"):
        compile_only("cpu", Layout(1, 512))


@needs_gpu_compiler
@pytest.mark.parametrize("name", gpu_names())
def test_a_step_compiles_for_2x4(name):
    devices = compile_only(name, Layout(2, 4))
    assert [d.process_index for d in devices] == [0] * 4 + [1] * 4
    mesh = Mesh(np.array(devices).reshape(2, 4), ("node", "data"), axis_types=(AxisType.Auto,) * 2)
    x = jax.ShapeDtypeStruct((8, 128), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("data")))
    lowered = jax.jit(lambda x: x.sum(0)).trace(x).lower(lowering_platforms=("cuda",))
    text = lowered.compile(compiler_options=target(name).options).as_text()
    assert "all-reduce" in text and "num_partitions=8" in text


@needs_gpu_compiler
def test_thousands_of_devices_cost_nothing():
    devices = compile_only("h100-80gb", Layout(1024, 8))
    assert [d.id for d in devices] == list(range(8192))


@pytest.mark.slow
@pytest.mark.skipif(bool(missing("tpu")), reason="needs libtpu")
def test_two_processes_compile_for_tpus_at_once():
    """libtpu lets one process of a machine load it, for its chips' sake; there are none here."""
    made = (
        "from lensjax.topology.cluster import Cluster; from lensjax.verify import target_devices\n"
        "print(len(target_devices(Cluster.parse('tpu-v5e:2x4'))), flush=True)\n"
    )
    again = (
        "import os, subprocess, sys\n"
        "os.environ.pop('ALLOW_MULTIPLE_LIBTPU_LOAD', None)  # the second finds out by itself\n"
        "subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "ALLOW_MULTIPLE_LIBTPU_LOAD"} | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", made + again, made], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == ["8", "8"], done.stderr[-2000:]
