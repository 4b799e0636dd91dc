"""The decoder steps whose memory is compared with the GPU compiler's; run it to compile them anew (minutes).

python -m tests.cost.compiled_memory        needs the gpu-aot extra; prints MiB of temporaries, compiled and planned
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tests.partition.decoder import Config, Rules, abstract_mesh, fsdp, lowered, tensor

BASE = Config(layers=8, embed=1024, heads=16, kv=8, mlp=4096, vocab=8192, batch=16, seq=1024, dtype=jnp.bfloat16)


@dataclasses.dataclass(frozen=True)
class Case:
    config: Config
    mesh: dict[str, int]
    weights: dict[str, P]
    batch: Any
    gather: bool = False


CASES = {
    "fsdp": Case(BASE, {"d": 8}, fsdp("d"), P("d"), True),
    "fsdp_kept": Case(dataclasses.replace(BASE, remat=False, seq=256), {"d": 8}, fsdp("d"), P("d"), True),
    "dp": Case(dataclasses.replace(BASE, dtype=jnp.float32, seq=512), {"d": 8}, {}, P("d")),
    "tp": Case(dataclasses.replace(BASE, batch=4), {"t": 4}, tensor("t"), P()),
    "fsdp_tp": Case(BASE, {"d": 2, "t": 4}, tensor("t", "d"), P("d")),
    "hsdp": Case(BASE, {"r": 2, "d": 4}, fsdp("d"), P(("r", "d")), True),
}


def lower_case(case: Case, devices: Any = None) -> Any:
    rules = Rules(abstract_mesh(**case.mesh), case.weights, case.batch, case.gather)
    return lowered(case.config, rules, case.batch, "cuda", devices=devices)


def main() -> None:
    import math
    import os

    os.environ.setdefault("JAX_PLATFORMS", "cpu")

    import numpy as np
    from jax.sharding import AxisType, Mesh

    from lensjax.cost.memory import Habits, memory
    from lensjax.partition import partition
    from lensjax.verify.devices import Layout, compile_only, target

    for name, case in CASES.items():
        found = compile_only("h100-80gb", Layout(hosts=1, per_host=math.prod(case.mesh.values())))
        devices = np.array(found).reshape(tuple(case.mesh.values()))
        mesh = Mesh(devices, tuple(case.mesh), axis_types=(AxisType.Auto,) * len(case.mesh))
        options = dict(target("h100-80gb").options)
        compiled = lower_case(case, mesh).compile(options).memory_analysis().temp_size_in_bytes
        planned = memory(partition(lower_case(case)), Habits(2**25)).temporaries
        print(
            f"{name:10} compiled {compiled / 2**20:8.1f}  planned {planned / 2**20:8.1f}  {planned / compiled - 1:+.1%}"
        )


if __name__ == "__main__":
    main()
