"""The maps of every stage of a network, as timm's networks give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from econv.models.classifier import _Classifier


class FeatureInfo:
    """What the maps of :class:`Features` are, in timm's words.

    >>> from econv import create_model
    >>> network = create_model("cifar_resnet8_p4", features_only=True)
    >>> network.feature_info.reduction()
    [1, 2, 4]
    """

    def __init__(self, info: Sequence[dict[str, Any]], out_indices: Sequence[int]) -> None:
        self.info = list(info)
        self.out_indices = tuple(out_indices)

    def channels(self) -> list[int]:
        """Of each map its channels."""
        return [self.info[i]["num_chs"] for i in self.out_indices]

    def reduction(self) -> list[int]:
        """Of each map how many pixels of the image one of its own stands for."""
        return [self.info[i]["reduction"] for i in self.out_indices]

    def module_name(self) -> list[str]:
        """Of each map the module that it comes from."""
        return [self.info[i]["module"] for i in self.out_indices]

    def get_dicts(self) -> list[dict[str, Any]]:
        """All of that, a dictionary for each map."""
        return [{**self.info[i], "index": i} for i in self.out_indices]


class Features(nn.Module):
    """The last map of every stage of a network, as ordinary images that turn with the input.

    Orientations are pooled as the network pools them before its classifier, so that any decoder can
    read the maps; those of a network with ``pool=None`` keep them: group features. ``feature_info``
    has the channels and reductions, as timm's networks have it.

    Raises:
        ValueError: for a network that is not econv's, and stages that it does not have.

    >>> import econv, torch
    >>> backbone = econv.create_model("resnet18_p4", features_only=True, fields=(2, 2, 4, 4))
    >>> [tuple(x.shape) for x in backbone(torch.randn(1, 3, 160, 160))][-2:]
    [(1, 4, 10, 10), (1, 4, 5, 5)]
    >>> backbone.feature_info.channels(), backbone.feature_info.reduction()
    ([2, 2, 2, 4, 4], [2, 4, 8, 16, 32])
    """

    def __init__(self, network: _Classifier, out_indices: Sequence[int] | None = None) -> None:
        super().__init__()
        if not isinstance(network, _Classifier):
            raise ValueError(f"expected a network of econv; got {type(network).__name__}")
        info = network.feature_info()
        each = network.num_features // info[-1]["fields"]
        for entry in info:
            entry["num_chs"] = entry.pop("fields") * each
        chosen = range(len(info)) if out_indices is None else out_indices
        whole = isinstance(chosen, Sequence) and all(isinstance(i, int) for i in chosen)
        if not whole or not chosen or not all(-len(info) <= i < len(info) for i in chosen):
            raise ValueError(
                f"expected out_indices from {-len(info)} to {len(info) - 1}; got {out_indices!r}"
            )
        network.reset_classifier(0)
        self.network = network
        self.group = network.group
        self.feature_info = FeatureInfo(info, [i % len(info) for i in chosen])

    def forward(self, x: Tensor) -> list[Tensor]:
        """The maps of ``[batch, in_channels, height, width]``, in the order of the indices."""
        maps = list(self.network.feature_maps(x))
        return [self.network.pool(maps[i]) for i in self.feature_info.out_indices]
