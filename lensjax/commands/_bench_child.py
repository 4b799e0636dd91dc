"""The process in which `lensjax bench` measures: `python -m lensjax.commands._bench_child FOLDER JOURNAL`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from lensjax._errors import LensjaxError
from lensjax.commands.bench import read
from lensjax.commands.target import load_file, user_code


def main(folder: str, journal: str) -> int:
    request = json.loads((Path(folder) / "request.json").read_text(encoding="utf-8"))
    try:
        # The file first: it may set up devices, which only works before JAX is imported.
        step, arguments = load_file(request["target"])
        run(request, step, arguments, Path(journal))
    except LensjaxError as e:
        (Path(folder) / "error.json").write_text(json.dumps({"message": e.message, "hint": e.hint}), encoding="utf-8")
        return 3
    return 0


def run(request: dict[str, Any], step: Any, arguments: tuple[Any, ...], journal: Path) -> None:
    import datetime

    import jax

    from lensjax.execute.measure import measure
    from lensjax.execute.planning import cluster_for

    cluster = cluster_for(request["cluster"])
    events = read(journal)

    def record(event: dict[str, Any]) -> None:
        with open(journal, "a", encoding="utf-8") as f:
            f.write(json.dumps(event) + "\n")

    record({
        "event": "about", "plan": None, "cluster": cluster.name, "devices": len(jax.devices()),
        "accelerator": jax.devices()[0].device_kind, "devices_per_node": len(jax.local_devices()),
        "stack": f"jax-{jax.__version__}", "year": datetime.date.today().year,
    })  # fmt: skip
    with user_code(f"the step of {request['target']} cannot be measured"):
        measure(
            step, arguments, request["plans"], cluster, steps=request["steps"], visits=request["visits"],
            done=events, record=record,
        )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
