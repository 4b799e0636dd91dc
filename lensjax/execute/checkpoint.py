"""Checkpoints of a planned step: Orbax's own files, with the state's plan beside it.

    train_step.save("ckpt", state, 1000)        returns when the values are copied; they are written in the background
    state = train_step.restore("ckpt")          the newest complete one, under the plan of *this* step

A checkpoint is one folder per number, written under another name and renamed when everything is in it, so one that was
interrupted is never among those to choose from. It holds the user's tree under "state" and, where the plan has any, the
step's hidden state under "extra": `orbax.checkpoint` alone reads both. Modules are saved as nested dictionaries of
their values.

Nothing in it depends on the mesh, the plan, the number of devices or of processes: these belong to the reader.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from lensjax import _jax
from lensjax._errors import StateError
from lensjax.execute.nnx import Values, give_back, is_module, is_values, leaves, take
from lensjax.plan.plan import Plan

STATE, EXTRA = "state", "extra"


class Checkpoints:
    """The checkpoint folders that a step writes to and reads from, one Orbax `Checkpointer` each."""

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}

    def save(self, directory: Any, number: int, state: Any, extra: Mapping[str, Any], plan: Plan | None) -> None:
        """Starts to write; a save that is still going on is waited for. Raises StateError for a number that exists."""
        writer = self._checkpointer(directory)
        if number in _numbers(writer):
            raise StateError(
                f"checkpoint {number} is there already in {os.fspath(directory)}",
                hint="a checkpoint is never written over: save under another number, or delete the old one",
            )
        dead = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array) and x.is_deleted()]
        if dead:
            raise StateError(
                f"{len(dead)} arrays of this state were given up to an earlier call",
                hint="save the state that the step returned: state, metrics = step(state, batch)",
                code="donated",
            )
        items = {STATE: jax.tree.map(as_array, plain(state))} | ({EXTRA: dict(extra)} if extra else {})
        note = {"lensjax_plan": plan.to_dict()} if plan is not None else None
        writer.save_checkpointables_async(number, items, force=True, custom_metadata=note)

    def wait(self) -> None:
        """Returns when nothing is being written any more; raises what a write raised."""
        for writer in self._open.values():
            writer.wait()

    def saved(self, directory: Any) -> tuple[int, ...]:
        """Numbers of the complete checkpoints, in order."""
        if not os.path.isdir(directory) and "://" not in os.fspath(directory):
            return ()
        reader = self._checkpointer(directory)
        reader.wait()
        reader.reload()
        return _numbers(reader)

    def restore(
        self, directory: Any, number: int | None, abstract: Any, extra: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any] | None]:
        """(the state, shaped and placed like `abstract`; the extra state, None where the checkpoint has another).

        `number`: None is the newest. Raises StateError when there is none, or when it holds another state.
        """
        found = self.saved(directory)
        if number is None:
            number = found[-1] if found else None
        if number is None or number not in found:
            have = f"complete ones: {', '.join(map(str, found))}" if found else "there is no complete one"
            what = "checkpoint" if number is None else f"checkpoint {number}"
            raise StateError(f"no {what} to restore in {os.fspath(directory)}: {have}", code="checkpoint")
        reader = self._checkpointer(directory)
        held = reader.checkpointables_metadata(number).metadata
        wanted = plain(abstract)
        if STATE not in held:
            raise StateError(
                f"checkpoint {number} in {os.fspath(directory)} holds {', '.join(sorted(held)) or 'nothing'}; expected "
                f"{STATE!r}",
                hint="it was not written by step.save: restore it with Orbax into step.abstract_state",
                code="checkpoint",
            )
        _check_same(held[STATE], wanted, number)
        keep = bool(extra) and EXTRA in held and _types(held[EXTRA]) == _types(dict(extra))
        items = {STATE: wanted} | ({EXTRA: dict(extra)} if keep else {})
        made = reader.load_checkpointables(number, items)
        state = put_back(abstract, jax.tree.map(_as_planned, made[STATE], wanted))
        return state, made[EXTRA] if keep else None

    def _checkpointer(self, directory: Any) -> Any:
        path = os.fspath(directory)
        path = path if "://" in path else os.path.abspath(path)
        if path not in self._open:
            import orbax.checkpoint.experimental.v1 as ocp

            if not self._open:
                _before_exit(self.wait)
            # Every save is the user's decision, and every one is kept: policies are Orbax's own, for who wants them.
            self._open[path] = ocp.training.Checkpointer(path)
        return self._open[path]


def _before_exit(wait: Any) -> None:
    """Lets a program that ends right after a save finish it. Orbax writes with a pool of threads, which Python closes
    before `atexit` functions run; what is registered here runs before that."""
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(wait)


def _numbers(checkpointer: Any) -> tuple[int, ...]:
    return tuple(sorted(c.step for c in checkpointer.checkpoints))


def plain(tree: Any) -> Any:
    """A state as a tree that needs neither lensjax nor Flax: modules (and the values that stand in their place) become
    nested dictionaries."""
    if any(map(is_module, leaves(tree))):
        tree = take(tree).tree
    return jax.tree.map(lambda x: _nested(x) if is_values(x) else x, tree, is_leaf=is_values)


def _nested(values: Values) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, leaf in zip(values.structure.names[values.index], values.leaves):
        *folders, last = name.split("/")
        inner = out
        for folder in folders:
            inner = inner.setdefault(folder, {})
        inner[last] = leaf
    return out


def as_array(x: Any) -> Any:
    """A Python number as the array that JAX makes of it."""
    return jnp.asarray(x) if isinstance(x, bool | int | float | complex) else x


def put_back(abstract: Any, made: Any) -> Any:
    """The plain tree `made` in the structure of `abstract`, modules put together anew."""
    flat = jax.tree.flatten(plain(abstract))[0]
    place = {id(x): i for i, x in enumerate(flat)}
    values = jax.tree.leaves(made)
    return give_back(jax.tree.map(lambda x: values[place[id(x)]], abstract))[0]


def _as_planned(array: Any, wanted: Any) -> Any:
    """A number that the program takes with a weak type (a Python counter) is that again: else JAX would compile the
    step a second time."""
    return _jax.weaken(array) if getattr(wanted, "weak_type", False) and not array.aval.weak_type else array


def _types(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Path -> shape and type as they are on disk, where a typed key is its words."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    stored = lambda x: jax.eval_shape(jax.random.key_data, x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    arrays = {jax.tree_util.keystr(p, simple=True, separator="/"): stored(x) for p, x in flat if hasattr(x, "shape")}
    return {path: (tuple(x.shape), str(x.dtype)) for path, x in arrays.items()}


def _check_same(held: Any, wanted: Any, number: int) -> None:
    """Raises StateError naming the first leaf in which a checkpoint is of another state."""
    old, new, none = _types(held), _types(wanted), (None, "")
    differ = [p for p in (*new, *old) if old.get(p, none)[0] != new.get(p, none)[0]]
    if differ:
        p = differ[0]
        say = lambda t: f"{t[p][1]}{list(t[p][0])}" if p in t else "not there"
        raise StateError(
            f"checkpoint {number} is of another state: {p} is {say(old)} in it and {say(new)} in the step's "
            f"({len(differ)} leaves differ)",
            hint="restore it with a step of the same state; Orbax alone reads it as it is",
            code="checkpoint",
        )
