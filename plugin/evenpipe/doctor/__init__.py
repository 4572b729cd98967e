"""Looks at the machines of a job before it starts: what is installed, configured and connected, and what hurts.

Every check has a time limit and changes nothing that stays. Works without torch, without a GPU and without a job.
"""

from evenpipe.doctor.finding import Finding, Verdict

__all__ = ["Finding", "Verdict"]
