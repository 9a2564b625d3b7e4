"""What one-line quantization does to a model, measured."""

from optigpu.facade.production_demo import demo_production_ready as demo_production_ready

__all__ = ["demo_production_ready"]
