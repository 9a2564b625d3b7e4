"""The models of the engine's tests."""

from tests.engine.tiny_models import biased_models as biased_models
from tests.engine.tiny_models import models_dir as models_dir
