"""What becomes of each operation, as one registered rule each.

Every file of this folder is imported. Its rules know the plan and nothing of each other.
"""

import importlib
import pkgutil

from econv.conversion.registry import dropping, rule_of, rule_of_module

__all__ = ["dropping", "rule_of", "rule_of_module"]

for _file in pkgutil.iter_modules(__path__, f"{__name__}."):
    importlib.import_module(_file.name)
