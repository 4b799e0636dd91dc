"""Every private or moving JAX name that lensjax uses, each behind a function, with a probe of what is there.

Nothing else in the package imports `jax._src` or `jaxlib` (a test checks it). The probe runs when the planner is first
used, never at import of the package, and names the supported range when something is missing.
"""

from __future__ import annotations

import functools

import jax

from lensjax._errors import UnsupportedJax

SUPPORTED = "jax >= 0.10.0 (tested: 0.10.2 and 0.12.0.1)"
_OLDEST = (0, 10, 0)


@functools.cache
def check_version() -> None:
    """Raises UnsupportedJax when the installed jax is older than the supported range."""
    found = tuple(jax.__version_info__[:3])
    if found < _OLDEST:
        raise UnsupportedJax(
            f"lensjax plans with {SUPPORTED}; jax {jax.__version__} is installed",
            hint="pip install -U jax",
        )
