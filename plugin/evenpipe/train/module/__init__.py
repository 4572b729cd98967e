"""The engine "module": a small transformer of plain `nn.Module`s, in pipelines of plain PyTorch."""
