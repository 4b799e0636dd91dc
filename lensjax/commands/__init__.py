"""The commands of `lensjax`, one file each.

A command module has `HELP: str`, `add_arguments(parser)` and `run(args) -> Result`.
It computes first and shows afterwards, so that `--json` prints one object and nothing else.
"""

from __future__ import annotations

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class Result:
    """What a command found: `data` for `--json`, `show` (rich renderables, or strings) for people, and an exit
    status."""

    data: dict[str, Any]
    show: tuple[Any, ...] = ()
    status: int = 0
