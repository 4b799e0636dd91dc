"""The child process of a compile: reads a request folder, compiles, writes the result there. Run by `aot`.

A compiler that aborts, hangs or eats the memory takes only this process with it; what it writes to standard error is
evidence (XLA reports "involuntary full rematerialization" there and nowhere else).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(folder: Path) -> None:
    """Compiles `folder/module.mlirbc` as `folder/request.json` says; writes result.json, or error.json."""
    from lensjax import _jax
    from lensjax.verify.artifact import Memory
    from lensjax.verify.devices import Layout, compile_only, target
    from lensjax.verify.place import in_order

    request = json.loads((folder / "request.json").read_text("utf-8"))
    layout = Layout(**request["layout"])
    chip = target(request["target"])
    devices = compile_only(request["target"], layout)
    devices = in_order(devices, request["order"])[: request["devices"]]
    dump = folder / "dump"
    options = {**chip.options, **request["options"]}
    start = time.perf_counter()
    made = _jax.compile_module(
        (folder / "module.mlirbc").read_bytes(),
        devices,
        (request["free_in"], request["free_out"]),
        {**options, **_dump_options(chip.platform, dump)},
    )
    seconds = time.perf_counter() - start
    result: dict[str, Any] = {
        "hlo": "\n\n".join(m.to_string() for m in made.hlo_modules()),
        "memory": Memory.of(made.get_compiled_memory_stats()).__dict__,
        "seconds": seconds,
        "options": list(options.items()),
        "assignment": _dumped(dump, "*after_optimizations-buffer-assignment.txt"),
        "liveness": _dumped(dump, "*after_optimizations-live-range.txt"),
    }
    (folder / "result.json").write_text(json.dumps(result), "utf-8")


def _dump_options(platform: str, folder: Path) -> dict[str, Any]:
    """Flags that make XLA write its buffer assignment, and not the kernels."""
    if platform == "tpu":
        return {}  # libtpu writes none of these
    return {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True, "xla_dump_emitter_re": "none"}


def _dumped(folder: Path, pattern: str) -> str:
    """The largest dumped file of that name: XLA also dumps the small modules it compiles on the way."""
    found = sorted(folder.glob(pattern), key=lambda p: p.stat().st_size)
    return found[-1].read_text("utf-8", errors="replace") if found else ""


if __name__ == "__main__":
    where = Path(sys.argv[1])
    try:
        main(where)
    except Exception as e:  # whatever it is, the parent must hear of it in one piece
        told = {"type": type(e).__name__, "message": str(e), "code": getattr(e, "code", "")}
        (where / "error.json").write_text(json.dumps(told), "utf-8")
        sys.exit(1)
