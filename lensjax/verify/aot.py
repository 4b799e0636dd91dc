"""Compile a step for a cluster that is not here, in a child process with limits, once.

    artifact = compile_for(jitted.trace(*shapes), Cluster.parse("dgx-h100:64"))

XLA's own GPU and TPU compilers do the work (DESIGN 4.2). The step is traced here and lowered for the cluster's
platform; its mesh may be of emulated devices, compile-only devices, or abstract: only sizes and order are used.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lensjax import _jax
from lensjax._errors import ClusterError, CompileError
from lensjax.verify import cache
from lensjax.verify.artifact import Artifact, Memory, bytecode
from lensjax.verify.devices import TPU_ENVIRONMENT, Layout, Target, missing, target
from lensjax.verify.place import layout_of, target_of

if TYPE_CHECKING:
    from lensjax.topology.cluster import Cluster

UNPROVEN_ON_CPU = (
    "compiled by XLA:CPU on emulated devices: memory, schedule, overlap and host offload of the real device are not "
    "proven, reduce-scatter appears as all-reduce, and bf16 travels as f32"
)


def compile_for(
    step: Any,
    cluster: Cluster,
    *,
    backend: str | None = None,
    order: Sequence[int] | None = None,
    flags: Mapping[str, Any] | str | None = None,
    time_limit: float = 600.0,
    memory_limit: float | None = None,
    use_cache: bool = True,
    fallback: bool = True,
) -> Artifact:
    """Compiles a `jax.stages.Traced` (or a Lowered, which is tied to its platform) for the devices of a cluster.

    `order`: device id of each position in the step's flattened mesh (default: in order).
    `backend`: "cuda", "tpu" or "cpu" instead of the cluster's own; `flags`: XLA flags, a mapping or as in XLA_FLAGS.
    `time_limit` in seconds, `memory_limit` in bytes of the child. Where the compiler is not installed and `fallback` is
    true, compiles on emulated CPU devices and says in `notes` what that does not prove.
    Raises CompileError with what the compiler said; its code is no_compiler, flag, timeout, memory, aborted or compile.
    """
    chip, notes = _choose(cluster, backend, fallback)
    lowered = step.lower(lowering_platforms=(chip.platform,)) if hasattr(step, "jaxpr") else step
    platform, count, free_in, free_out = _jax.lowered_facts(lowered)
    if platform != chip.platform:
        raise CompileError(
            f"the step was lowered for {platform}, the cluster is {chip.platform}",
            hint="pass jitted.trace(...) instead of jitted.lower(...)",
        )
    request = {
        "target": chip.name,
        "layout": dataclasses.asdict(layout_of(cluster, chip, count)),
        "devices": count,
        "order": list(order) if order is not None else None,
        "free_in": free_in,
        "free_out": free_out,
        "options": parse_flags(flags),
    }
    module = bytecode(lowered)
    name = cache.key(module, request, (chip.config, chip.platform))
    found = cache.load(name) if use_cache else None
    if found is None:
        found = run_child(module, request, time_limit=time_limit, memory_limit=memory_limit)
        if use_cache:
            cache.store(name, found)
    return Artifact.from_json(
        {**found, "backend": chip.platform, "target": chip.name, "devices": count, "notes": notes}
    )


def _choose(cluster: Cluster, backend: str | None, fallback: bool) -> tuple[Target, tuple[str, ...]]:
    """The target to compile for, and what has to be said about it."""
    if backend == "cpu":
        return target("cpu"), (UNPROVEN_ON_CPU,)
    try:
        chip = target_of(cluster.device)
    except ClusterError as e:
        if not fallback:
            raise
        return target("cpu"), (f"{e.message}; {UNPROVEN_ON_CPU}",)
    if backend not in (None, chip.platform):
        raise CompileError(
            f"{cluster.name} is a {chip.platform} cluster, not {backend}", hint="leave backend out, or say cpu"
        )
    if chip.platform == "cpu":
        return chip, (UNPROVEN_ON_CPU,)
    if not (why := missing(chip.platform)):
        return chip, ()
    if not fallback:
        raise CompileError(f"{cluster.name} cannot be compiled for here: {why}", code="no_compiler", hint=why)
    return target("cpu"), (f"{why}; {UNPROVEN_ON_CPU}",)


def parse_flags(flags: Mapping[str, Any] | str | None) -> dict[str, Any]:
    """{"xla_gpu_foo": True} from a mapping, or from "--xla_gpu_foo=true --xla_gpu_bar"."""
    if flags is None:
        return {}
    if not isinstance(flags, str):
        return {k.lstrip("-"): v for k, v in flags.items()}
    pairs = (word.lstrip("-").partition("=") for word in flags.split())
    words = {"true": True, "false": False}
    return {name: words.get(value, value) if sign else True for name, sign, value in pairs}


def run_child(
    module: bytes, request: Mapping[str, Any], *, time_limit: float, memory_limit: float | None = None
) -> dict[str, Any]:
    """One compile in a process of its own; see `_child` for the request. Raises CompileError."""
    with tempfile.TemporaryDirectory(prefix="lensjax-") as scratch:
        folder = Path(scratch)
        (folder / "module.mlirbc").write_bytes(module)
        (folder / "request.json").write_text(json.dumps(request), "utf-8")
        with open(folder / "log", "wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-m", "lensjax.verify._child", scratch],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=_environment(request),
            )  # fmt: skip
            try:
                status = _wait(child, time_limit, memory_limit)
            finally:
                child.kill()
                child.wait()
        said = (folder / "log").read_text("utf-8", errors="replace")
        if status == 0 and (folder / "result.json").exists():
            return {**json.loads((folder / "result.json").read_text("utf-8")), "log": said[-200_000:]}
        raise _failure(folder, status, said)


def _environment(request: Mapping[str, Any]) -> dict[str, str]:
    """The child's environment: the CPU client only, none of the parent's XLA flags, lensjax importable."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS", "LIBTPU_INIT_ARGS")}
    root = str(Path(__file__).resolve().parents[2])
    env["PYTHONPATH"] = os.pathsep.join([root, *filter(None, [env.get("PYTHONPATH")])])
    env["JAX_PLATFORMS"] = "cpu"
    env |= TPU_ENVIRONMENT
    if target(request["target"]).platform == "cpu":
        env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={Layout(**request['layout']).count}"
    return env


def _wait(child: subprocess.Popen, time_limit: float, memory_limit: float | None) -> int:
    """The child's exit status; raises CompileError when it takes too long or too much."""
    end = time.monotonic() + time_limit
    while True:
        try:
            return child.wait(0.2 if memory_limit else max(end - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            used = resident_bytes(child.pid)
            if memory_limit and used > memory_limit:
                raise CompileError(
                    f"the compiler took {used / 2**30:.1f} GiB of memory, the limit is {memory_limit / 2**30:.1f}",
                    hint="raise memory_limit, or scan over the layers instead of unrolling them", code="memory",
                ) from None  # fmt: skip
            if time.monotonic() > end:
                raise CompileError(
                    f"no result of the compiler after {time_limit:.0f} s",
                    hint="raise time_limit, or scan over the layers instead of unrolling them", code="timeout",
                ) from None  # fmt: skip


def resident_bytes(pid: int) -> int:
    """Memory of a process in use (Linux; 0 elsewhere, where no memory limit is kept)."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError, ValueError):
        return 0


def _failure(folder: Path, status: int, said: str) -> CompileError:
    if (folder / "error.json").exists():
        told = json.loads((folder / "error.json").read_text("utf-8"))
        if "No such compile option" in told["message"]:
            return CompileError(told["message"], hint="this compiler has no such flag: leave it out", code="flag")
        if told["code"] == "no_compiler":
            return CompileError(told["message"], code="no_compiler", hint="see the extras gpu-aot and tpu-aot")
        return CompileError(f"{told['type']}: {told['message'][:4000]}")
    last = "\n".join(said.strip().splitlines()[-15:])
    return CompileError(
        f"the compiler ended with status {status} and said:\n{last}",
        hint="a smaller program that still does this is worth reporting to XLA",
        code="aborted",
    )


__all__ = ["Artifact", "Memory", "compile_for", "parse_flags", "run_child"]
