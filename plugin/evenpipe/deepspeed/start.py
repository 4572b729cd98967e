"""Has `deepspeed.initialize` make EvenPipe's engine where the configuration has a section "evenpipe"."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from evenpipe.deepspeed.section import Section, SectionError, section_of, with_deepspeeds_names
from evenpipe.deepspeed.supported import DEEPSPEED, ENGINE, INITIALIZE, expectations, recorded
from evenpipe.schedule import AUTO, ScheduleError
from evenpipe.upstream import Patch, PatchSet, UpstreamError
from evenpipe.upstream.ending import apply_or_end, end_job, end_where_torch_is_too_old, end_with_the_first_error
from evenpipe.upstream.imports import when_imported

__all__ = ["engine_patches", "install", "start_patches"]


def install() -> None:
    """Prepare this process; neither DeepSpeed nor torch is imported for it.

    A release of DeepSpeed that EvenPipe does not know ends the job with one line when it is imported.
    """
    end_where_torch_is_too_old()
    when_imported("deepspeed", functools.partial(apply_or_end, start_patches()))


def start_patches() -> PatchSet:
    """Return what `install` applies."""
    start = Patch(
        name="initialize",
        targets=(INITIALIZE,),
        distribution=DEEPSPEED,
        versions=recorded(INITIALIZE),
        replacement=_reading_the_section,
        reason="the first place that has both the configuration and the model",
        rebinds=True,
    )
    return PatchSet("deepspeed", [start])


def engine_patches(section: Section) -> PatchSet:
    """Return what is applied while `deepspeed.initialize` makes an engine with a section: all others are stock."""
    engine = Patch(
        name="engine",
        targets=(ENGINE, "deepspeed:PipelineEngine"),
        distribution=DEEPSPEED,
        versions=recorded(ENGINE),
        replacement=functools.partial(_evenpipe_engine, section),
        reason="deepspeed.initialize has no way to be given another engine",
    )
    return PatchSet("deepspeed-engine", [engine], expectations())


def _evenpipe_engine(section: Section, original: Any) -> Any:
    if section.streams:
        from evenpipe.deepspeed.two_bw.engine import TwoBWEngine as Engine
    elif section.schedule == AUTO:
        from evenpipe.deepspeed.searched import ChoosingEngine as Engine
    elif "times" in section.spec.needs:
        from evenpipe.deepspeed.searched import SearchedEngine as Engine
    elif section.group_size == "auto":
        from evenpipe.deepspeed.adaptive import AdaptiveEngine as Engine
    elif section.swap == "auto":
        from evenpipe.deepspeed.capped import CappedEngine as Engine
    else:
        from evenpipe.deepspeed.engine import EvenPipeEngine as Engine
    assert issubclass(Engine, original)
    return Engine


def _reading_the_section(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def initialize(*args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs)
        config = _config(call.arguments)
        if config is None:
            return original(*args, **kwargs)
        try:
            section = section_of(config)
            if section is None:
                return original(*args, **kwargs)
            if _has_one_stage(call.arguments.get("model")):
                from evenpipe.deepspeed.unsupported import refuse_for_one_stage, said_of_one_stage

                refuse_for_one_stage(section)
                made = original(*args, **kwargs)
                said_of_one_stage(section)
                return made
            # Imported here, as it imports torch.
            from evenpipe.runtime.heartbeat import silent_peer

            end_with_the_first_error(silent_peer)
            with engine_patches(section).in_force():
                # Imported here: it needs DeepSpeed, and to have been found to be as recorded.
                from evenpipe.deepspeed.arrange import arrange
                from evenpipe.deepspeed.unsupported import refuse_configuration, refuse_uneven_experts

                refuse_configuration(config)
                arrange(section, config, call.arguments)
                refuse_uneven_experts(call.arguments["model"])
                return original(*call.args, **call.kwargs)
        except (SectionError, UpstreamError) as error:
            end_job(str(error))
        except ScheduleError as error:
            end_job(with_deepspeeds_names(error))

    return initialize


def _has_one_stage(model: Any) -> bool:
    from deepspeed.pipe import PipelineModule

    return isinstance(model, PipelineModule) and model.num_stages == 1


def _config(given: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the configuration, from wherever `deepspeed.initialize` would take it; None where it would find none."""
    from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config

    places = (given.get("config"), given.get("config_params"), getattr(given.get("args"), "deepspeed_config", None))
    found = next((place for place in places if place is not None), None)
    loaded: Mapping[str, Any] | None = load_ds_config(found) if found is not None else None
    return loaded
