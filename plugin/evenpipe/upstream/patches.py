"""Replace upstream symbols: all of a set or none, only where they are known to fit, and reversibly."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from evenpipe.upstream.expectation import Distribution, Expectation, match_signature, verify
from evenpipe.upstream.symbols import MARK, PRESENT, Slot, UpstreamError, code_module, locate, module_of, signature_of

__all__ = ["APPLIED", "FITS", "Mark", "Patch", "PatchSet", "PatchState", "around"]

FITS = "fits"
APPLIED = "applied"
_INHERITED = object()


@dataclass(frozen=True)
class Patch:
    """One upstream symbol and what takes its place.

    `targets` are "module.path:attribute.path": the first is where the symbol is defined, the others are re-bindings
    made by `from x import f`, which would go on calling the original. `versions` maps a supported series (or ANY) to
    the recorded signature of the original, or to PRESENT: of a class that is called by its methods, which the set then
    expects. `replacement(original)` makes a new function or class at each call. With
    `rebinds`, whatever other loaded module holds the original under any name gets the replacement too.
    """

    name: str
    targets: tuple[str, ...]
    distribution: Distribution
    versions: Mapping[str, str]
    replacement: Callable[[Any], Any]
    reason: str
    rebinds: bool = False


def around(call: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The `replacement` of a function under which `call` gets the original, followed by what that would have got."""

    def replacement(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return call(original, *args, **kwargs)

        return replaced

    return replacement


class Mark(NamedTuple):
    """Carried by every replacement, so that a second one is refused and the original stays visible."""

    owner: str
    original: Any


class PatchState(NamedTuple):
    """Whether a patch can be applied: `state` is "fits", "applied", or one line that says why not."""

    patch: Patch
    state: str


class _Binding(NamedTuple):
    slot: Slot
    before: Any
    after: Any


class PatchSet:
    """The symbols that one feature replaces and calls; its patches are applied and reverted together.

    The instance remembers what it replaced. `expectations` are symbols that the feature calls, or sets on single
    objects. `guard` returns one line when the set must not be applied
    in this process, else None. Raises ValueError when two patches share a target.
    """

    def __init__(
        self,
        name: str,
        patches: Sequence[Patch],
        expectations: Sequence[Expectation] = (),
        guard: Callable[[], str | None] = lambda: None,
    ) -> None:
        targets = [target for patch in patches for target in patch.targets]
        repeated = sorted({target for target in targets if targets.count(target) > 1})
        if repeated:
            raise ValueError(f"{name}: {repeated[0]} is the target of two patches: keep one")
        self.name = name
        self._patches = tuple(patches)
        self.expectations = tuple(expectations)
        self._guard = guard
        self._bindings: list[_Binding] = []

    @property
    def applied(self) -> bool:
        return bool(self._bindings)

    def list(self) -> tuple[Patch, ...]:
        """Return the patches, in the order in which they are applied."""
        return self._patches

    def check(self) -> tuple[PatchState, ...]:
        """Dry run: the state of every patch; imports the modules concerned and changes nothing.

        What another instance of this set has applied is applied, too.
        """
        return tuple(PatchState(patch, self._state(patch)) for patch in self._patches)

    def apply(self) -> None:
        """Replace every symbol, or none. Applying an applied set changes nothing.

        Raises UpstreamError for the first thing that does not fit.
        """
        if self.applied:
            return
        self._permit()
        bindings = [binding for patch in self._patches for binding in self._bind(patch)]
        verify(self.expectations)  # last: modules that are loaded need not be read
        try:
            for binding in bindings:
                setattr(*binding.slot, binding.after)
                self._bindings.append(binding)
        except BaseException:
            self._restore()
            raise

    def apply_once(self) -> None:
        """Apply the set, unless another instance of it has been."""
        if any(state != APPLIED for _, state in self.check()):
            self.apply()

    def revert(self) -> None:
        """Put every original back; does nothing unless applied.

        Raises UpstreamError, and puts nothing back, when somebody else has since replaced one of the symbols.
        """
        for slot, _, after in self._bindings:
            if slot.value is not after:
                where = f"{getattr(slot.owner, '__name__', slot.owner)}:{slot.name}"
                raise UpstreamError(
                    f"{where}: replaced again after {self.name} was applied "
                    f"(by code in {code_module(slot.value)}): revert that patch first"
                )
        self._restore()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        self.apply()
        try:
            yield
        finally:
            self.revert()

    def _state(self, patch: Patch) -> str:
        try:
            mark = getattr(locate(patch.targets[0]).value, MARK, None)
            if mark is not None and mark.owner == self._label(patch):
                return APPLIED
            self._permit()
            _fitting_slots(patch)
        except UpstreamError as error:
            return str(error)
        return FITS

    def _permit(self) -> None:
        refusal = self._guard()
        if refusal is not None:
            raise UpstreamError(f"{self.name}: {refusal}")

    def _bind(self, patch: Patch) -> tuple[_Binding, ...]:
        slots = _fitting_slots(patch)
        original = slots[0].value
        if patch.rebinds:
            slots = (*slots, *(slot for slot in _slots_that_hold(original) if slot not in slots))
        after = patch.replacement(original)
        setattr(after, MARK, Mark(self._label(patch), original))
        return tuple(_Binding(slot, vars(slot.owner).get(slot.name, _INHERITED), after) for slot in slots)

    def _label(self, patch: Patch) -> str:
        return f"{self.name}/{patch.name}"

    def _restore(self) -> None:
        while self._bindings:
            slot, before, _ = self._bindings.pop()
            if before is _INHERITED:
                delattr(*slot)
            else:
                setattr(*slot, before)


def _fitting_slots(patch: Patch) -> tuple[Slot, ...]:
    """Return where the symbol is bound, the definition first. Raises UpstreamError when anything is not as recorded."""
    series = patch.distribution.series(patch.versions)
    slots = tuple(locate(target) for target in patch.targets)
    for target, slot in zip(patch.targets, slots, strict=True):
        mark = getattr(slot.value, MARK, None)
        if mark is not None:
            raise UpstreamError(f"{target}: already replaced by {mark.owner}: revert that first")
    symbol, original = patch.targets[0], slots[0].value
    if patch.versions[series] != PRESENT:
        match_signature(symbol, patch.distribution, signature_of(original), patch.versions[series])
    code = code_module(original)
    if code is not None and code != module_of(symbol):
        raise UpstreamError(
            f"{symbol}: already replaced by code in {code}, expected {module_of(symbol)}: remove the other patch"
        )
    for target, slot in zip(patch.targets[1:], slots[1:], strict=True):
        if slot.value is not original:
            raise UpstreamError(
                f"{target}: bound to code in {code_module(slot.value)}, expected what {symbol} is bound to: "
                f"remove the other patch"
            )
    return slots


def _slots_that_hold(value: Any) -> list[Slot]:
    """Every name in a loaded module that is bound to `value`, such as a script's `from x import f` made earlier."""
    return [
        Slot(module, name)
        for module in list(sys.modules.values())
        if isinstance(module, ModuleType)
        for name, held in list(vars(module).items())
        if held is value
    ]
