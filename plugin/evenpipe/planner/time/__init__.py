"""Time: of kernels and collectives, of stages, and of an iteration under a verified schedule."""
