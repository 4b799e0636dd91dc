"""Eight emulated CPU devices for every test, set before JAX starts. Nothing here is timed, so XLA:CPU optimizes at
level 1, which compiles twice as fast as its default (level 0 gives NaN gradients, on one device too)."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in _flags:
    _flags = os.environ["XLA_FLAGS"] = f"{_flags} --xla_force_host_platform_device_count=8".strip()
if "xla_backend_optimization_level" not in _flags:
    os.environ["XLA_FLAGS"] = f"{_flags} --xla_backend_optimization_level=1"

import socket  # noqa: E402

import pytest  # noqa: E402


@pytest.fixture
def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`@pytest.mark.few(n)`: n cases of a parametrized test, evenly spread, are fast ones, the others slow."""
    cases: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few"):
            cases.setdefault((item.path, item.name.split("[")[0]), []).append(item)
    for found in cases.values():
        mark = found[0].get_closest_marker("few")
        assert mark is not None
        count = min(mark.args[0], len(found))
        fast = {round(k * len(found) / count) for k in range(count)}
        for k, item in enumerate(found):
            if k not in fast:
                item.add_marker(pytest.mark.slow)
