"""TARGET of a command: a built-in model by name, or `FILE.py:NAME`, where NAME() returns (step, arguments)."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lensjax._errors import LensjaxError, UsageError


def add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="a built-in model (llama3-8b, ...) or FILE.py:NAME")
    parser.add_argument("--batch", type=_positive, help="examples per step, all devices together (built-in models)")
    parser.add_argument("--seq", type=_positive, help="tokens per sequence (built-in models that have sequences)")


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

    if args.batch is None:
        raise UsageError(f"{args.target} needs --batch", hint="for example --batch 256")
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
        with user_code(f"{file} cannot be loaded"):
            module_spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    if not hasattr(module, name):
        public = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UsageError(f"{file} has no {name!r}", hint=f"it has: {', '.join(sorted(public)) or 'nothing callable'}")
    found = getattr(module, name)
    made = _made(spec, found) if callable(found) else found
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[0]) and isinstance(made[1], tuple | list)):
        raise UsageError(f"{spec} gave {_described(made)}; expected (step, arguments)", hint=_EXPECTED)
    step, arguments = made
    return getattr(step, "__wrapped__", step) if _decorated(step) else step, tuple(arguments)


_EXPECTED = "def NAME(): return train_step, (state, batch)   # arrays or ShapeDtypeStructs"


def _decorated(value: Any) -> bool:
    return type(value).__name__ in ("Step", "Off")


def _made(spec: str, found: Callable[..., Any]) -> Any:
    """What the named function returns. Raises UsageError where it needs arguments, as the step itself does."""
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):  # a callable without a signature
        parameters = []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
    if needed or _decorated(found):
        raise UsageError(
            f"{spec} takes arguments ({', '.join(needed)}), as a step does; expected a function without any that "
            "returns (step, arguments)",
            hint=_EXPECTED,
        )
    with user_code(f"{spec} failed"):
        return found()


def _described(value: Any) -> str:
    if not isinstance(value, tuple):
        return f"a {type(value).__name__}"
    return f"a tuple of {len(value)} ({', '.join(type(v).__name__ for v in value)})"


@contextlib.contextmanager
def user_code(failed: str) -> Iterator[None]:
    """Turns what the user's own code raises into a UsageError that names its line; what lensjax alone raises passes.

    `failed`: what did not work, to stand in front.
    """
    try:
        yield
    except LensjaxError:
        raise
    except (Exception, SystemExit) as e:
        line = _line_of(e)
        if not line:
            raise
        first = next(iter(str(e).strip().splitlines()), "")
        text = f"{type(e).__name__}: {first}" if first else type(e).__name__
        raise UsageError(f"{failed}: {text}", hint=f"raised at {line}") from e


def _line_of(error: BaseException) -> str:
    """FILE:LINE of the innermost frame that is the user's, "" where none is."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}"
    ours = str(Path(__file__).resolve().parents[1])
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in f.filename and not f.filename.startswith(("<", ours, sys.base_prefix))
    ]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else ""


PICTURES = (".png", ".svg", ".pdf")
CLUSTERS = (".yaml", ".yml", ".json")


def check_writable(path: str | None, endings: tuple[str, ...] = (), what: str = "picture") -> None:
    """Raises UsageError for a file that cannot be written, or does not end in one of `endings` as a `what` does: before
    the work, not after it."""
    if path is None:
        return
    target = Path(path)
    if endings and target.suffix.lower() not in endings:
        raise UsageError(f"{path} cannot be written as a {what}", hint=f"a file that ends in {' or '.join(endings)}")
    folder = target.parent
    if not folder.is_dir():
        why = f"there is no folder {str(folder)!r}"
    elif target.is_dir():
        why = "it is a folder"
    elif target.exists() and not target.is_file():
        return  # a pipe or a device: to open it may wait for a reader
    else:
        new = not target.exists()
        try:  # permissions do not tell: a file system may be read-only, or take no files
            with open(target, "ab"):
                pass
        except OSError as e:
            why = (e.strerror or str(e)).lower()
        else:
            if new:
                target.unlink()
            return
    raise UsageError(f"{path} cannot be written: {why}")


def write_cluster(cluster: Any, path: str) -> None:
    """Writes a cluster file in the format that its ending (one of CLUSTERS) names."""
    text = cluster.to_json() if Path(path).suffix.lower() == ".json" else cluster.to_yaml()
    Path(path).write_text(text, encoding="utf-8")
