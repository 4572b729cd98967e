"""``python -m evenpipe`` is the command ``evenpipe``."""

import sys

from evenpipe.cli.main import main

sys.exit(main())
