"""The mark of tests that compile for GPUs that are not there."""

import pytest

from lensjax.verify.devices import missing

needs_gpu_compiler = pytest.mark.skipif(bool(missing("cuda")), reason=f"no GPU compiler: {missing('cuda')}")
