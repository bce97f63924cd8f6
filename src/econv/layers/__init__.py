"""PDO-eConvs and the layers around them: ordinary `nn.Module`s on ordinary tensors.

A group feature map is a plain tensor ``[batch, fields * order, height, width]`` whose channel is
``field * order + element``. Fields are sliced and concatenated like any channels:

>>> import torch
>>> features = torch.randn(2, 6 * 8, 16, 16)  # six fields of p8
>>> first_two = features[:, : 2 * 8]
>>> both = torch.cat([first_two, features], dim=1)  # eight fields
>>> by_orientation = features.unflatten(1, (-1, 8))  # [2, 6, 8, 16, 16]

This package knows parameters, shapes and what to say about bad input. What the numbers mean is the
business of `basis`, how a convolution is run that of `engines`.
"""

from econv.layers.activations import GroupActivation2d, GroupActivation3d, group_activation
from econv.layers.attention import GroupAttentionPool2d, GroupAttentionPool3d, GroupFrameScore2d
from econv.layers.convolution import (
    ConvOptions,
    GroupConv,
    GroupConv2d,
    GroupConv3d,
    GroupLinear,
    GroupUpsampleConv,
    GroupUpsampleConv2d,
    GroupUpsampleConv3d,
    LiftConv,
    LiftConv2d,
    LiftConv3d,
    PDOConv,
    PDOConv2d,
    PDOConv3d,
    VectorConv,
    VectorConv2d,
    VectorConv3d,
)
from econv.layers.fields import Curl2d, FieldConv2d, FieldConv3d
from econv.layers.frames import GroupWindows2d
from econv.layers.fused import norm_relu, norm_relu_conv
from econv.layers.normalisation import (
    GroupBatchNorm2d,
    GroupBatchNorm3d,
    GroupGroupNorm2d,
    GroupGroupNorm3d,
    GroupInstanceNorm2d,
    GroupInstanceNorm3d,
    GroupLayerNorm2d,
    GroupLayerNorm3d,
)
from econv.layers.orientations import (
    FieldParameter,
    GroupDropout2d,
    GroupDropout3d,
    GroupPool2d,
    GroupPool3d,
    GroupPReLU2d,
    GroupPReLU3d,
    Restrict2d,
    Restrict3d,
    Spread2d,
    Spread3d,
    restrict,
)
from econv.layers.sampling import (
    CentredAvgPool2d,
    CentredAvgPool3d,
    CentredMaxPool2d,
    CentredMaxPool3d,
    Downsample2d,
    Downsample3d,
    Enlarge2d,
    Enlarge3d,
    NearestResize2d,
    NearestResize3d,
    Recentre2d,
    Recentre3d,
    Upsample2d,
    Upsample3d,
    recentre,
    window_count,
)
from econv.layers.synchronised import (
    SyncBatchNorm,
    SyncGroupBatchNorm2d,
    SyncGroupBatchNorm3d,
    convert_sync_batchnorm,
)
from econv.layers.window import GroupWindowConv, GroupWindowConv2d, GroupWindowConv3d

__all__ = [
    "CentredAvgPool2d",
    "CentredAvgPool3d",
    "CentredMaxPool2d",
    "CentredMaxPool3d",
    "ConvOptions",
    "Curl2d",
    "Downsample2d",
    "Downsample3d",
    "Enlarge2d",
    "Enlarge3d",
    "FieldConv2d",
    "FieldConv3d",
    "FieldParameter",
    "GroupActivation2d",
    "GroupActivation3d",
    "GroupAttentionPool2d",
    "GroupAttentionPool3d",
    "GroupBatchNorm2d",
    "GroupBatchNorm3d",
    "GroupConv",
    "GroupConv2d",
    "GroupConv3d",
    "GroupDropout2d",
    "GroupDropout3d",
    "GroupFrameScore2d",
    "GroupGroupNorm2d",
    "GroupGroupNorm3d",
    "GroupInstanceNorm2d",
    "GroupInstanceNorm3d",
    "GroupLayerNorm2d",
    "GroupLayerNorm3d",
    "GroupLinear",
    "GroupPReLU2d",
    "GroupPReLU3d",
    "GroupPool2d",
    "GroupPool3d",
    "GroupUpsampleConv",
    "GroupUpsampleConv2d",
    "GroupUpsampleConv3d",
    "GroupWindowConv",
    "GroupWindowConv2d",
    "GroupWindowConv3d",
    "GroupWindows2d",
    "LiftConv",
    "LiftConv2d",
    "LiftConv3d",
    "NearestResize2d",
    "NearestResize3d",
    "PDOConv",
    "PDOConv2d",
    "PDOConv3d",
    "Recentre2d",
    "Recentre3d",
    "Restrict2d",
    "Restrict3d",
    "Spread2d",
    "Spread3d",
    "SyncBatchNorm",
    "SyncGroupBatchNorm2d",
    "SyncGroupBatchNorm3d",
    "Upsample2d",
    "Upsample3d",
    "VectorConv",
    "VectorConv2d",
    "VectorConv3d",
    "convert_sync_batchnorm",
    "group_activation",
    "norm_relu",
    "norm_relu_conv",
    "recentre",
    "restrict",
    "window_count",
]
