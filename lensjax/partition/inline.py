"""Calls inlined into `main`, as XLA does before it partitions.

MLIR's own `inline` pass runs on JAX's modules without an error and inlines nothing (jaxlib does not register the func
dialect's inliner), and Shardy gives one function called from two places one sharding. So calls are inlined here: the
callee is cloned and its operations move in front of the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

CALLS = ("func.call", "call")


def walk(operation: Any) -> Iterator[Any]:
    """All operations below `operation`, parents first, in program order."""
    for region in operation.regions:
        for block in region:
            for op in block:
                inner = op.operation
                yield inner
                if len(inner.regions):  # most have none
                    yield from walk(inner)


def functions(module: Any) -> dict[str, Any]:
    """Symbol name -> function operation of a module operation."""
    found = {}
    for op in module.regions[0].blocks[0]:
        if op.operation.name == "func.func":
            found[symbol(op.operation.attributes["sym_name"])] = op.operation
    return found


def symbol(attribute: Any) -> str:
    """The text of a symbol or string attribute without `@` and quotes."""
    return str(attribute).lstrip("@").strip('"')


def main_function(module: Any) -> Any:
    """The entry function."""
    return functions(module)["main"]


def inline_calls(module: Any) -> None:
    """Inlines every call of a module operation, in place, and drops the functions that nothing calls any more."""
    table = functions(module)
    done: set[str] = set()

    def flatten(name: str) -> None:
        if name in done:
            return
        done.add(name)
        for call in [op for op in walk(table[name]) if op.name in CALLS]:
            callee = symbol(call.attributes["callee"])
            flatten(callee)
            _splice(call, table[callee])

    flatten("main")
    for name, op in table.items():
        if name != "main":
            op.erase()


def _splice(call: Any, function: Any) -> None:
    copy = function.clone()
    block = copy.regions[0].blocks[0]
    for argument, operand in zip(block.arguments, list(call.operands), strict=True):
        argument.replace_all_uses_with(operand)
    *body, terminator = [op.operation for op in block]
    returned = list(terminator.operands)
    for op in body:
        op.move_before(call)
    for result, value in zip(list(call.results), returned, strict=True):
        result.replace_all_uses_with(value)
    call.erase()
    copy.erase()
