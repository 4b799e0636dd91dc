"""The model zoo: small training steps as people write them, one registry for every test.

    from tests.zoo import FAMILIES
    family = FAMILIES["mlp"]
    step, init, batch = family.make()                             # or .make(with_grads=True)
    state, metrics = family.call(jax.jit(step), init(jax.random.key(0)), batch(jax.random.key(1)))

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
    nnx_dense,
    nnx_text,
    nnx_vision,
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
        nnx_dense.MLP_SPLIT,
        nnx_dense.TWO_TOWER,
        nnx_dense.LORA,
        nnx_vision.BATCHNORM,
        nnx_vision.VIT,
        nnx_text.UNROLLED,
        nnx_text.SCAN,
        nnx_text.RNN,
    )
}

__all__ = ["FAMILIES", "Case", "Family", "widen"]
