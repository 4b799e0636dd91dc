"""Moving gradients and weights over slow links: hierarchy, codecs, error feedback.

Usable by hand inside a `jax.shard_map`; docs/comm.md shows how.
"""

from lensjax.comm.check import checksum, differing, keep_if, replicas_agree
from lensjax.comm.codec import Codec, Exact, VectorCodec
from lensjax.comm.floats import BFloat16, Float8
from lensjax.comm.group import Group
from lensjax.comm.integers import Int4, Int8
from lensjax.comm.layout import BUCKET, Bucket, Layout, buckets
from lensjax.comm.low_rank import PowerSGD
from lensjax.comm.policy import Policy
from lensjax.comm.reduce import all_reduce, init_state, reduce_stacked, reduction, state_shapes, wire_bytes
from lensjax.comm.registry import codecs, parse_codec
from lensjax.comm.scatter import Scatter, behind, scatter, scatter_stacked, scatter_state
from lensjax.comm.weights import (
    SECONDARY,
    all_gather,
    gather_bytes,
    gather_weight,
    reduce_scatter,
    residual_size,
    scatter_bytes,
    secondary_copy,
)

__all__ = [
    "BUCKET",
    "SECONDARY",
    "BFloat16",
    "Bucket",
    "Codec",
    "Exact",
    "Float8",
    "Group",
    "Int4",
    "Int8",
    "Layout",
    "Policy",
    "PowerSGD",
    "Scatter",
    "VectorCodec",
    "all_gather",
    "all_reduce",
    "behind",
    "buckets",
    "checksum",
    "codecs",
    "differing",
    "gather_bytes",
    "gather_weight",
    "init_state",
    "keep_if",
    "parse_codec",
    "reduce_scatter",
    "reduce_stacked",
    "reduction",
    "replicas_agree",
    "residual_size",
    "scatter",
    "scatter_bytes",
    "scatter_stacked",
    "scatter_state",
    "secondary_copy",
    "state_shapes",
    "wire_bytes",
]
