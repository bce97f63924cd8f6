"""The laboratory: is a model equivariant, where does the error come from, does training keep it?

Functions that return numbers, as frozen results with ``to_dict``. They know models, images and the
checkers of `testing`; they draw nothing and write no files.
"""

from econv.lab.advise import KINDS_OF_ADVICE, advice
from econv.lab.images import load_images, windowed
from econv.lab.kinds import element_name, find_group
from econv.lab.lattice import sizes
from econv.lab.lie import lie_derivatives
from econv.lab.measure import (
    angle_curve,
    error_sources,
    layer_errors,
    operator_symbols,
    resolution_curve,
    telling_elements,
)
from econv.lab.results import (
    Advice,
    AngleCurve,
    Blame,
    ErrorSources,
    ErrorSplit,
    LayerError,
    LayerErrors,
    LieDerivative,
    LieDerivatives,
    Misfit,
    OperatorSymbol,
    OutputError,
    ResolutionCurve,
    Sizes,
    Source,
    Suggestion,
    size_verdict,
    verdict,
)
from econv.lab.split import output_error, split_error
from econv.lab.twins import plain_twin
from econv.layers.normalisation import calibrate

__all__ = [
    "KINDS_OF_ADVICE",
    "Advice",
    "AngleCurve",
    "Blame",
    "ErrorSources",
    "ErrorSplit",
    "LayerError",
    "LayerErrors",
    "LieDerivative",
    "LieDerivatives",
    "Misfit",
    "OperatorSymbol",
    "OutputError",
    "ResolutionCurve",
    "Sizes",
    "Source",
    "Suggestion",
    "advice",
    "angle_curve",
    "calibrate",
    "element_name",
    "error_sources",
    "find_group",
    "layer_errors",
    "lie_derivatives",
    "load_images",
    "operator_symbols",
    "output_error",
    "plain_twin",
    "resolution_curve",
    "size_verdict",
    "sizes",
    "split_error",
    "telling_elements",
    "verdict",
    "windowed",
]
