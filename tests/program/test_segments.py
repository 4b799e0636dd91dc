"""What a forward computation stores for its backward."""

import jax
import jax.numpy as jnp

from lensjax import _jax
from lensjax.program.boundary import backward_passes
from lensjax.program.program import analyze
from lensjax.program.segments import forward_of, stored_values
from lensjax.program.values import nbytes, table


def test_what_a_matmul_reads_is_stored_and_what_is_fused_is_not():
    """Of `relu(x @ a) @ b` both the product and what the second matmul reads are in memory; of a chain of element-wise
    operations in front of a sum only what it begins with."""

    def loss(params, x):
        h = jax.nn.relu(x @ params["a"])
        y = h @ params["b"]
        return jnp.sum(jnp.tanh(jnp.sin(y) * 2.0))

    params = {"a": jnp.ones((8, 16)), "b": jnp.ones((16, 4))}
    p = analyze(jax.grad(loss), (params, jnp.ones((32, 8))))
    inner, values = _jax.open_jaxpr(p.jaxpr), table(p.jaxpr)
    (span,) = backward_passes(p.jaxpr)
    stored = stored_values(inner, forward_of(p.jaxpr, span, values))
    sizes = sorted(nbytes(v) // 4 for v in stored if v in values.made and v.aval.dtype == jnp.float32)
    assert sizes == [32 * 4, 32 * 16, 32 * 16]
