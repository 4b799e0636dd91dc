"""One host of `slow_link.py` on PyTorch's side: DistributedDataParallel over gloo, plain and with its own hooks.

One process a host, so that a gradient crosses the link once, as it does in a hierarchical reduction.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from slow_link_model import BATCH, BETA1, BETA2, EPS, HEADS, LAYERS, RATE, parameters, serve
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

METHODS = ("torch-local", "torch-ddp", "torch-ddp-bf16", "torch-ddp-powersgd")


def bf16_hook(group, bucket):
    """PyTorch's own hook under another name: by its own name DDP accepts it with NCCL only."""
    return default_hooks.bf16_compress_hook(group, bucket)


class Decoder(nn.Module):
    """The same decoder; each layer's matrices are parameters of their own, as DDP's overlap wants them."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterDict()
        for name, value in parameters().items():
            pieces = {f"{name}/{i}": value[i] for i in range(LAYERS)} if name.startswith("layers/") else {name: value}
            for key, piece in pieces.items():
                self.weights[key.replace("/", "_")] = nn.Parameter(torch.from_numpy(piece.copy()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        w = self.weights
        norm = lambda h, g: h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6) * g
        h = w["embed"][tokens[:, :-1]] + w["positions"]
        for i in range(LAYERS):
            q, k, v = (norm(h, w[f"layers_norm1_{i}"]) @ w[f"layers_qkv_{i}"]).chunk(3, -1)
            heads = lambda x: x.reshape(*x.shape[:2], HEADS, -1).transpose(1, 2)
            mixed = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True)
            h = h + mixed.transpose(1, 2).reshape(h.shape) @ w[f"layers_out_{i}"]
            up = norm(h, w[f"layers_norm2_{i}"]) @ w[f"layers_up_{i}"]
            h = h + F.gelu(up, approximate="tanh") @ w[f"layers_down_{i}"]
        logits = norm(h, w["norm"]) @ w["embed"].T
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


def main() -> None:
    host, address = int(sys.argv[1]), sys.argv[2]
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address.split(":")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=host, world_size=2)
    models, optimizers = {}, {}
    for method in METHODS:
        # PowerSGD's hook sends from callbacks, whose order over several buckets may differ between the hosts (seen with
        # gloo: one host's message is taken for another bucket's): one bucket holds all.
        model = DistributedDataParallel(Decoder(), bucket_cap_mb=64 if method == "torch-ddp-powersgd" else None)
        if method == "torch-ddp-bf16":
            model.register_comm_hook(dist.group.WORLD, bf16_hook)
        elif method == "torch-ddp-powersgd":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        models[method] = model
        optimizers[method] = torch.optim.Adam(model.parameters(), RATE, (BETA1, BETA2), EPS)

    def step(method: str, tokens: np.ndarray) -> float:
        model, optimizer = models[method], optimizers[method]
        mine = torch.from_numpy(tokens[host * BATCH // 2 : (host + 1) * BATCH // 2]).long()
        optimizer.zero_grad()
        if method == "torch-local":  # what a step takes without the link
            with model.no_sync():
                loss = model(mine)
                loss.backward()
        else:
            loss = model(mine)
            loss.backward()
        optimizer.step()
        return loss.item()

    serve(step, dict.fromkeys(METHODS))


main()
