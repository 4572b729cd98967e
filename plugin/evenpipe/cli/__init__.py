"""The command line: ``main`` dispatches, each sub-command is one thin file."""
