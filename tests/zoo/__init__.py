"""The model zoo: small training steps as people write them, one registry for every test.

    from tests.zoo import FAMILIES
    step, init, batch = FAMILIES["mlp"].make()                    # or .make(with_grads=True)
    state, metrics = jax.jit(step)(init(jax.random.key(0)), batch(jax.random.key(1)))

A step must stay unmodified user code: nothing here knows about meshes or shardings.
"""

from tests.zoo import (
    cnn,
    control_flow,
    custom_vjp,
    dlrm,
    encoder_decoder,
    gpt,
    graph,
    llama,
    lora,
    losses,
    mixed,
    mlp,
    moe,
    recurrent,
    resnet,
    two_tower,
    unet,
    vit,
)
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
        resnet.FAMILY,
        llama.FAMILY,
        vit.FAMILY,
        encoder_decoder.FAMILY,
        moe.DENSE,
        moe.RAGGED,
        recurrent.LSTM_SCAN,
        recurrent.MAMBA,
        unet.FAMILY,
        graph.FAMILY,
        two_tower.FAMILY,
        control_flow.FAMILY,
        custom_vjp.FAMILY,
        lora.FAMILY,
        losses.SUM,
        losses.WEIGHTED,
        llama.BF16,
        mixed.FAMILY,
    )
}

__all__ = ["FAMILIES", "Case", "Family", "widen"]
