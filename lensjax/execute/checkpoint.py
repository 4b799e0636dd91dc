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

import contextlib
import operator
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lensjax import _jax
from lensjax._errors import LensjaxError, StateError
from lensjax.execute.nnx import Values, give_back, is_module, is_values, leaves, take
from lensjax.execute.processes import agree
from lensjax.plan.plan import Plan
from lensjax.program.trace import is_dynamic

STATE, EXTRA = "state", "extra"


class Checkpoints:
    """The checkpoint folders that a step writes to and reads from, one Orbax `Checkpointer` each."""

    def __init__(self) -> None:
        self._open: dict[str, Any] = {}

    def save(
        self, directory: Any, number: int, state: Any, extra: Mapping[str, Any], plan: Plan | None, like: Any = None
    ) -> None:
        """Starts to write; a save that is still going on is waited for. `like`: the shapes of the step's state.

        Raises StateError for a number that exists, a state that `restore` could not read, and what cannot be written.
        """
        path, number = _path(directory), _number(number)
        tree = jax.tree.map(as_array, plain(state))
        _check_savable(tree, like)
        agree("save a checkpoint", {"number of the checkpoint": number}, StateError)
        with _disk(path, "write to"):
            writer = self._checkpointer(path, making=True)
            if number in _numbers(writer):
                raise StateError(
                    f"checkpoint {number} is there already in {path}",
                    hint="a checkpoint is never written over: save under another number, or delete the old one",
                    code="checkpoint",
                )
            items = {STATE: tree} | ({EXTRA: dict(extra)} if extra else {})
            note = {"lensjax_plan": plan.to_dict()} if plan is not None else None
            writer.save_checkpointables_async(number, items, force=True, custom_metadata=note)

    def wait(self) -> None:
        """Returns when nothing is being written any more. Raises StateError for what could not be written."""
        for path, writer in self._open.items():
            with _disk(path, "write to"):
                writer.wait()

    def saved(self, directory: Any) -> tuple[int, ...]:
        """Numbers of the complete checkpoints, in order."""
        path = _path(directory)
        if not os.path.isdir(path) and "://" not in path:
            return ()
        with _disk(path, "read"):
            reader = self._checkpointer(path)
            reader.wait()
            reader.reload()
            return _complete(path, _numbers(reader))

    def restore(
        self, directory: Any, number: int | None, abstract: Any, extra: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any] | None]:
        """(the state, shaped and placed like `abstract`; the extra state, None where the checkpoint has another).

        `number`: None is the newest. Raises StateError when there is none, or when it holds another state.
        """
        path = _path(directory)
        number = None if number is None else _number(number)
        found = self.saved(path)
        if number is None:
            number = found[-1] if found else None
        agree("restore a checkpoint", {"number of the checkpoint": number, "complete checkpoints": found}, StateError)
        if number is None or number not in found:
            have = f"complete ones: {', '.join(map(str, found))}" if found else _nothing_in(path)
            what = "checkpoint" if number is None else f"checkpoint {number}"
            hint = "" if found else "what step.save did not write, Orbax restores into step.abstract_state"
            raise StateError(f"no {what} to restore in {path}: {have}", hint=hint, code="checkpoint")
        wanted = plain(abstract)
        with _disk(path, f"read checkpoint {number} of"):
            reader = self._checkpointer(path)
            held = reader.checkpointables_metadata(number).metadata
            if STATE not in held:
                raise StateError(
                    f"checkpoint {number} in {path} holds {', '.join(sorted(held)) or 'nothing'}; expected {STATE!r}",
                    hint="it was not written by step.save: restore it with Orbax into step.abstract_state",
                    code="checkpoint",
                )
            if held[STATE] is None:
                raise StateError(
                    f"checkpoint {number} in {path} cannot be read: its {STATE!r} is damaged, or no tree of arrays",
                    hint="restore an earlier one: "
                    + (", ".join(str(n) for n in found if n != number) or "there is none"),
                    code="checkpoint",
                )
            _check_same(held[STATE], wanted, number)
            keep = bool(extra) and EXTRA in held and _types(held[EXTRA]) == _types(dict(extra))
            items = {STATE: wanted} | ({EXTRA: dict(extra)} if keep else {})
            made = reader.load_checkpointables(number, items)
        state = put_back(abstract, jax.tree.map(_as_planned, made[STATE], wanted))
        return state, made[EXTRA] if keep else None

    def _checkpointer(self, path: str, making: bool = False) -> Any:
        if path not in self._open:
            import orbax.checkpoint.experimental.v1 as ocp

            if making and "://" not in path:
                os.makedirs(path, exist_ok=True)  # Orbax finds out in a thread, and late
            if not self._open:
                _before_exit(self.wait)
            # Every save is the user's decision, and every one is kept: policies are Orbax's own, for who wants them.
            self._open[path] = ocp.training.Checkpointer(path)
        return self._open[path]


@contextlib.contextmanager
def _disk(path: str, doing: str) -> Iterator[None]:
    """Whatever the file system and Orbax raise, as a StateError that names the folder."""
    try:
        yield
    except (LensjaxError, KeyboardInterrupt):
        raise
    except Exception as e:
        said = (str(e).strip().splitlines() or [""])[0][:300]
        raise StateError(f"cannot {doing} {path}: {type(e).__name__}: {said}", code="checkpoint") from e


def _path(directory: Any) -> str:
    if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
        raise StateError(
            f"{type(directory).__name__} {str(directory)[:60]!r} where the folder of the checkpoints is expected",
            hint="step.save(folder, state, number), step.restore(folder)",
            code="checkpoint",
        )
    path = os.fspath(directory)
    return path if "://" in path else os.path.abspath(os.path.expanduser(path))


def _number(number: Any) -> int:
    try:
        found = -1 if isinstance(number, bool) else operator.index(number)
    except TypeError:
        found = -1
    if found < 0:
        said = repr(number) if isinstance(number, str | int | float | None) else f"a {type(number).__name__}"
        raise StateError(
            f"{said[:60]} is no number of a checkpoint; expected an integer, 0 or more",
            hint="step.save(folder, state, number), with the number of the step as a rule",
            code="checkpoint",
        )
    return found


def _check_savable(tree: Any, like: Any) -> None:
    """Raises StateError for a state that was given up, or that `restore` could not read again."""
    leaves = jax.tree.leaves(tree)
    if dead := [x for x in leaves if isinstance(x, jax.Array) and x.is_deleted()]:
        raise StateError(
            f"{len(dead)} arrays of this state were given up to an earlier call",
            hint="save the state that the step returned: state, metrics = step(state, batch)",
            code="donated",
        )
    if not leaves:
        raise StateError("there is no array in what is to be saved", code="checkpoint")
    if like is None:
        return
    mine, wanted, none = _types(tree), _types(plain(like)), (None, "")
    if differ := [p for p in (*wanted, *mine) if mine.get(p, none)[0] != wanted.get(p, none)[0]]:
        p = differ[0]
        raise StateError(
            f"what is to be saved is not the state of this step: {p} is {_say(mine, p)}, and {_say(wanted, p)} in the "
            f"step's ({len(differ)} leaves differ)",
            hint="save what the step takes as state, whole; what else there is, Orbax saves",
            code="checkpoint",
        )
    if other := _nothings(tree) ^ _nothings(plain(like)):
        raise StateError(
            f"what is to be saved is not the state of this step: {min(other)} is no array in one of them",
            code="checkpoint",
        )


def _nothings(tree: Any) -> set[str]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)
    return {jax.tree_util.keystr(p, simple=True, separator="/") for p, x in flat if x is None}


def _say(types: Mapping[str, tuple[tuple[int, ...], str]], path: str) -> str:
    return f"{types[path][1]}{list(types[path][0])}" if path in types else "not there"


def _before_exit(wait: Any) -> None:
    """Lets a program that ends right after a save finish it. Orbax writes with a pool of threads, which Python closes
    before `atexit` functions run; what is registered here runs before that."""
    register = getattr(threading, "_register_atexit", None)
    if register is not None:
        register(wait)


def _numbers(checkpointer: Any) -> tuple[int, ...]:
    return tuple(sorted(c.step for c in checkpointer.checkpoints))


def _nothing_in(path: str) -> str:
    if "://" not in path and not os.path.isdir(path):
        return "it is a file" if os.path.exists(path) else "there is no such folder"
    return "there is no complete one"


def _complete(path: str, numbers: Sequence[int]) -> tuple[int, ...]:
    """Those with Orbax's description, which it writes with the rest: any folder with a number for a name looks like a
    checkpoint otherwise."""
    from etils import epath

    return tuple(n for n in numbers if (epath.Path(path) / str(n) / "_CHECKPOINT_METADATA").exists())


def plain(tree: Any) -> Any:
    """A state as a tree that needs neither lensjax nor Flax: modules (and the values that stand in their place) become
    nested dictionaries. What is no array or number (a name, a function) is the step's, and is left out."""
    if any(map(is_module, leaves(tree))):
        tree = take(tree).tree
    one = lambda x: _nested(x) if is_values(x) else x if is_dynamic(x) else None
    return jax.tree.map(one, tree, is_leaf=is_values)


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
    return give_back(jax.tree.map(lambda x: values[place[id(x)]] if id(x) in place else x, abstract))[0]


def _as_planned(array: Any, wanted: Any) -> Any:
    """A number that the program takes with a weak type (a Python counter) is that again: else JAX would compile the
    step a second time. A key is typed or raw as the program has it; its words are the same."""
    if array.dtype != wanted.dtype and is_key(array):
        if is_key(wanted):
            raise StateError(
                f"the checkpoint has a {array.dtype} where the step has a {wanted.dtype}", code="checkpoint"
            )
        array = jax.device_put(jax.random.key_data(array), wanted.sharding)
    elif array.dtype != wanted.dtype and is_key(wanted):
        impl: list[Any] = []
        jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), wanted)
        array = jax.device_put(jax.random.wrap_key_data(array, impl=impl[0]), wanted.sharding)
    return _jax.weaken(array) if getattr(wanted, "weak_type", False) and not array.aval.weak_type else array


def _types(tree: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Path -> shape and type as they are on disk, where a typed key is its words."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    stored = lambda x: jax.eval_shape(jax.random.key_data, x) if is_key(x) else x
    arrays = {jax.tree_util.keystr(p, simple=True, separator="/"): stored(x) for p, x in flat if hasattr(x, "shape")}
    return {path: (tuple(x.shape), str(x.dtype)) for path, x in arrays.items()}


def _check_same(held: Any, wanted: Any, number: int) -> None:
    """Raises StateError naming the first leaf in which a checkpoint is of another state."""
    old, new, none = _types(held), _types(wanted), (None, "")
    differ = [p for p in (*new, *old) if old.get(p, none)[0] != new.get(p, none)[0]]
    narrower = [p for p in new if p not in differ and not _holds(old[p][1], new[p][1])]
    if differ or narrower:
        p = min(differ or narrower, key=lambda p: p.count("/"))  # a parameter before its moments, as a rule
        raise StateError(
            f"checkpoint {number} is of another state: {p} is {_say(old, p)} in it and {_say(new, p)} in the step's "
            f"({len(differ) + len(narrower)} leaves differ)",
            hint="restore it with a step of the same state; Orbax alone reads it as it is"
            if differ
            else "restore it as it is and cast it; or let Orbax cast it into step.abstract_state",
            code="checkpoint",
        )


def _holds(old: str, new: str) -> bool:
    """Whether every value of the one type is one of the other."""
    a, b = jnp.dtype(old), jnp.dtype(new)
    if a == b:
        return True
    if jnp.issubdtype(a, np.integer) and jnp.issubdtype(b, np.integer):
        x, y = jnp.iinfo(a), jnp.iinfo(b)
        return int(y.min) <= int(x.min) and int(x.max) <= int(y.max)
    if not (jnp.issubdtype(a, np.inexact) and jnp.issubdtype(b, np.inexact)):
        return False
    if jnp.issubdtype(a, np.complexfloating) and not jnp.issubdtype(b, np.complexfloating):
        return False
    x, y = jnp.finfo(a), jnp.finfo(b)
    return x.nmant <= y.nmant and x.maxexp <= y.maxexp and x.minexp >= y.minexp


def is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
