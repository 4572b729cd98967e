"""The trainer behind `evenpipe train`, from options to results; and pipelines of a user's own modules."""
