"""Networks by name: ResNets as everybody knows them, the paper's networks, and ordinary twins.

The ResNets for photographs and the U-Nets are for volumes, too: their dimension is the group's.

This package knows architectures and nothing of how they are trained. Every network takes
``group=None`` for its twin: the same layers as ordinary convolutions and batch norms.

The modules, from the bottom up: `kit`, the parts of a group or ordinary ones; `classifier`, what
all networks share; `convnet`, `resnet` and `imagenet`, classifiers by family; `features`, their
maps; `classifiers`, these by name; `dense`, an answer for every pixel; `names`, all by name.
"""

from econv.models.classifiers import MODELS
from econv.models.convnet import ConvNet
from econv.models.dense import FPN, EncoderUNet, UNet
from econv.models.features import FeatureInfo, Features
from econv.models.imagenet import ImageNetResNet
from econv.models.names import create_model, list_models
from econv.models.resnet import ResNet

__all__ = [
    "FPN",
    "MODELS",
    "ConvNet",
    "EncoderUNet",
    "FeatureInfo",
    "Features",
    "ImageNetResNet",
    "ResNet",
    "UNet",
    "create_model",
    "list_models",
]
