"""econv: convolutional networks that are equivariant to rotations and reflections.

Filters are partial differential operators (PDO-eConvs, ICML 2020): turned exactly, in any group
``pn`` or ``pnm``, and brought to the pixel grid by finite-difference stencils.
"""

from econv import models, solids, testing
from econv.basis import FilterBasis, filter_basis
from econv.checking import checked
from econv.conversion import ConversionError, convert, convert_detector, rebuild
from econv.engines import engine

# Here and not when first used: loading the module of this name later would hide the function.
from econv.export import export
from econv.groups import Group
from econv.layers import (
    CentredAvgPool2d,
    CentredMaxPool2d,
    Curl2d,
    Downsample2d,
    Enlarge2d,
    FieldConv2d,
    FieldParameter,
    GroupActivation2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupConv3d,
    GroupDropout2d,
    GroupGroupNorm2d,
    GroupInstanceNorm2d,
    GroupLayerNorm2d,
    GroupLinear,
    GroupPool2d,
    GroupPReLU2d,
    GroupUpsampleConv2d,
    LiftConv2d,
    LiftConv3d,
    NearestResize2d,
    Recentre2d,
    Restrict2d,
    Spread2d,
    Upsample2d,
    VectorConv2d,
    VectorConv3d,
    convert_sync_batchnorm,
    group_activation,
    restrict,
)
from econv.models import create_model
from econv.operators import OperatorSet, Polynomial, operator_set
from econv.parameters import parameter_groups
from econv.pretrained import from_pretrained
from econv.stencils import Central, Stencil, central, stencil_set

__version__ = "0.1.0"

__all__ = [
    "Central",
    "CentredAvgPool2d",
    "CentredMaxPool2d",
    "ConversionError",
    "Curl2d",
    "Downsample2d",
    "Enlarge2d",
    "FieldConv2d",
    "FieldParameter",
    "FilterBasis",
    "Group",
    "GroupActivation2d",
    "GroupBatchNorm2d",
    "GroupConv2d",
    "GroupConv3d",
    "GroupDropout2d",
    "GroupGroupNorm2d",
    "GroupInstanceNorm2d",
    "GroupLayerNorm2d",
    "GroupLinear",
    "GroupPReLU2d",
    "GroupPool2d",
    "GroupUpsampleConv2d",
    "LiftConv2d",
    "LiftConv3d",
    "NearestResize2d",
    "OperatorSet",
    "Polynomial",
    "Recentre2d",
    "Restrict2d",
    "Spread2d",
    "Stencil",
    "Upsample2d",
    "VectorConv2d",
    "VectorConv3d",
    "central",
    "checked",
    "convert",
    "convert_detector",
    "convert_sync_batchnorm",
    "create_model",
    "engine",
    "export",
    "filter_basis",
    "from_pretrained",
    "group_activation",
    "models",
    "operator_set",
    "parameter_groups",
    "rebuild",
    "restrict",
    "solids",
    "stencil_set",
    "testing",
]
