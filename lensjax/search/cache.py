"""Plans kept on disk, by everything that decides them: program, cluster, memory, pins, strategy and versions.

What comes back is *replayed*: the same plan without its prediction. Whoever uses it prices it anew, so that a plan
never carries costs of another scorer, and `provenance` still says what it was made with. To decide anew, search; the
cache is only asked where one was given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
import tempfile
from collections.abc import Sequence

import jax

from lensjax import _jax
from lensjax._errors import PlanError
from lensjax.plan.pins import Pin
from lensjax.plan.plan import SCHEMA, Plan
from lensjax.program.program import Program
from lensjax.topology.cluster import Cluster


def key_of(program: Program, cluster: Cluster, memory: float, pins: Sequence[Pin], strategy: str, version: str) -> str:
    """A name that is equal only where everything is that a search depends on. `version`: of lensjax."""
    facts = {
        "schema": SCHEMA,
        "program": program.fingerprint,
        "cluster": cluster.to_json(),
        "memory": memory,
        "pins": [dataclasses.asdict(p) for p in pins],
        "strategy": strategy,
        "versions": [version, jax.__version__],
        "settings": [*map(str, _jax.settings())],
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


@dataclasses.dataclass(frozen=True)
class PlanCache:
    """Plans as JSON files in a folder, which is made when the first is kept."""

    folder: pathlib.Path

    def get(self, key: str) -> Plan | None:
        """The plan that was kept under a key, without its prediction; None where there is none that can be read."""
        try:
            return Plan.load(self._file(key)).replace()
        except PlanError:  # not there, damaged, or of another schema: search again
            return None

    def put(self, key: str, plan: Plan) -> None:
        """Keeps a plan. Other processes see the old file or the whole new one. Raises PlanError where the folder cannot
        be written."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, suffix=".part")
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as f:
                    f.write(plan.to_json() + "\n")
                os.replace(name, self._file(key))
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name)
                raise
        except OSError as e:
            raise PlanError(f"the plan cache {self.folder} cannot be written: {e.strerror}") from e

    def _file(self, key: str) -> pathlib.Path:
        return self.folder / f"{key}.json"
