"""Words of the one line that a user reads of an error: names that may have been meant, and what a value must be."""
