"""2BW without a framework: a stream of batches, steps finished one batch later, their log, and their checkpoint."""
