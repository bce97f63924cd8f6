"""The laboratory: is a model equivariant, where does the error come from, does training keep it?

Functions that return numbers, as frozen results with ``to_dict``. They know models, images and the
checkers of `testing`; they draw nothing and write no files.
"""

from econv.lab.images import load_images, windowed
from econv.lab.kinds import element_name, find_group
from econv.lab.measure import (
    angle_curve,
    error_sources,
    layer_errors,
    operator_symbols,
    resolution_curve,
)
from econv.lab.results import (
    AngleCurve,
    Blame,
    ErrorSources,
    LayerError,
    LayerErrors,
    OperatorSymbol,
    OutputError,
    ResolutionCurve,
    verdict,
)
from econv.lab.twins import plain_twin
from econv.layers.normalisation import calibrate

__all__ = [
    "AngleCurve",
    "Blame",
    "ErrorSources",
    "LayerError",
    "LayerErrors",
    "OperatorSymbol",
    "OutputError",
    "ResolutionCurve",
    "angle_curve",
    "calibrate",
    "element_name",
    "error_sources",
    "find_group",
    "layer_errors",
    "load_images",
    "operator_symbols",
    "plain_twin",
    "resolution_curve",
    "verdict",
    "windowed",
]
