"""Ada-Grouper's online half: measure the links, and choose again at an iteration boundary."""
