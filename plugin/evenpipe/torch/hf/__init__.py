"""Hugging Face's models in a pipeline: `PipelineTrainer`, which takes what transformers' `Trainer` takes."""

from evenpipe.torch.hf.loading import weightless_model
from evenpipe.torch.hf.saving import save_pretrained
from evenpipe.torch.hf.trainer import PipelineTrainer

__all__ = ["PipelineTrainer", "save_pretrained", "weightless_model"]
