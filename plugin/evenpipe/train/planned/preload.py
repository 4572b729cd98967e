"""Imported by a fork server; nothing else imports it."""

from evenpipe.train.preload import preload

preload("evenpipe.train.planned.engine")
