"""What a compiler is told of devices that are not here: one Target per chip, compile-only devices of any number.

XLA's GPU compiler reads a small text of device facts (`targets/*.txtpb`, from datasheets, sources inside) and needs no
GPU and no driver; its TPU compiler knows its chips by name. V100 is not taken: the assembler of CUDA 13 starts at
compute capability 7.5.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.resources
import os
from typing import Any

from lensjax import _jax
from lensjax._errors import ClusterError, CompileError, UnsupportedJax

# No GPU to tune on: without the first two XLA times kernels on a device. They choose kernels, not collectives.
# The machine code is thrown away, so it need not be good: the last two save a third of the time of a compile and leave
# the HLO and its buffers as they are (a test compares).
GPU_OPTIONS = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": False,
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
}

# libtpu's own names of chips, https://docs.jax.dev/en/latest/aot.html and libtpu's list of topologies.
TPU_CHIPS = ("v4", "v5e", "v5p", "v6e")

# What libtpu must be told where it only compiles: not to ask the cloud which machine this is, and not to insist on
# being the one process of this machine that has it loaded, which holds for those that use the chips.
TPU_ENVIRONMENT = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

EXTRA = {"cuda": "lensjax[gpu-aot]", "tpu": "lensjax[tpu-aot]"}


@dataclasses.dataclass(frozen=True)
class Target:
    """One kind of device as a compiler sees it: platform "cuda", "tpu" or "cpu"; `config` is XLA's text of facts."""

    name: str
    platform: str
    config: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """XLA flags that a compile without the device needs."""
        return dict(GPU_OPTIONS) if self.platform == "cuda" else {}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the devices sit: `slices` x `hosts` x `per_host`; a TPU slice has a `shape` of chips ("8x8") instead.

    Device ids are counted host by host, so position i in a mesh of `range(count)` is host i // per_host.
    """

    hosts: int
    per_host: int
    slices: int = 1
    shape: str = ""

    @property
    def count(self) -> int:
        return self.slices * self.hosts * self.per_host

    def topology(self, target: Target) -> str:
        """XLA's spelling of this layout for a target's platform."""
        if target.platform == "tpu":
            return f"{target.name}:{self.shape}"
        return f"{self.slices}x{self.hosts}x{self.per_host}"


@functools.cache
def gpu_names() -> tuple[str, ...]:
    """Names of the GPUs described in `targets/`."""
    files = importlib.resources.files("lensjax.verify").joinpath("targets").iterdir()
    return tuple(sorted(f.name.removesuffix(".txtpb") for f in files if f.name.endswith(".txtpb")))


def target(name: str) -> Target:
    """The Target of that name: a GPU of `gpu_names()` ("h100-80gb"), a TPU chip ("v5e"), or "cpu"."""
    if name == "cpu":
        return Target("cpu", "cpu")
    if name in TPU_CHIPS:
        return Target(name, "tpu")
    if name in gpu_names():
        text = importlib.resources.files("lensjax.verify").joinpath("targets", f"{name}.txtpb").read_text("utf-8")
        return Target(name, "cuda", text)
    raise ClusterError(
        f"no compiler target for device {name!r}; there are {', '.join((*gpu_names(), *TPU_CHIPS, 'cpu'))}",
        hint="compile for cpu (emulated devices) instead, or add a description to lensjax/verify/targets",
        code="no_target",
    )


def compile_only(name: str, layout: Layout) -> list[Any]:
    """Devices of `name` in `layout`, for meshes and compiles in this process; ordered host by host.

    Compile what is lowered on them with `traced.lower(lowering_platforms=("cuda",)).compile(compiler_options=
    dict(target(name).options))`. On "cpu" these are the emulated devices of this process.
    Raises CompileError (code "no_compiler", with the extra to install) where the compiler's wheels are absent.
    """
    chip = target(name)
    if chip.platform == "cpu":
        return _emulated(layout.count)
    if chip.platform == "tpu":
        for variable, value in TPU_ENVIRONMENT.items():
            os.environ.setdefault(variable, value)
    try:
        found = _jax.compile_only_devices(chip.platform, layout.topology(chip), chip.config, layout.slices)
    except UnsupportedJax as e:
        extra = EXTRA[chip.platform]
        raise CompileError(e.message, hint=f"pip install '{extra}'", code="no_compiler") from e
    return sorted(found, key=lambda d: (getattr(d, "slice_index", 0) or 0, d.process_index, d.id))


def _emulated(count: int) -> list[Any]:
    import jax

    here = jax.devices("cpu")
    if len(here) < count:
        raise CompileError(
            f"{count} CPU devices asked for, {len(here)} here",
            hint=f"XLA_FLAGS=--xla_force_host_platform_device_count={count} before jax starts",
            code="no_compiler",
        )
    return here[:count]


@functools.cache
def missing(platform: str) -> str:
    """Why there is no compiler for `platform` in this environment, or "" where there is one. Loads no plugin."""
    import importlib.metadata
    import importlib.util

    import jax

    if platform == "cpu":
        return ""
    if platform == "tpu":
        return "" if importlib.util.find_spec("libtpu") else f"libtpu is not installed: pip install '{EXTRA['tpu']}'"
    for plugin in ("jax-cuda13-plugin", "jax-cuda12-plugin"):
        try:
            version = importlib.metadata.version(plugin)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version != jax.__version__:
            return f"{plugin} {version} does not go with jax {jax.__version__}: pip install -U '{EXTRA['cuda']}'"
        return ""
    return f"no jax-cuda13-plugin installed: pip install '{EXTRA['cuda']}'"
