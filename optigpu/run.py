"""The former place of `optigpu.measure`: what is imported from here is the same.

Importing this module makes it the attribute `optigpu.run` of the package, in place of the function of that name. So it
can be called as that function is.
"""

import sys
from types import ModuleType

from optigpu.facade.measuring import run as _run
from optigpu.measure import NONE_DONE, REPLICATE, Report, never, run

__all__ = ["NONE_DONE", "REPLICATE", "Report", "never", "run"]


class _CalledAsFunction(ModuleType):
    __call__ = staticmethod(_run)


sys.modules[__name__].__class__ = _CalledAsFunction
