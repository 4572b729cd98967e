"""Adaptive kFkB in DeepSpeed's engine: k, and with leave b, measured, chosen and chosen again while training."""
