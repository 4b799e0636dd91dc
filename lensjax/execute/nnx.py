"""Flax NNX modules as values: taken apart before a step, written back after it.

All modules of a call are split together, so that a reference that two of them share (the model inside its optimizer)
is one state. What stands in a module's place is a pytree of its values, named as the user reaches them
("layers/0/kernel").

Flax is imported when an argument is found to be one of its objects, never before.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, register_pytree_with_keys_class

from lensjax import _jax
from lensjax._errors import StateError, TraceError


class Structure:
    """What several modules are besides their values: how they are put together, and `names`, those of the values of
    each.

    Two structures are equal when their graphs are; the hash leaves out the graph's static attributes, which need not
    have one.
    """

    def __init__(self, graphdef: Any, names: tuple[tuple[str, ...], ...]):
        self.graphdef, self.names = graphdef, names
        self._hash = hash(names)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: Any) -> bool:
        return self is other or (isinstance(other, Structure) and _equal(self.graphdef, other.graphdef))

    def group(self, leaves: Sequence[Any]) -> list[Values]:
        """The values of all modules, module by module."""
        found, start = [], 0
        for i, names in enumerate(self.names):
            found.append(Values(tuple(leaves[start : start + len(names)]), self, i))
            start += len(names)
        return found


def _equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except Exception:  # static attributes that have no answer (arrays in a list): another structure
        return False


@register_pytree_with_keys_class
@dataclasses.dataclass(frozen=True)
class Values:
    """The values of module number `index` of a structure: a pytree that stands where the module stood."""

    leaves: tuple[Any, ...]
    structure: Structure
    index: int

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        names = self.structure.names[self.index]
        return [(DictKey(n), x) for n, x in zip(names, self.leaves)], (self.structure, self.index)

    def tree_flatten(self) -> tuple[Any, Any]:
        return self.leaves, (self.structure, self.index)

    @classmethod
    def tree_unflatten(cls, aux: Any, leaves: Any) -> Values:
        return cls(tuple(leaves), *aux)


@dataclasses.dataclass(frozen=True)
class Taken:
    """A `tree` whose modules were replaced by their values. `places`: where each value lies (a Variable, or the bare
    array that a module holds; `plain` where there are only Variables); `refs`: the graph's own numbering of its
    objects."""

    tree: Any
    structure: Structure
    places: tuple[Any, ...]
    refs: Any
    plain: bool


def holds_modules(fn: Any, *trees: Any) -> bool:
    """Whether NNX modules are among the arguments of a step that updates them in place.

    A step under `jax.jit` takes modules as values: what it does to them is seen in its results only.
    """
    if "flax.nnx" not in sys.modules or _jax.is_jitted(fn):
        return False
    return any(map(is_module, leaves(trees)))


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree, its modules whole."""
    return jax.tree.leaves(tree, is_leaf=stop)


def is_module(x: Any) -> bool:
    """Whether `x` is an NNX module, optimizer, metric, stream of keys or variable."""
    return "flax.nnx" in sys.modules and _nnx().graph.is_graph_node(x)


def _nnx() -> Any:
    from flax import nnx

    return nnx


def stop(x: Any) -> bool:
    """Whether to go no deeper when a tree is searched for modules."""
    # A State is a tree of values, the user's own: the variables in it are no objects to update.
    return is_module(x) or isinstance(x, Values) or ("flax.nnx" in sys.modules and isinstance(x, _nnx().State))


def is_values(x: Any) -> bool:
    return isinstance(x, Values)


def take(tree: Any, known: Structure | None = None) -> Taken:
    """Splits all modules of a tree together. `known`: a structure, used again when it is this one."""
    nnx = _nnx()
    flat, treedef = jax.tree.flatten(tree, is_leaf=stop)
    where = [i for i, x in enumerate(flat) if is_module(x)]
    refs = nnx.graph.RefMap()
    graphdef, state = nnx.flatten(tuple(flat[i] for i in where), ref_index=refs, graph=True)
    if known is None or not _equal(known.graphdef, graphdef):
        _check_plain(state)
        known = Structure(graphdef, _names(len(where), state.paths))
    held = [isinstance(x, nnx.Variable) for x in state.leaves]
    inner = [x.get_raw_value() if h else x for h, x in zip(held, state.leaves)]
    for i, values in zip(where, known.group(inner)):
        flat[i] = values
    return Taken(jax.tree.unflatten(treedef, flat), known, tuple(state.leaves), refs, all(held))


def _check_plain(state: Any) -> None:
    """Raises TraceError for variables that are no plain values (Flax's experimental references and hijax types)."""
    for path, x in zip(state.paths, state.leaves):
        if getattr(x, "ref", False) or getattr(x, "hijax", False):
            raise TraceError(
                f"the variable {'/'.join(map(str, path[1:]))} is made with {'ref' if x.ref else 'hijax'}=True",
                hint="make it without: lensjax updates ordinary variables in place itself",
            )


def _names(count: int, paths: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    found: list[list[str]] = [[] for _ in range(count)]
    for path in paths:
        found[path[0]].append("/".join(map(str, path[1:])))
    return tuple(map(tuple, found))


def give_back(tree: Any) -> tuple[Any, tuple[Any, ...]]:
    """(the tree with new modules in place of their values: arrays, tracers or shapes; these modules in order)."""
    flat, treedef = jax.tree.flatten(tree, is_leaf=is_values)
    where = [i for i, x in enumerate(flat) if is_values(x)]
    if not where:
        return tree, ()
    inner = [leaf for i in where for leaf in flat[i].leaves]
    modules = _nnx().unflatten(flat[where[0]].structure.graphdef, inner)
    for i, module in zip(where, modules):
        flat[i] = module
    return jax.tree.unflatten(treedef, flat), modules


def write(taken: Taken, values: Sequence[Values]) -> None:
    """Puts new values into the modules that `taken` came from, and static attributes that changed with them."""
    nnx = _nnx()
    new = [x for v in sorted(values, key=lambda v: v.index) for x in v.leaves]
    structure = values[0].structure
    if taken.plain and structure == taken.structure:
        for variable, leaf in zip(taken.places, new):
            variable.set_raw_value(leaf)
        return
    # The way of nnx.jit: every object is filled anew, its static attributes and bare arrays included.
    objects = nnx.graph.IndexMap.from_refmap(taken.refs)
    nnx.unflatten(structure.graphdef.with_same_outer_index(), new, outer_index_outer_ref=objects)


# ---- what a step may not do --------------------------------------------------------------------------------------


def check_structure(before: Sequence[Values], after: Sequence[Values], names: Sequence[str]) -> None:
    """Raises StateError, naming the value, when a step adds, removes or reshapes what its modules hold (`names`: of the
    modules)."""
    old, new = _by_name(before, names), _by_name(after, names)
    for path in [*old, *new]:
        if path not in new or path not in old:
            raise _changed(f"{'adds' if path in new else 'removes'} {path}")
        was, now = map(_types, (old[path], new[path]))
        if was != now:
            raise _changed(f"makes {path}, which was {was}, {now}")
    if _objects(before[0].structure.graphdef) != _objects(after[0].structure.graphdef):
        raise _changed("puts its modules together in another way (shares, copies or replaces one)")


def _changed(what: str) -> StateError:
    return StateError(
        f"the step {what}: it may update its modules, not change their structure",
        hint="make every variable before training (what is collected in a step: pop it there, as in "
        "nnx.pop(model, nnx.Intermediate)), or decorate a step that returns what is new",
        code="structure",
    )


def _by_name(group: Sequence[Values], names: Sequence[str]) -> dict[str, Any]:
    return {
        f"{name}/{leaf}" if leaf else name: value
        for name, values in zip(names, group)
        for leaf, value in zip(values.structure.names[values.index], values.leaves)
    }


def _types(value: Any) -> str:
    flat = [f"{jax.typeof(x).dtype}{list(jax.typeof(x).shape)}" for x in jax.tree.leaves(value)]
    return flat[0] if len(flat) == 1 and not isinstance(value, tuple | list | dict) else f"({', '.join(flat)})"


def _objects(graphdef: Any) -> list[Any]:
    return [(type(n), getattr(n, "type", None), getattr(n, "index", None)) for n in graphdef.nodes]
