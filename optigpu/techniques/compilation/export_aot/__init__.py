"""export_aot: the technique and its parts."""

from optigpu.techniques.compilation.export_aot.technique import ExportAot

__all__ = ["ExportAot"]
