"""A Keras 3 model on its JAX backend: the stateless step that Keras documents, decorated as it is.

pip install -e ".[examples]"
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import demo
import keras

model = keras.Sequential([
    keras.Input((32,)),
    keras.layers.Dense(256, activation="relu"),
    keras.layers.BatchNormalization(),
    keras.layers.Dense(256, activation="relu"),
    keras.layers.Dense(10),
])  # fmt: skip
optimizer = keras.optimizers.Adam(1e-2)
optimizer.build(model.trainable_variables)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def create(rng):
    """Keras keeps its variables in lists, in the order in which the layers were made."""
    read = lambda variables: [v.value for v in variables]
    return {
        "trainable": read(model.trainable_variables),
        "other": read(model.non_trainable_variables),
        "optimizer": read(optimizer.variables),
    }


def train_step(state, batch):
    import jax

    def loss_fn(trainable):
        logits, other = model.stateless_call(trainable, state["other"], batch["x"], training=True)
        return loss_of(batch["y"], logits), other

    (loss, other), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["trainable"])
    trainable, moments = optimizer.stateless_apply(state["optimizer"], grads, state["trainable"])
    return {"trainable": trainable, "other": other, "optimizer": moments}, {"loss": loss}


def batch_of(rng):
    return {"x": rng.standard_normal((64, 32), "float32"), "y": rng.integers(0, 10, 64).astype("int32")}


if __name__ == "__main__":
    demo.run(train_step, create, batch_of, plan="dp=2,fsdp=4")
