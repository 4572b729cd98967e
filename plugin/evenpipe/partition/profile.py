"""What every node of a model takes and keeps: the profile that balance points and searches read (DawnPiper §3.2)."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from typing_extensions import Self

from evenpipe.report.files import write_atomically
from evenpipe.wording.validation import first_message

__all__ = ["Document", "Frozen", "Node", "Origin", "Parameter", "Profile", "ProfileError", "Storage"]


class ProfileError(ValueError):
    """A profile cannot be read or is not of what is asked for; the message is one line that names the file."""


class Frozen(BaseModel):
    """Values that do not change, and no others."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Document(Frozen):
    """A file of its own, in one format; `Invalid` is raised where there is none of it at a path."""

    Invalid: ClassVar[type[ValueError]]
    indent: ClassVar[int | None] = None
    format: str

    def write(self, path: Path) -> None:
        """Put it at `path` as JSON, whole or not at all. Raises OSError."""
        write_atomically(path, self.model_dump_json(indent=self.indent))

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the document at `path`. Raises `Invalid`, one line that names the file."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise cls.Invalid(f"{path}: {error.strerror}") from error
        except ValidationError as error:
            said = first_message(error, "the file")
            raise cls.Invalid(f"{path}: no {cls.model_fields['format'].default}: {said}") from error


class Storage(Frozen):
    """Memory that a node allocates for one micro-batch; views of it, and what is saved twice, count once.

    `producer`: the node that allocates it; −1: it is there before (an input of the model, or what every stage computes
    for itself, as a mask). `users`: the nodes that read it in the forward, through whatever view, ascending. `savers`:
    the nodes, ascending, whose backward needs it, the producer among them if its own does; none: it is freed when the
    last user has ended. `changers`: the nodes, ascending, other than the producer, that write to it in place.
    """

    nbytes: int = Field(ge=0)
    producer: int = Field(ge=-1)
    users: tuple[int, ...] = ()
    savers: tuple[int, ...] = ()
    changers: tuple[int, ...] = ()


class Parameter(Frozen):
    """A parameter: every stage with one of its `users` (nodes, ascending) has a copy, gradient and optimizer state."""

    name: str
    nbytes: int = Field(ge=0)
    gradient_bytes: int = Field(ge=0)
    optimizer_bytes: int = Field(ge=0)
    users: tuple[int, ...] = Field(min_length=1)


class Node(Frozen):
    """One operation, in the order of DawnPiper B.1: by depth, then by the start of its forward.

    Milliseconds and bytes of one micro-batch. `activation_bytes`: of storages that it allocates. `released_bytes`: of
    those that it is the last to read and no backward needs. `parameter_bytes`, `gradient_bytes` and `optimizer_bytes`:
    of parameters that it is the first to use. `output_bytes`: of the tensors that it returns, views too. `cut_allowed`:
    a stage may end with it; `cut_bytes`: what the next stage then receives. `random`: it draws random numbers.
    `left_bytes`: of the gradient of its output, where that and what it saved wait for the second half of a backward, as
    a linear layer's weight does; 0 for all others.
    """

    name: str
    forward_ms: float = Field(ge=0)
    backward_ms: float = Field(ge=0)
    activation_bytes: int = Field(ge=0)
    parameter_bytes: int = Field(ge=0)
    gradient_bytes: int = Field(ge=0)
    optimizer_bytes: int = Field(ge=0)
    released_bytes: int = Field(ge=0)
    output_bytes: int = Field(ge=0)
    cut_allowed: bool
    cut_bytes: int = Field(ge=0)
    random: bool = False
    left_bytes: int = Field(default=0, ge=0)


class Origin(Frozen):
    """What a profile is of, which what uses it must be too. `digest`: of the graph, with shapes and parameters.

    `sequence_length`, `attention` and `small`: with what a model known by name, or a configuration, was made.
    `autocast`: the precision of the `torch.autocast` that it was traced under, and is trained under.
    """

    model: str
    micro_batch_size: int = Field(ge=1)
    device: str
    precision: str
    source: str
    digest: str
    versions: dict[str, str]
    sequence_length: int | None = None
    attention: str | None = None
    small: bool = False
    autocast: str | None = None

    @property
    def is_function(self) -> bool:
        """Return whether the model is a FILE.py:FUNCTION: to make it again executes that file."""
        return ":" in Path(self.model).name


class Profile(Document):
    """A model, node by node. `layer_ends`: the nodes that end what its author calls a layer, where coarser cuts go."""

    Invalid: ClassVar[type[ValueError]] = ProfileError
    format: Literal["evenpipe.profile/1"] = "evenpipe.profile/1"
    origin: Origin
    nodes: tuple[Node, ...] = Field(min_length=1)
    storages: tuple[Storage, ...] = ()
    parameters: tuple[Parameter, ...] = ()
    layer_ends: tuple[int, ...] = ()
