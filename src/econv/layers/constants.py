"""Fixed arrays inside modules: exact on every device, in every dtype."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn


class WithConstants(nn.Module):
    """A module that reads fixed arrays, as non-persistent buffers made from `_constants`."""

    def _constants(self) -> dict[str, np.ndarray]:
        """The arrays, by the name of their buffer; floating-point ones in float64."""
        raise NotImplementedError

    def _constants_like(self, name: str) -> Tensor:
        """A tensor with the device and, for floating-point arrays, the dtype that is wanted."""
        return getattr(self, name, torch.empty(0))

    def _refresh_constants(self) -> None:
        # Made anew whenever dtype or device change: a buffer that merely follows `.half()` or
        # `.double()` keeps the rounding of the dtype it came from, one that follows `to_empty()`
        # holds nothing.
        with torch.inference_mode(False):  # or they could not be used in training later
            for name, array in self._constants().items():
                like = self._constants_like(name)
                dtype = like.dtype if array.dtype == np.float64 else None
                whole = np.ascontiguousarray(
                    array
                )  # a view of other strides would be copied in use
                constant = torch.tensor(whole, device=like.device, dtype=dtype)
                self.register_buffer(name, constant, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> WithConstants:
        super()._apply(fn, recurse)
        self._refresh_constants()
        return self
