"""The command line: `lensjax COMMAND ...`.

Every command takes `--json` and then prints one JSON object on standard output and nothing else;
progress goes to standard error. Errors are `{"error": {code, message, hint}}` with exit status 2.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from lensjax import __version__
from lensjax._errors import LensjaxError, UsageError

# Command name -> module. Modules are imported only when needed: `lensjax --help` must not import jax.
COMMANDS: dict[str, str] = {
    "bench": "lensjax.commands.bench",
    "collectives": "lensjax.commands.collectives",
    "launch": "lensjax.commands.launch",
    "lint": "lensjax.commands.lint",
    "plan": "lensjax.commands.plan",
    "probe": "lensjax.commands.probe",
    "topo": "lensjax.commands.topo",
    "verify": "lensjax.commands.verify",
}


class _Parser(argparse.ArgumentParser):
    """argparse, except that a wrong command line is an error like every other one (JSON where asked)."""

    def error(self, message: str):  # type: ignore[override]
        raise UsageError(message, hint=f"{self.prog} --help shows how it is called")


def _print_json(data: dict[str, Any]) -> None:
    # NaN and infinity are not JSON: what could not be derived is null.
    json.dump(_clean(data), sys.stdout, allow_nan=False)
    sys.stdout.write("\n")


def _clean(value: Any) -> Any:
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {str(k): _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(v) for v in value]
    return value


def _parser(name: str | None) -> argparse.ArgumentParser:
    parser = _Parser(prog="lensjax", description="Plan, prove and run the sharding of a JAX training step.")
    parser.add_argument("--version", action="version", version=f"lensjax {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for command, module in COMMANDS.items():
        if name is None or command != name:
            commands.add_parser(command, help=_help_line(module), add_help=False)
            continue
        loaded = importlib.import_module(module)
        sub = commands.add_parser(command, help=loaded.HELP, description=loaded.HELP)
        loaded.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        sub.set_defaults(run=loaded.run)
    return parser


def _help_line(module: str) -> str:
    """The module's HELP string, read without importing it (imports are what makes `--help` slow)."""
    import ast
    import importlib.util

    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    with open(spec.origin, encoding="utf-8") as f:
        for node in ast.parse(f.read()).body:
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "HELP":
                return str(ast.literal_eval(node.value))
    return ""


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    name = next((a for a in argv if not a.startswith("-")), None)
    wants_json = "--json" in argv
    restore = _heed_termination()
    try:
        args = _parser(name).parse_args(argv)
        wants_json = getattr(args, "json", False)  # `lensjax launch ... SCRIPT.py --json`: the script's own
        if args.command is None:
            _parser(None).print_help()
            return 0
        with _only_json() if wants_json else contextlib.nullcontext():
            result = args.run(args)
        if wants_json:
            _print_json({"schema": 1, **result.data})
        else:
            from rich.console import Console

            # Into a file or a pipe rich would write 80 columns; a terminal, or COLUMNS, says what it has.
            console = Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 120)
            for item in result.show:
                console.print(item, markup=False)  # [x].png is a file's name
        return result.status
    except LensjaxError as e:
        if wants_json:
            _print_json({"error": {"code": e.code, "message": e.message, "hint": e.hint}})
        else:
            print(f"lensjax: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if wants_json:
            _print_json({"error": {"code": "interrupted", "message": "interrupted", "hint": ""}})
        else:
            print("lensjax: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `lensjax topo ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    finally:
        restore()


@contextlib.contextmanager
def _only_json() -> Iterator[None]:
    """What is written to standard output meanwhile goes to standard error, by native code too: solvers and compilers
    print there as they please, and then it would be no JSON."""
    try:
        sys.stdout.flush()
        kept = os.dup(1)
    except OSError:  # closed: nothing to keep clean
        yield
        return
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _heed_termination() -> Callable[[], None]:
    """SIGTERM and SIGHUP leave by an exception, so that what a command started ends with it. Returns what undoes it."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None

    def leave(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    # One that is ignored (nohup) stays ignored.
    old = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)}
    mine = [n for n, handler in old.items() if handler is signal.SIG_DFL]
    for number in mine:
        signal.signal(number, leave)

    def restore() -> None:
        for number in mine:
            signal.signal(number, signal.SIG_DFL)

    return restore


if __name__ == "__main__":
    sys.exit(main())
