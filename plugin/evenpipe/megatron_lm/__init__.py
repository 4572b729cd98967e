"""The drop-in for Megatron-LM's own scripts: flags in Megatron's parser, EvenPipe's schedule where they ask for it."""
