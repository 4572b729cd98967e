"""Report: schedules, timelines and memory as a text grid, a Perfetto trace, a picture, and a page.

Nothing is imported here: a training job needs none of it but files and lines of a log.
"""
