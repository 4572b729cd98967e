"""The engine of a plain model that `evenpipe partition` has cut."""
