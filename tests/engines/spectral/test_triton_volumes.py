"""The kernels for volumes without a GPU: interpreted, and compiled for one that is not there."""

import pytest

from interpreting import pass_interpreted

pytest.importorskip("triton", minversion="3.6", reason="no Triton 3.6 or later")


@pytest.mark.slow
def test_interpreted():
    pass_interpreted("volume_checks.py")
