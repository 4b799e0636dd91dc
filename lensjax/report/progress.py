"""A progress line on standard error for what takes more than a moment."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def steps(title: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A spinner that says what is being worked on: `with steps("planning") as say: say("tracing")`.

    Nothing is shown when `quiet`, or when standard error is not a terminal.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn(title), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda text: bar.update(task, description=text)
