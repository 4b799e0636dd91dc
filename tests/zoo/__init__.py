"""The model zoo: small training steps as people write them, one registry for every test.

    from tests.zoo import FAMILIES
    step, init, batch = FAMILIES["mlp"].make()                    # or .make(with_grads=True)
    state, metrics = jax.jit(step)(init(jax.random.key(0)), batch(jax.random.key(1)))

A step must stay unmodified user code: nothing here knows about meshes or shardings.
"""

from tests.zoo import cnn, dlrm, gpt, mlp
from tests.zoo.base import Case, Family, widen

FAMILIES: dict[str, Family] = {
    f.name: f
    for f in (
        mlp.FAMILY,
        cnn.FAMILY,
        gpt.UNROLLED,
        gpt.SCAN,
        gpt.TIED,
        dlrm.FAMILY,
    )
}

__all__ = ["FAMILIES", "Case", "Family", "widen"]
