"""The algebra is tested on the CPU everywhere: some GPUs multiply float32 matrices in reduced precision."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import pytest


@pytest.fixture(autouse=True, scope="package")
def on_cpu() -> Iterator[None]:
    """Run on the CPU and put the default device back."""
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(before)
