"""Models large enough that activations fill a GPU: `MODELS[name](batch) -> (step, state, batch)`, as shapes. None of
them recomputes anything by itself."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from benchmarks.recompute_models import mamba
from lensjax.models import moe
from lensjax.models.targets import target


def gpt(batch: int, scan: bool) -> tuple[Any, Any, Any]:
    """GPT of 12 layers, 768 wide, on 1,024 tokens."""
    sizes = dict(layers=12, width=768, heads=12, kv_heads=12, mlp=3072, vocab=8192)
    return target("gpt3-tiny", batch, 1024, scan=scan, remat="none", **sizes)


def vit(batch: int) -> tuple[Any, Any, Any]:
    """ViT-B/16 on 224 x 224."""
    return target("vit-g", batch, width=768, layers=12, heads=12, mlp=3072, patch=16, remat=False)


def experts(batch: int) -> tuple[Any, Any, Any]:
    """A Mixtral of 8 layers, 768 wide, 8 experts of which a token takes two, on 1,024 tokens."""
    base = moe.CONFIGS["mixtral-8x7b"].base
    base = dataclasses.replace(base, vocab=8192, width=768, layers=8, heads=12, kv_heads=4, mlp=2048, remat="none")
    return target("mixtral-8x7b", batch, 1024, base=base, expert_mlp=2048)


def unet(batch: int) -> tuple[Any, Any, Any]:
    """The U-Net of Stable Diffusion at three resolutions with half of its channels."""
    return target("unet-sd", batch, channels=(160, 320, 640), attends=(False, True, True), heads=8, remat=False)


def state_space(batch: int) -> tuple[Any, Any, Any]:
    """A Mamba-like model of 8 layers, 512 wide, on 512 tokens."""
    return mamba(batch=batch, seq=512, layers=8, width=512, states=16, vocab=8192, dtype=jnp.bfloat16)


MODELS: dict[str, Callable[[int], tuple[Any, Any, Any]]] = {
    "gpt-scan": functools.partial(gpt, scan=True),
    "gpt-unrolled": functools.partial(gpt, scan=False),
    "vit": vit,
    "moe": experts,
    "mamba": state_space,
    "unet": unet,
}
