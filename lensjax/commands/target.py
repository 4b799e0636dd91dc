"""TARGET of a command: a built-in model by name, or `FILE.py:NAME`, where NAME() returns (step, arguments)."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lensjax._errors import UsageError


def add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="a built-in model (llama3-8b, ...) or FILE.py:NAME")
    parser.add_argument("--batch", type=_positive, help="sequences per step, all devices together (built-in models)")
    parser.add_argument("--seq", type=_positive, help="tokens per sequence (built-in models)")


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def load_target(args: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(step, arguments) of the command line's target. Raises UsageError."""
    if ".py:" in args.target:
        if args.batch is not None or args.seq is not None:
            raise UsageError("--batch and --seq are for built-in models; FILE.py:NAME says its own shapes")
        return load_file(args.target)
    from lensjax.models.targets import target

    if args.batch is None or args.seq is None:
        raise UsageError(f"{args.target} needs --batch and --seq", hint="for example --batch 256 --seq 8192")
    step, state, batch = target(args.target, args.batch, args.seq)
    return step, (state, batch)


def load_file(spec: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """(step, arguments) from `FILE.py:NAME`. Raises UsageError that says what was wrong with it."""
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"there is no file {file}")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    assert module_spec is not None and module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        module_spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    if not hasattr(module, name):
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UsageError(f"{file} has no {name!r}", hint=f"it has: {', '.join(sorted(public)) or 'nothing callable'}")
    found = getattr(module, name)
    made = found() if callable(found) else found
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple | list)):
        raise UsageError(
            f"{spec} gave {type(made).__name__}; expected (step, arguments)",
            hint="def NAME(): return train_step, (state, batch)   # arrays or ShapeDtypeStructs",
        )
    step, arguments = made
    return getattr(step, "__wrapped__", step) if type(step).__name__ in ("Step", "Off") else step, tuple(arguments)
