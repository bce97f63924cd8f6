"""What all networks share: features, a head, and the names that timm gives to both."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

from econv.groups import Group
from econv.layers.orientations import GroupPool
from econv.parameters import no_weight_decay
from econv.pretrained import Pretrained


class _Classifier(Pretrained):
    """What the networks share: features, a head, and the names that timm gives to both."""

    group: Group | None
    pool: nn.Module
    num_features: int
    input_kind = "scalar"
    grad_checkpointing = False

    def forward(self, x: Tensor) -> Tensor:
        """Class scores of a batch of images."""
        return self.forward_head(self.forward_features(x))

    def forward_features(self, x: Tensor) -> Tensor:
        """The last feature map, ``[batch, fields * order, …]``."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Class scores of a feature map; what the classifier reads, if ``pre_logits``."""
        raise NotImplementedError

    def _new_classifier(self, num_classes: int) -> nn.Module:
        """The last layer, for one class or more."""
        raise NotImplementedError

    def feature_maps(self, x: Tensor) -> Iterator[Tensor]:
        """The last map of every stage, as group features: what :class:`Features` pools."""
        raise NotImplementedError

    def feature_info(self) -> list[dict[str, Any]]:
        """Of each of these maps its fields, its reduction and the module that it comes from."""
        raise ValueError(
            f"expected a network with stages for features_only; {type(self).__name__} has none"
        )

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """The parts of the network from first to last, as timm groups parameters by them.

        Patterns of parameter names: those of the stem, and those of the blocks, of which each is a
        part of its own; whole stages, where the network has some, if ``coarse``.
        """
        raise NotImplementedError

    @property
    def image_size(self) -> int:
        """Pixels along each side of the images that the network is made for."""
        raise NotImplementedError

    @property
    def num_classes(self) -> int:
        """The number of classes, 0 for a network without a classifier."""
        return int(self.config["num_classes"])

    def get_classifier(self) -> nn.Module:
        """The last layer; the identity if there is none."""
        return self.classifier

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Put a new last layer in, for other classes, or none for 0: the features come out."""
        if global_pool is not None:
            raise ValueError(f"expected no global_pool: the head keeps its own; got {global_pool}")
        given: Any = num_classes
        if isinstance(given, bool) or not isinstance(given, Integral) or given < 0:
            raise ValueError(f"expected num_classes of 0 or more; got {num_classes!r}")
        like = next(self.parameters())
        made = self._new_classifier(num_classes) if num_classes else nn.Identity()
        self.classifier = made.to(like.device, like.dtype)
        self.config["num_classes"] = num_classes

    def no_weight_decay(self) -> set[str]:
        """The parameters that weight decay should leave alone."""
        return no_weight_decay(self)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether training keeps the features of each block only, and computes the rest twice."""
        self.grad_checkpointing = enable

    def _through(self, blocks: nn.Sequential, segments: int, x: Tensor) -> Tensor:
        if self.grad_checkpointing and self.training and torch.is_grad_enabled():
            kept: Tensor = checkpoint_sequential(blocks, segments, x, use_reentrant=False)
            return kept
        through: Tensor = blocks(x)
        return through


def mean_scores(network: Any, x: Tensor, pre_logits: bool) -> Tensor:
    axes = tuple(range(2, 2 + network.dimension))
    features: Tensor = network.pool(x).mean(dim=axes)
    if pre_logits:
        return features
    scores: Tensor = network.classifier(network.head_drop(features))
    return scores


def linear_classifier(features: int, num_classes: int) -> nn.Linear:
    classifier = nn.Linear(features, num_classes)
    nn.init.xavier_normal_(classifier.weight)
    nn.init.zeros_(classifier.bias)
    return classifier


def explain_classifier(
    network: nn.Module, state: dict[str, Tensor], prefix: str, *_: object
) -> None:
    """Weights of a network whose classifier reads all orientations do not fit a pooled one."""
    assert isinstance(network, _Classifier)
    found, own = state.get(f"{prefix}classifier.weight"), network.classifier
    if found is None or not isinstance(own, nn.Linear) or network.group is None:
        return
    pool = network.pool
    every = network.num_features // pool.outputs if isinstance(pool, GroupPool) else 0
    if found.ndim == 2 and found.shape[1] == every * network.group.order != own.in_features:
        raise ValueError(
            f"expected a classifier of {own.in_features} features, of which orientations are "
            f"pooled (pool={network.config['pool']!r}); got one of {found.shape[1]}, which reads "
            "all orientations, as the paper's networks do: make the network with pool=None and "
            "exact=False, or by its name paper_resnet…"
        )
