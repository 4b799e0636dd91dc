"""The built-in targets beside the decoders: for each, its module, its batch and its optimizer, as shapes."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lensjax._errors import UsageError

Shapes = dict[str, jax.ShapeDtypeStruct]


def _tokens(*names: str) -> Callable[[Any, int, int | None], Shapes]:
    return lambda c, batch, seq: {n: jax.ShapeDtypeStruct((batch, seq), jnp.int32) for n in names}


def _images(c: Any, batch: int, seq: int | None) -> Shapes:
    side = (batch, c.image, c.image, 3)
    return {"image": jax.ShapeDtypeStruct(side, jnp.float32), "label": jax.ShapeDtypeStruct((batch,), jnp.int32)}


def _latents(c: Any, batch: int, seq: int | None) -> Shapes:
    real = lambda *shape: jax.ShapeDtypeStruct((batch, *shape), jnp.float32)
    image = real(c.side, c.side, c.latent)
    return {"latent": image, "noise": image, "time": real(), "text": real(*c.text)}


def _clicks(c: Any, batch: int, seq: int | None) -> Shapes:
    return {
        "dense": jax.ShapeDtypeStruct((batch, c.dense), jnp.float32),
        "sparse": jax.ShapeDtypeStruct((batch, len(c.rows)), jnp.int32),
        "clicked": jax.ShapeDtypeStruct((batch,), jnp.float32),
    }


@dataclasses.dataclass(frozen=True)
class Kind:
    """Targets of one module: their names, the batch, and whether it has a sequence."""

    module: str
    names: tuple[str, ...]
    batch: Callable[[Any, int, int | None], Shapes]
    sequence: bool


_RESNETS = tuple(f"wide-resnet-{n}" for n in ("250m", "500m", "1b", "2b", "4b", "6.8b", "13b", "tiny"))
KINDS = (
    Kind("moe", ("mixtral-8x7b", "deepseek-v3", "mixtral-tiny", "deepseek-tiny"), _tokens("inputs", "targets"), True),
    Kind("encoder_decoder", ("t5-11b", "t5-tiny"), _tokens("source", "inputs", "targets"), True),
    Kind("vision", ("vit-g", "vit-tiny", *_RESNETS), _images, False),
    Kind("unet", ("unet-sd", "unet-tiny"), _latents, False),
    Kind("recommender", ("dlrm", "dlrm-tiny"), _clicks, False),
)
NAMES: dict[str, Kind] = {n: kind for kind in KINDS for n in kind.names}


def make(name: str, batch: int, seq: int | None, optimizer: optax.GradientTransformation, **changes: Any) -> Any:
    """(step, abstract state, abstract batch) of a target in NAMES. Raises UsageError for a wrong field or size."""
    kind = NAMES[name]
    if seq is not None and not kind.sequence:
        raise UsageError(f"{name} has no sequence: leave --seq out")
    if seq is None and kind.sequence:
        raise UsageError(f"{name} needs --seq", hint="for example --seq 4096")
    module = importlib.import_module(f"lensjax.models.{kind.module}")
    config = module.CONFIGS[name]
    try:
        config = dataclasses.replace(config, **changes)
    except TypeError as e:
        fields = ", ".join(f.name for f in dataclasses.fields(config))
        raise UsageError(f"cannot change {name}: {e}", hint=f"the fields are: {fields}") from e
    tx = module.optimizer() if hasattr(module, "optimizer") else optimizer
    state = jax.eval_shape(lambda: module.create_state(config, jax.random.key(0), tx))
    return module.train_step, state, kind.batch(config, batch, seq)
