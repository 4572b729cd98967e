"""The methods that DawnPiper is measured against (its §5.1), at the granularity of layers, from the same profiles."""
