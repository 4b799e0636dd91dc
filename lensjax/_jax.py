"""Every private or moving JAX name that lensjax uses, each behind a function, with a probe of what is there.

Nothing else in the package imports `jax._src` or `jaxlib` (a test checks it). The probe runs when the planner is first
used, never at import of the package, and names the supported range when something is missing.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from lensjax._errors import UnsupportedJax

SUPPORTED = "jax >= 0.10.0 (tested: 0.10.2 and 0.12.0.1)"
_OLDEST = (0, 10, 0)


@functools.cache
def check_version() -> None:
    """Raises UnsupportedJax when the installed jax is older than the supported range."""
    found = tuple(jax.__version_info__[:3])
    if found < _OLDEST:
        raise UnsupportedJax(
            f"lensjax plans with {SUPPORTED}; jax {jax.__version__} is installed",
            hint="pip install -U jax",
        )


# --- ahead-of-time compile -----------------------------------------------------------------------------------------


def compile_only_devices(platform: str, topology: str, config: str = "", slices: int = 1) -> list[Any]:
    """Devices of a machine that is not here: good for meshes and for compiling, never for running.

    `topology` is "slices x hosts x GPUs" for cuda ("1x64x8") and "chip:shape" for tpu ("v5e:8x8"), where `slices`
    counts separate pods. Raises UnsupportedJax where jax has no such compiler for this platform.
    """
    from jax.experimental import topologies

    try:
        if platform == "tpu":
            made = topologies.get_topology_desc(platform="tpu", topology_name=topology, num_slices=slices)
        else:
            made = topologies.get_topology_desc(platform=platform, topology=topology, target_config=config)
    except (NotImplementedError, RuntimeError, ValueError) as e:
        raise UnsupportedJax(f"no ahead-of-time compiler for {platform} {topology}: {e}", code="no_compiler") from e
    return list(made.devices)


def lowered_facts(lowered: Any) -> tuple[str, int, tuple[bool, ...], tuple[bool, ...]]:
    """(platform, number of devices, inputs whose sharding is free, outputs whose sharding is free) of a jax Lowered.

    The last two are what jit would tell the compiler; the module itself does not carry them.
    """
    try:
        low = lowered._lowering
        args = low.compile_args
        free_in = tuple(_is_free(s) for s in args["in_shardings"])
        free_out = tuple(_is_free(s) for s in args["out_shardings"])
        effects = (False,) * len(args["ordered_effects"])
        return low._platforms[0], int(args["num_devices"]), effects + free_in, effects + free_out
    except (AttributeError, KeyError, TypeError, IndexError) as e:
        raise UnsupportedJax(f"jax {jax.__version__} keeps the facts of a lowered step elsewhere: {e!r}") from e


def _is_free(sharding: Any) -> bool:
    from jax._src.interpreters import mlir
    from jax._src.sharding_impls import UnspecifiedValue

    return isinstance(sharding, UnspecifiedValue) or bool(mlir.contains_unconstrained(sharding))


def compile_module(
    bytecode: bytes,
    devices: Sequence[Any],
    free: tuple[Sequence[bool], Sequence[bool]],
    options: Mapping[str, Any],
) -> Any:
    """Compiles a StableHLO module for `devices` (compile-only or real) and returns XLA's executable, not a jax Compiled.

    `options` are XLA flags by name, without dashes: a wrong one raises, where XLA_FLAGS would abort the process.
    """
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jaxlib.mlir import ir

    order = np.array([d.id for d in devices]).reshape(1, -1)
    made = compiler.get_compile_options(1, len(devices), order, env_options_overrides=dict(options))
    build = made.executable_build_options
    build.allow_spmd_sharding_propagation_to_parameters = list(free[0])
    build.allow_spmd_sharding_propagation_to_output = list(free[1])
    client = devices[0].client
    absent = type(client).__name__ == "CompileOnlyPyClient"  # it has compile_and_load too, which always fails
    compile_ = client.compile if absent else client.compile_and_load
    with mlir.make_ir_context():
        module = ir.Module.parse(bytecode)
        return compile_(module, executable_devices=xla_client.DeviceList(tuple(devices)), compile_options=made)
