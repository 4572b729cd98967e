"""Hugging Face's models in a pipeline: `PipelineTrainer` is like `Trainer`; `pipeline` is for loops of your own."""

from evenpipe.torch.hf.cut_model import pipeline
from evenpipe.torch.hf.loading import weightless_model
from evenpipe.torch.hf.saving import save_pretrained
from evenpipe.torch.hf.trainer import PipelineTrainer

__all__ = ["PipelineTrainer", "pipeline", "save_pretrained", "weightless_model"]
