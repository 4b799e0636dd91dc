"""Which codec each leaf gets: a pure function of its path and shape."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp

from lensjax._errors import CodecError
from lensjax.comm.codec import Codec
from lensjax.comm.registry import parse_codec as parse

# Words in a path (lower case, whole words between "/" and "_") that name what is small and sensitive.
_SENSITIVE = frozenset("bias norm layernorm rmsnorm batchnorm groupnorm ln scale gain router".split())
_TABLES = frozenset("embed embedding embeddings embedder emb wte wpe head unembed".split())
_COARSE = ("int4", "powersgd")


@dataclasses.dataclass(frozen=True)
class Policy:
    """A codec for the large leaves, another for what should not be compressed. Call it with a path and a shape.

    codec:  for matrices of at least `least` bytes (as float32)
    small:  for smaller leaves, vectors, and leaves whose path names a norm, a bias or a router
    table:  for embeddings and output heads where `codec` is coarse (int4, powersgd): rows that few examples touch are
            lost in coarse steps
    pins:   {pattern: codec}, fnmatch on the "/"-joined path, first match wins, before everything else
    """

    codec: str | Codec = "int8"
    small: str | Codec = "bf16"
    table: str | Codec = "int8"
    least: int = 64 * 1024
    pins: Mapping[str, str | Codec] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        for spec in (self.codec, self.small, self.table, *self.pins.values()):
            parse(spec)

    def __call__(self, path: str, leaf: jax.ShapeDtypeStruct) -> Codec:
        for pattern, spec in self.pins.items():
            if fnmatch.fnmatchcase(path, pattern):
                return parse(spec)
        words = {w for part in path.lower().split("/") for w in (part, *part.split("_"))}
        names = {w.rstrip("0123456789") for w in words}
        main = parse(self.codec)
        if main == parse("exact"):
            return main
        if jnp.dtype(leaf.dtype).itemsize > 4:
            return parse("exact")  # float64 was asked for: nothing here keeps it
        if "gate" in names and len(leaf.shape) > 1 and min(leaf.shape[-2:]) * 8 <= max(leaf.shape[-2:]):
            return parse(self.small)  # a router that is called gate; a gated MLP's is not that narrow
        if len(leaf.shape) < 2 or math.prod(leaf.shape) * 4 < self.least or names & _SENSITIVE:
            return parse(self.small)
        if names & _TABLES and main.name in _COARSE:
            return parse(self.table)
        return main

    def check(self, paths: Sequence[str]) -> None:
        """Raises CodecError for a pin that matches no leaf: a misspelt one would compress what it should protect."""
        for pattern in self.pins:
            if not any(fnmatch.fnmatchcase(p, pattern) for p in paths):
                shown = ", ".join(paths[:8]) + (" ..." if len(paths) > 8 else "")
                raise CodecError(f"no leaf matches the pattern {pattern!r}", hint=f"leaves: {shown}")
