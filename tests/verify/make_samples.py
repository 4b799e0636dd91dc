"""Writes the HLO texts that the parser tests read: python -m tests.verify.make_samples NAME [cuda|cpu|tpu ...]

Run it with each supported jax and compiler; NAME is the jax version in the file names ("0.10.2").
"""

from __future__ import annotations

import gzip
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "samples"


def main(version: str, backends: list[str]) -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    from lensjax.topology.cluster import Cluster
    from lensjax.verify.aot import compile_for
    from tests.verify import programs

    made = {
        "decoder": lambda: programs.plain(programs.Scheme()),
        "experts": programs.mixture,
        "convolutions": programs.convolutions,
    }
    clusters = {"cuda": "dgx-h100:1", "cpu": "cpu:8", "tpu": "tpu-v5e:2x4"}
    for backend in backends:
        for name, make in made.items():
            program = make()
            traced = program.step.trace(*program.arguments)
            artifact = compile_for(traced, Cluster.parse(clusters[backend]), fallback=False)
            with gzip.GzipFile(FOLDER / f"{name}-{backend}-{version}.hlo.gz", "wb", mtime=0) as f:
                f.write(artifact.hlo.replace(str(Path.cwd()), "/home/user").encode())
            print(name, backend, len(artifact.hlo), f"{artifact.seconds:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
