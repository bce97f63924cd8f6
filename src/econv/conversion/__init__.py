"""Any CNN → its equivariant version.

The source is traced (`trace`) and every operation of it (`operations`) planned (`plan`) by its rule
(`rules`, `registry`), for widths that are chosen last (`widths`). The plan is built as a network
with the source's call signature (`network`), which on GPUs runs in another form (`fusion`), given
the source's weights where that is wanted (`fit`) and reported (`report`). `convert` is the one call
for all of it.
"""

from econv.conversion.convert import MATCHES, convert, rebuild
from econv.conversion.detection import convert_detector
from econv.conversion.fit import fit_filter
from econv.conversion.network import ConvertedNetwork
from econv.conversion.report import Cost, Line, Report
from econv.conversion.trace import ConversionError

__all__ = [
    "MATCHES",
    "ConversionError",
    "ConvertedNetwork",
    "Cost",
    "Line",
    "Report",
    "convert",
    "convert_detector",
    "fit_filter",
    "rebuild",
]
