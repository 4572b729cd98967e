"""DawnPiper: traces a model node by node, profiles it, and finds where to cut it into stages, and what to save."""
