"""Every private or moving JAX name that lensjax uses, each behind a function, with a probe of what is there.

Nothing else in the package imports `jax._src` or `jaxlib` (a test checks it). The probe runs when the planner is first
used, never at import of the package, and names the supported range when something is missing.
"""

from __future__ import annotations

import functools
import os
import re
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core as jcore

from lensjax._errors import PartitionError, UnsupportedJax

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


def numerics() -> tuple[Any, ...]:
    """The settings of JAX under which a function traces to other equations or numbers: part of what a call is."""
    config: Any = jax.config
    return (
        *settings(),
        bool(config.jax_threefry_partitionable),
        str(config.jax_numpy_dtype_promotion),
        str(config.jax_default_matmul_precision),
    )


def settings() -> tuple[bool, str]:
    """(whether 64-bit types are on, the default PRNG implementation): what changes a program's numbers."""
    config: Any = jax.config
    return bool(config.jax_enable_x64), str(config.jax_default_prng_impl)


# Frames of the code that traces the user's function are not the user's.
_TRACERS = tuple(os.path.join(os.path.dirname(__file__), part, "") for part in ("program", "execute"))

# ---- jaxprs -------------------------------------------------------------------------------------------------------
# jax 0.10 has ClosedJaxpr (a Jaxpr and its constants); jax 0.12 has one class for both, with a legacy `.jaxpr`.


def open_jaxpr(jaxpr: Any) -> Any:
    """The Jaxpr inside a ClosedJaxpr; a Jaxpr as it is."""
    return jaxpr if isinstance(jaxpr, jcore.Jaxpr) else jaxpr.jaxpr


def constants(jaxpr: Any) -> tuple[Any, ...]:
    """Constant values bound to the jaxpr's constvars (none for an open one)."""
    return tuple(getattr(jaxpr, "consts", ()) or ())


def rebuild(jaxpr: Any, *, invars: Any = None, outvars: Any = None, eqns: Any = None) -> Any:
    """The same kind of jaxpr with other variables or equations and no constants of its own. Effects are kept: what
    the passes insert is pure."""
    inner = open_jaxpr(jaxpr)
    invars = list(inner.invars) if invars is None else list(invars)
    outvars = list(inner.outvars) if outvars is None else list(outvars)
    debug = inner.debug_info
    if len(invars) != len(inner.invars) or len(outvars) != len(inner.outvars):
        debug = jax.make_jaxpr(lambda *xs: xs)().jaxpr.debug_info.with_unknown_names()
    new = jcore.Jaxpr((), invars, outvars, inner.eqns if eqns is None else list(eqns), inner.effects, debug)
    closed = jcore.ClosedJaxpr is not jcore.Jaxpr and isinstance(jaxpr, jcore.ClosedJaxpr)
    return jcore.ClosedJaxpr(new, ()) if closed else new


def close(jaxpr: Any) -> Any:
    """A jaxpr without constants as what `jax.extend.core.jaxpr_as_fun` takes."""
    if jcore.ClosedJaxpr is jcore.Jaxpr or isinstance(jaxpr, jcore.ClosedJaxpr):
        return jaxpr
    return jcore.ClosedJaxpr(jaxpr, ())


def is_jaxpr(value: Any) -> bool:
    return isinstance(value, jcore.Jaxpr | jcore.ClosedJaxpr)


def new_var(aval: Any) -> Any:
    return jcore.Var(aval)


def scan_split(eqn: Any) -> tuple[int, int]:
    """(number of constants, number of carries) of a `scan` equation; the other operands are scanned over."""
    if "num_consts" in eqn.params:  # jax 0.10
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def add_operands(eqn: Any, operands: Sequence[Any], bodies: Sequence[Any]) -> Any:
    """A loop, branch or remat with more operands, that are the same in every trip: the first arguments of its `bodies`
    (of a while loop: of its body, not of its condition)."""
    params, k, invars, at = dict(eqn.params), len(operands), list(eqn.invars), 0
    name = eqn.primitive.name
    if name == "scan":
        params["jaxpr"] = bodies[0]
        if "num_consts" in params:  # jax 0.10
            params["num_consts"] += k
            params |= {"linear": (*(False,) * k, *params["linear"])} if "linear" in params else {}
        else:
            from jax._src import flattree as ft  # pyright: ignore[reportAttributeAccessIssue]

            consts, carry, xs = params["ft_in"].unpack()
            params["ft_in"] = ft.pack((ft.nones(k + len(consts)), carry, xs))
    elif name == "while":
        params["cond_jaxpr"], params["body_jaxpr"] = bodies
        params["body_nconsts"] += k
        at = params["cond_nconsts"]
    elif name == "cond":
        params["branches"] = tuple(bodies)
        at = 1
    else:
        params["jaxpr"] = bodies[0]
    return eqn.replace(invars=[*invars[:at], *operands, *invars[at:]], params=params)


def rescan(eqn: Any, *, invars, outvars, body: Any, consts: int = -1, carry: int = -1, length: int = 0) -> Any:
    """A `scan` equation with another body, operands and results. `consts` and `carry`: their numbers, `length`: that
    of trips (as before where not given)."""
    had, carried = scan_split(eqn)
    consts, carry = had if consts < 0 else consts, carried if carry < 0 else carry
    changes = {"jaxpr": body, "length": length or eqn.params["length"]}
    if "num_consts" in eqn.params:  # jax 0.10
        changes |= {"num_consts": consts, "num_carry": carry}
    else:
        from jax._src import flattree as ft  # pyright: ignore[reportAttributeAccessIssue]

        scanned, stacked = len(invars) - consts - carry, len(outvars) - carry
        changes["ft_in"] = ft.pack((ft.nones(consts), ft.nones(carry), ft.nones(scanned)))
        changes["ft_out"] = ft.pack((ft.nones(carry), ft.nones(stacked)))
    return eqn.replace(invars=list(invars), outvars=list(outvars), params={**eqn.params, **changes})


def user_line(eqn: Any, own: bool = False) -> str:
    """`file.py:12` of the user's code that made this equation, or an empty string. `own`: where an installed library
    made it, the line that called the library."""
    from jax._src import source_info_util

    frames = list(source_info_util.user_frames(eqn.source_info.traceback))
    frames = [f for f in frames if not f.file_name.startswith(_TRACERS)]
    if own:
        frames = [f for f in frames if "site-packages" not in f.file_name] or frames
    return f"{frames[0].file_name}:{frames[0].start_line}" if frames else ""


def ordered_effects(jaxpr: Any) -> tuple[Any, ...]:
    """Effects that must keep their order (ordered prints and callbacks), which only run on one device."""
    from jax._src import effects

    return tuple(e for e in open_jaxpr(jaxpr).effects if effects.ordered_effects.contains(e))


def weaken(array: Any) -> Any:
    """The same array with a weak type, as Python numbers have it (and what is made of them, until it meets another)."""
    from jax._src.lax import lax

    return lax._convert_element_type(array, weak_type=True)


def jit_disabled() -> bool:
    """Whether the user runs everything operation by operation (`jax.disable_jit`)."""
    config: Any = jax.config
    return bool(config.jax_disable_jit)


def deleted_argument_aborts() -> bool:
    """Whether calling a jitted function with a buffer that was given up ends the process instead of raising (on eight
    CPU devices: a segmentation fault on jax 0.10.2, a RuntimeError on jax 0.12.0.1)."""
    return tuple(jax.__version_info__[:2]) < (0, 12)


def keep_barriers() -> dict[str, Any]:
    """Compiler options under which the CPU compiler keeps optimization barriers until loops are formed.

    jax 0.10.2 drops them before: what stands behind one is computed again in every loop that reads it; jax 0.12.0.1
    keeps them. Only for the CPU: other compilers need the pass that this leaves out.
    """
    return {} if jax.__version_info__[:2] >= (0, 12) else {"xla_disable_hlo_passes": "cse_barrier_expander"}


def is_jitted(fn: Any) -> bool:
    """Whether `fn` was made by `jax.jit`."""
    return getattr(fn, "_jit_info", None) is not None


def static_arguments(fn: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """(static_argnums, static_argnames) of a function made by `jax.jit` or `nnx.jit`; empty for any other function."""
    info = getattr(fn, "_jit_info", None) or getattr(getattr(fn, "jitted_fn", None), "_jit_info", None)
    return (tuple(info.static_argnums), tuple(info.static_argnames)) if info is not None else ((), ())


# Shardy / MLIR: XLA's own partitioner, reached through jaxlib's MLIR bindings.

PASSES_PROPAGATE = "sdy-propagation-pipeline"
# A constant that two operations share relates nothing: Shardy gives each user its own before it propagates.
PASSES_RULES = ("sdy-constant-or-scalar-splitter", "func.func(sdy-populate-op-sharding-rules)")
# Without `enable-full-version` nothing is inserted.
PASSES_EXPLICIT = (
    "sdy-close-shardings",
    "func.func(sdy-insert-explicit-reshards{enable-full-version=true})",
    "func.func(sdy-reshard-to-collectives)",
)


@functools.cache
def mlir() -> types.SimpleNamespace:
    """The MLIR bindings of jaxlib: `ir`, `passmanager` and the `sdy` dialect. Raises UnsupportedJax, naming what is
    missing, when a pass or a class that the planner drives is not there."""
    check_version()
    try:
        from jax._src.interpreters.mlir import make_ir_context
        from jaxlib.mlir import ir, passmanager
        from jaxlib.mlir.dialects import sdy

        needed = ("TensorShardingAttr", "DimensionShardingAttr", "AxisRefAttr", "MeshAttr", "OpShardingRuleAttr")
        missing = [name for name in needed if not hasattr(sdy, name)]
        if missing:
            raise ImportError(f"jaxlib.mlir.dialects.sdy has no {', '.join(missing)}")
        with make_ir_context():
            for name in (PASSES_PROPAGATE, *PASSES_RULES, *PASSES_EXPLICIT, "cse"):
                passmanager.PassManager.parse(f"builtin.module({name})")
    except (ImportError, ValueError) as e:
        raise UnsupportedJax(
            f"XLA's partitioner (Shardy) cannot be driven from this jaxlib: {e}",
            hint=f"lensjax plans with {SUPPORTED}; jax {jax.__version__} is installed",
        ) from e
    return types.SimpleNamespace(ir=ir, passmanager=passmanager, sdy=sdy)


def run_passes(operation: Any, *passes: str, verify: bool = True) -> None:
    """Runs MLIR passes on a module operation, in place. Raises PartitionError with the compiler's words. The module is
    verified (if it may be wrong) before the first pass, not after each of some twenty: that took most of the time."""
    m = mlir()
    with operation.context, m.ir.Location.unknown(operation.context):
        try:
            _ = operation.verify() if verify else None
            (manager := m.passmanager.PassManager.parse(f"builtin.module({','.join(passes)})")).enable_verifier(False)
            manager.run(operation)
        except m.ir.MLIRError as e:
            raise PartitionError(
                f"XLA's partitioner does not take this program: {_mlir_words(str(e))}",
                hint="find the operation named above; a sharding constraint near it usually helps",
            ) from e


def _mlir_words(text: str) -> str:
    """What an MLIR error says, without its location's call stack: the operation, the innermost line, the message."""
    found = re.search(r'error: "([^"]*)"(.*?)\)*: (\'.*)', text)
    if not found:
        return text[:500]
    place = re.search(r'"([^"]+)":(\d+)', found[2])
    return f"{found[3][:300]}, in {found[1]}" + (f" at {place[1]}:{place[2]}" if place else "")


class ShardingRule(NamedTuple):
    """Shardy's rule of one operation. A mapping gives, for each value and each of its dimensions, factor indices."""

    factor_sizes: tuple[int, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    reduction: frozenset[int]
    replication: frozenset[int]
    permutation: frozenset[int]
    blocked: frozenset[int]


def sharding_rule(attribute: Any) -> ShardingRule:
    """`sdy.sharding_rule`, which PASSES_RULES puts on each operation that has one, as data."""
    sdy = mlir().sdy
    rule = sdy.OpShardingRuleAttr(attribute)

    def read(mappings: Any) -> tuple[tuple[tuple[int, ...], ...], ...]:
        tensors = [sdy.TensorMappingAttr(m).dim_mappings for m in mappings]
        return tuple(tuple(tuple(sdy.DimMappingAttr(d).factor_indices) for d in dims) for dims in tensors)

    return ShardingRule(
        factor_sizes=tuple(rule.factor_sizes),
        operands=read(rule.operand_mappings),
        results=read(rule.result_mappings),
        reduction=frozenset(rule.reduction_factors),
        replication=frozenset(rule.need_replication_factors),
        permutation=frozenset(rule.permutation_factors),
        blocked=frozenset(rule.blocked_propagation_factors),
    )


# --- ahead-of-time compile -----------------------------------------------------------------------------------------


def compile_only_devices(platform: str, topology: str, config: str = "", slices: int = 1) -> list[Any]:
    """Devices of a machine that is not here: good for meshes and for compiling, never for running.

    `topology` is "slices x hosts x GPUs" for cuda ("1x64x8") and "chip:shape" for tpu ("v5e:8x8"), where `slices`
    counts separate pods. Raises UnsupportedJax where jax has no such compiler for this platform.
    """
    from jax.experimental import topologies

    try:
        tpu = {"topology_name": topology, "num_slices": slices}
        named = tpu if platform == "tpu" else {"topology": topology, "target_config": config}
        made = topologies.get_topology_desc(platform=platform, **named)
    except (NotImplementedError, RuntimeError, ValueError) as e:
        raise UnsupportedJax(f"no ahead-of-time compiler for {platform} {topology}: {e}", code="no_compiler") from e
    return list(made.devices)


def lowered_facts(lowered: Any) -> tuple[str, int, tuple[bool, ...], tuple[bool, ...]]:
    """(platform, number of devices, inputs whose sharding is free, outputs whose sharding is free) of a Lowered; the
    last two are what jit would tell the compiler, the module itself does not carry them."""
    try:
        low = lowered._lowering
        args = low.compile_args
        free_in = tuple(_is_free(s) for s in args["in_shardings"])
        free_out = tuple(_is_free(s) for s in args["out_shardings"])
        effects = (False,) * len(args["ordered_effects"])
        return low._platforms[0], int(args["num_devices"]), effects + free_in, effects + free_out
    except (AttributeError, KeyError, TypeError, IndexError) as e:
        raise UnsupportedJax(f"jax {jax.__version__} keeps the facts of a lowered step elsewhere: {e!r}") from e


def lowered_arguments(lowered: Any) -> tuple[int, ...]:
    """Positions in the flattened arguments that the lowered module takes: jit drops arguments that are never read."""
    try:
        return tuple(sorted(lowered._lowering.compile_args["kept_var_idx"]))
    except (AttributeError, KeyError, TypeError) as e:
        raise UnsupportedJax(f"jax {jax.__version__} keeps the facts of a lowered step elsewhere: {e!r}") from e


def _is_free(sharding: Any) -> bool:
    from jax._src.interpreters import mlir
    from jax._src.sharding_impls import UnspecifiedValue  # pyright: ignore[reportPrivateImportUsage]

    return isinstance(sharding, UnspecifiedValue) or bool(mlir.contains_unconstrained(sharding))


def compile_module(
    bytecode: bytes,
    devices: Sequence[Any],
    free: tuple[Sequence[bool], Sequence[bool]],
    options: Mapping[str, Any],
) -> Any:
    """Compiles a StableHLO module for `devices` (compile-only or real); returns XLA's executable, not a jax Compiled.

    `options` are XLA flags by name, without dashes: a wrong one raises, where XLA_FLAGS would abort the process.
    """
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
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


def coordination() -> Any:
    """The client of JAX's coordination service (a key-value store that all processes see); None with one process."""
    from jax._src.distributed import global_state

    return global_state.client


def has_devices() -> bool:
    """Whether JAX has made its devices, after which no process can join others."""
    from jax._src.xla_bridge import backends_are_initialized

    return backends_are_initialized()


def cluster_parameters(address: Any, processes: Any, process: Any) -> tuple[Any, Any, Any]:
    """(address of process 0, number of processes, this one), known or None, as `jax.distributed` finds them."""
    from jax._src.clusters import ClusterEnv

    return ClusterEnv.auto_detect_unset_distributed_params(address, processes, process, None, None, 60)[:3]
