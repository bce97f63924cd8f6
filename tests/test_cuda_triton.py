"""The kernels on a GPU: the checks of the interpreter, and what only a device can show."""

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device found")

if torch.cuda.is_available():
    from triton_checks import *  # noqa: F403
