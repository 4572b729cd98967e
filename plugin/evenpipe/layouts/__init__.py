"""Which layers of a Megatron GPT each (virtual) stage gets: the layout whose slowest stage is fastest."""
