"""Eight emulated CPU devices for every test, set before JAX starts."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in _flags:
    os.environ["XLA_FLAGS"] = f"{_flags} --xla_force_host_platform_device_count=8".strip()

import socket  # noqa: E402

import pytest  # noqa: E402


@pytest.fixture
def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]
