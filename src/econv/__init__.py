"""econv: convolutional networks that are equivariant to rotations and reflections.

Filters are partial differential operators (PDO-eConvs, ICML 2020): turned exactly, in any group
``pn`` or ``pnm``, and brought to the pixel grid by finite-difference stencils.
"""

from econv import models, testing
from econv.basis import FilterBasis, filter_basis
from econv.engines import engine
from econv.groups import Group
from econv.layers import (
    Downsample2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupDropout2d,
    GroupInstanceNorm2d,
    GroupLayerNorm2d,
    GroupPool2d,
    GroupUpsampleConv2d,
    LiftConv2d,
    Restrict2d,
    Upsample2d,
    VectorConv2d,
    restrict,
)
from econv.models import create_model
from econv.operators import OperatorSet, Polynomial, operator_set
from econv.stencils import Central, Stencil, central, stencil_set

__version__ = "0.1.0"

__all__ = [
    "Central",
    "Downsample2d",
    "FilterBasis",
    "Group",
    "GroupBatchNorm2d",
    "GroupConv2d",
    "GroupDropout2d",
    "GroupInstanceNorm2d",
    "GroupLayerNorm2d",
    "GroupPool2d",
    "GroupUpsampleConv2d",
    "LiftConv2d",
    "OperatorSet",
    "Polynomial",
    "Restrict2d",
    "Stencil",
    "Upsample2d",
    "VectorConv2d",
    "central",
    "create_model",
    "engine",
    "filter_basis",
    "models",
    "operator_set",
    "restrict",
    "stencil_set",
    "testing",
]
