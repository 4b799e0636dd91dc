"""Built-in targets: real Flax modules with published shapes, for planning without writing a model."""

from lensjax.models.decoder import Config, Decoder
from lensjax.models.targets import Target, create_state, names, target, train_step

__all__ = ["Config", "Decoder", "Target", "create_state", "names", "target", "train_step"]
