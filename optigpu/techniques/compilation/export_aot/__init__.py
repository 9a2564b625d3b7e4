"""export_aot: the technique is in technique.py, its parts in the other modules."""

from optigpu.techniques.compilation.export_aot.technique import ExportAot

__all__ = ["ExportAot"]
