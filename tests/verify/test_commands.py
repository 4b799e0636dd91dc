"""`lensjax lint` and `lensjax verify` as a stranger calls them."""

import json

import pytest

from lensjax.cli import main
from tests.gpu_compiler import needs_gpu_compiler

STEP = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def layer(x, w):
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"]


def step(params, tokens):
    def loss(params):
        x = params["table"][tokens]
        x, _ = jax.lax.scan(lambda x, w: (PIN(layer(x, w)), None), PIN(x), params["layers"])
        return jnp.mean(x**2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - g, params, grads), value


def PIN(x):
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", None, None)))


def on(shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def main():
    layers = {"up": on((3, 64, 256), None, "data", "model"), "down": on((3, 256, 64), None, "model", "data")}
    params = {"table": on((512, 64), "model"), "layers": layers}
    out = (jax.tree.map(lambda x: x.sharding, params), None)
    return jax.jit(step, donate_argnums=0, out_shardings=out), (params, on((32, 64), "data", dtype=jnp.int32))
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("LENSJAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "mine.py"


def run(capsys, *args):
    status = main([*map(str, args), "--json"])
    return status, json.loads(capsys.readouterr().out)


def test_lint_names_the_line_where_the_batch_is_lost(file, capsys):
    file.write_text(
        STEP.replace("PIN(layer(x, w))", "layer(x, w)").replace("PIN(x)", "x").replace("def x", "def PIN(x)")
    )
    status, data = run(capsys, "lint", f"{file}:main", "--backend", "cpu")
    assert status == 1 and data["backend"] == "cpu"
    lost = next(f for f in data["findings"] if f["kind"] == "batch_lost")
    assert set(lost) == {"kind", "severity", "line", "bytes", "message", "hint"}
    number = int(lost["line"].rpartition(":")[2].split()[0])
    assert 'params["table"][tokens]' in file.read_text().splitlines()[number - 1]
    assert lost["bytes"] > 0


def test_lint_of_a_clean_step_says_nothing_and_succeeds(file, capsys):
    file.write_text(STEP)
    status, data = run(capsys, "lint", f"{file}:main", "--backend", "cpu")
    assert (status, data["findings"]) == (0, [])
    assert data["memory"]["peak"] > 0 and data["tiers"]


def test_lint_without_shardings_says_what_to_do(file, capsys):
    file.write_text("import jax\ndef main(): return jax.jit(lambda x: x + 1), (jax.ShapeDtypeStruct((8,), 'float32'),)")
    status, data = run(capsys, "lint", f"{file}:main", "--backend", "cpu")
    assert status == 2 and data["error"]["code"] == "usage" and "NamedSharding" in data["error"]["hint"]


def test_lint_of_a_step_that_fails_names_its_line(file, capsys):
    file.write_text(STEP.replace("return jnp.mean(x**2)", "return jnp.mean(x @ jnp.ones((3, 3)))"))
    status, data = run(capsys, "lint", f"{file}:main", "--backend", "cpu")
    assert status == 2 and "cannot be traced" in data["error"]["message"]
    line = next(n for n, text in enumerate(file.read_text().splitlines(), 1) if "jnp.ones((3, 3))" in text)
    assert f"mine.py:{line}" in data["error"]["hint"]


@pytest.mark.slow
def test_lint_prints_tables_for_people(file, capsys):
    file.write_text(STEP)
    status = main(["lint", f"{file}:main", "--backend", "cpu", "--trace", str(file.parent / "t.json")])
    out = capsys.readouterr().out
    assert status == 0 and "nothing found" in out and "peak memory" in out and "[/" not in out
    assert json.loads((file.parent / "t.json").read_text())["traceEvents"]


def test_verify_a_preset_on_the_cpu_compiler(file, capsys):
    page = file.parent / "page.html"
    status, data = run(
        capsys, "verify", "fsdp", "llama3-tiny", "--batch", 16, "--seq", 64, "--cluster", "cpu:8", "--html", page
    )
    assert status in (0, 1)
    assert data["backend"] == "cpu" and set(data["memory"]) == {"planned_peak", "compiled_peak", "host"}
    assert all(set(v) == {"planned_bytes", "compiled_bytes"} for v in data["tiers"].values())
    assert any("emulated" in n for n in data["notes"])
    text = page.read_text()
    assert "data:image/png;base64," in text and "Planned against compiled" in text


@pytest.mark.slow
@needs_gpu_compiler
def test_verify_a_preset_on_the_gpu_compiler(file, capsys):
    """What was planned is what was compiled: no finding, and bytes on the wire within two percent."""
    status, data = run(capsys, "verify", "fsdp", "llama3-tiny", "--batch", 16, "--seq", 64, "--cluster", "dgx-h100:1")
    assert (status, data["findings"], data["unknown"]) == (0, [], [])
    for tier in data["tiers"].values():
        assert tier["compiled_bytes"] == pytest.approx(tier["planned_bytes"], rel=0.02)


def test_verify_prints_no_markup(file, capsys):
    """Notes and findings are coloured on a terminal and plain in a pipe."""
    status = main(["verify", "fsdp", "llama3-tiny", "--batch", "16", "--seq", "64", "--cluster", "cpu:8"])
    out = capsys.readouterr().out
    assert status in (0, 1) and "peak memory" in out and "[/" not in out and "[dim]" not in out
