"""Pipelines of plain torch: `ModulePipeline` of modules of your own, `PlannedPipeline` of a model that a plan cuts."""
