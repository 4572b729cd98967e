"""Settings that all tests share."""

from hypothesis import settings

# Machines that run several processes at once are no place for deadlines per example.
settings.register_profile("evenpipe", deadline=None)
settings.load_profile("evenpipe")
