"""2BW without a framework: steps finished one batch later, a stream of batches, and what a checkpoint needs of both."""
