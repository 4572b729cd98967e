"""Profile: what the stages of a megatron-core model will hold, found out before anything is run."""

from evenpipe.megatron.profile.planned_run import PlannedRun, ProfileError, stage_memories, stage_memory

__all__ = ["PlannedRun", "ProfileError", "stage_memories", "stage_memory"]
