"""Imports go one way, private JAX names stay in one file, and importing the package touches no device."""

import ast
import pathlib
import subprocess
import sys

import pytest

import lensjax

ROOT = pathlib.Path(lensjax.__file__).parent
FOUNDATION = {"_errors", "_jax", "topology", "partition", "plan", "comm"}
# Part -> the parts that it may import besides _errors and _jax.
ALLOWED = {
    "topology": set(),
    "partition": set(),
    "plan": set(),
    "comm": set(),
    "program": {"partition"},
    "passes": {"program", "plan", "comm", "partition"},
    "cost": {"passes", "topology", "program", "plan", "comm", "partition"},
    "search": {"cost", "passes", "topology", "program", "plan", "comm", "partition"},
    "verify": {"passes", "cost", "topology", "program", "plan", "comm", "partition"},
    "execute": {"search", "verify", "cost", "passes", "topology", "program", "plan", "comm", "partition", "report"},
}
FILES = sorted(ROOT.rglob("*.py"))


def imports(path: pathlib.Path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names)


@pytest.mark.parametrize("part", sorted(ALLOWED))
def test_imports_go_one_way(part):
    for path in (ROOT / part).rglob("*.py") if (ROOT / part).exists() else []:
        used = {m.split(".")[1] for m in imports(path) if m.startswith("lensjax.")}
        parts = {u for u in used if (ROOT / u).is_dir()}
        wrong = parts - ALLOWED[part] - {part}
        assert not wrong, f"{path.relative_to(ROOT)} imports {sorted(wrong)}; {part} may import {sorted(ALLOWED[part])}"


def test_private_jax_names_live_in_one_file():
    for path in FILES:
        if path.name == "_jax.py" and path.parent == ROOT:
            continue
        private = {m for m in imports(path) if m.startswith(("jax._src", "jaxlib"))}
        assert not private, f"{path.relative_to(ROOT)} imports {sorted(private)}: that belongs in lensjax/_jax.py"


def test_files_stay_small():
    long = {str(p.relative_to(ROOT)): n for p in FILES if (n := len(p.read_text().splitlines())) > 400}
    assert not long, f"one idea a file, under 400 lines: {long}"


def test_importing_the_package_touches_neither_jax_nor_a_device():
    code = (
        "import sys, lensjax; assert 'jax' not in sys.modules; from lensjax import parallelize, Plan, Cluster; "
        "import jax; from jax.extend import backend; "
        "assert not __import__('jax._src.xla_bridge', fromlist=['_']).backends_are_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_library_call_prints_nothing(capfd):
    import jax
    import jax.numpy as jnp
    import numpy as np

    @lensjax.parallelize(plan="fsdp")
    def step(p, x):
        return p - jax.grad(lambda p: (x @ p).mean())(p)

    step(jnp.ones((16, 64)), np.ones((8, 16), np.float32))
    assert capfd.readouterr() == ("", "")
