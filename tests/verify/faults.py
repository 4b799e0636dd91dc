"""Seeded faults: a scheme with one thing wrong, and the finding it must give. Clean programs give none."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tests.verify import programs
from tests.verify.programs import Program, Scheme, Writer


@dataclasses.dataclass(frozen=True)
class Fault:
    """`kind`: the finding expected. `line`: text that the finding's line of code must hold ("" where none is to blame).
    `loops`: the fault needs a loop over the layers: "unrolled" then is a partly unrolled scan. `flat`: it needs
    unrolled layers: "scanned" then is a wholly unrolled scan.
    """

    kind: str
    scheme: Scheme
    line: str = ""
    loops: bool = False
    flat: bool = False


def _f32_gather(wr: Writer, name: str, w):
    return wr.gathered(name, w).astype(jnp.bfloat16)


def _clipped_whole(wr: Writer, path, g):
    """Gradients made whole to be clipped, then split again by the update."""
    g = wr.put(g, *[None] * g.ndim)
    return g / jnp.maximum(1.0, jnp.sqrt(jnp.sum(g * g)))


def _hoisted(wr: Writer, name: str, w):
    plain = {v: k for k, v in wr.names.items()}[name] if name in wr.names.values() else name
    spec = wr.use_spec(plain) if plain in programs.TENSOR else P()
    lead = [None] * (w.ndim - len(wr.shapes[plain]))
    return wr.put(w, *lead, *spec)


def _split_table(wr: Writer, name: str, w):
    if name == "embed":
        return wr.put(w.astype(jnp.bfloat16), wr.model, wr.data)
    return wr.gathered(name, w.astype(jnp.bfloat16))


def _few_bits(wr: Writer, path, g):
    """Gradients in 8 bits, summed in 32."""
    if g.ndim < 2:
        return g

    def total(g):
        scale = jnp.maximum(jnp.max(jnp.abs(g)), 1e-12) / 127
        codes = jnp.round(g / scale).astype(jnp.int8)
        return jax.lax.psum(codes.astype(jnp.int32), wr.data).astype(jnp.float32) * scale / 8

    return jax.shard_map(total, mesh=wr.mesh, in_specs=P(), out_specs=P(), check_vma=False)(g)


def _no_tensor(name: str, spec: P, whole: tuple[str, ...] = ("up", "down")) -> P:
    """Some weights without their tensor axis, whatever the axes are called."""
    if name not in whole:
        return spec
    keep = [(d[-1] if isinstance(d, tuple) else d) for d in spec]
    at = programs.TENSOR[name]
    return P(*[None if i == at else d for i, d in enumerate(keep)])


def _even_use(wr: Writer, name: str, w):
    """Attention weights split over the tensor axis at their use, which does not divide the heads."""
    w = w.astype(jnp.bfloat16)
    if name in ("q", "k", "v"):
        return wr.put(w, None, wr.model, None)
    if name == "o":
        return wr.put(w, wr.model, None, None)
    return wr.gathered(name, w)


_FSDP = Scheme(shape=(8, 1), tensor=False)
_HEADS = {n: (programs.WIDTH, 5, programs.HEAD) for n in "qkv"} | {"o": (5, programs.HEAD, programs.WIDTH)}

FAULTS: dict[str, Fault] = {
    "unconstrained carry": Fault("batch_lost", Scheme(pin=False), "[tokens]"),
    "missing donation": Fault("not_donated", Scheme(donate=False)),
    "f32 master gathered": Fault("wide_wire", dataclasses.replace(_FSDP, weight=_f32_gather), "astype"),
    "optimizer replicated": Fault("optimizer_replicated", dataclasses.replace(_FSDP, moments=lambda n, s: P())),
    "logits gathered": Fault(
        "gathered_whole", Scheme(logits=lambda wr, x: wr.put(x, wr.data, None, None)), "with_sharding_constraint"
    ),
    "transposed spec": Fault("resharded", Scheme(inside=lambda wr, h: wr.put(h, None, wr.data, wr.model)), ""),
    "gather hoisted": Fault("gather_hoisted", dataclasses.replace(_FSDP, stack=_hoisted), "", loops=True),
    "recompute undone": Fault(
        "remat_undone",
        Scheme(shape=(8, 1), tensor=False, fsdp=False, remat=lambda f: jax.checkpoint(f, prevent_cse=False)),
        "",
        flat=True,
    ),
    "uneven padding": Fault(
        "padding",
        Scheme(shapes=_HEADS, override=lambda n, s: _no_tensor(n, s, ("q", "k", "v", "o")), weight=_even_use),
        "",
    ),
    "int8 sum widened": Fault(
        "widened_wire", Scheme(shape=(8, 1), tensor=False, fsdp=False, gradients=_few_bits), "psum"
    ),
    "leaf left replicated": Fault(
        "left_replicated", dataclasses.replace(_FSDP, override=lambda n, s: P() if n == "embed" else s)
    ),
    "table split twice": Fault("resharded", Scheme(weight=_split_table), "[tokens]"),
    "axis across nodes": Fault("axis_order", Scheme(devices=lambda d: d.reshape(4, 2).T)),
    "gradient whole": Fault("gather_then_slice", dataclasses.replace(_FSDP, gradients=_clipped_whole), ""),
    "work repeated": Fault("repeated_work", Scheme(override=_no_tensor), "bsf"),
}


def repaired(fault: Fault) -> Fault:
    """The same program without its fault."""
    s = fault.scheme
    sound = Scheme(s.shape, s.fsdp, s.tensor, remat=jax.checkpoint if s.remat else None)
    return dataclasses.replace(fault, kind="", line="", scheme=sound)


# Each repaired program once, by the name of the first fault that it is without.
SOUND: dict[str, Fault] = {}
for _name, _fault in FAULTS.items():
    if repaired(_fault) not in SOUND.values():
        SOUND[f"without {_name}"] = repaired(_fault)

VARIANTS: dict[str, Callable[[Fault], Program]] = {
    "scanned": lambda f: programs.plain(dataclasses.replace(f.scheme, unroll=programs.SCANNED if f.flat else 1)),
    "renamed": lambda f: programs.plain(
        dataclasses.replace(f.scheme, unroll=programs.SCANNED if f.flat else 1),
        names=programs.RENAMED, axes=("rows", "cols"),
    ),
    "unrolled": lambda f: programs.plain(dataclasses.replace(f.scheme, unroll=2 if f.loops else 1), scan=f.loops),
    "nnx": lambda f: programs.in_nnx(f.scheme, scan=f.loops),
}  # fmt: skip

CLEAN: dict[str, Callable[[], Program]] = {
    "dp": lambda: programs.plain(Scheme(shape=(8, 1), fsdp=False, tensor=False)),
    "zero1": lambda: programs.plain(Scheme(shape=(8, 1), fsdp=False, tensor=False, moments=_split_moment), scan=False),
    "fsdp": lambda: programs.plain(_FSDP),
    "fsdp unrolled": lambda: programs.plain(_FSDP, scan=False),
    "fsdp nnx": lambda: programs.in_nnx(_FSDP),
    "fsdp nnx scanned": lambda: programs.in_nnx(_FSDP, scan=True),
    "fsdp recompute": lambda: programs.plain(dataclasses.replace(_FSDP, remat=jax.checkpoint)),
    "fsdp micro-batches": lambda: programs.plain(dataclasses.replace(_FSDP, steps=2)),
    "tp": lambda: programs.plain(Scheme(fsdp=False)),
    "tp sequence": lambda: programs.plain(Scheme(fsdp=False, sequence=True)),
    "fsdp tp": lambda: programs.plain(Scheme()),
    "fsdp tp renamed": lambda: programs.plain(Scheme(), names=programs.RENAMED, axes=("rows", "cols")),
    "fsdp tp nnx": lambda: programs.in_nnx(Scheme()),
    "experts": programs.mixture,
    "convolutions": programs.convolutions,
    "evaluation": programs.forward,
}


def _split_moment(name: str, spec: P) -> P:
    shape = programs.SHAPES.get(name, ())
    at = programs.FULLY.get(name)
    lead = len(spec) - len(shape) if shape else 0
    if at is None:
        return spec
    dims = [None] * max(len(spec), len(shape))
    dims[at + lead] = "data"
    return P(*dims)
