"""What EvenPipe expects of a package it calls or patches: its release and the signatures of its symbols."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from evenpipe.upstream.source import Read, found_in, path_of
from evenpipe.upstream.symbols import PRESENT, UpstreamError, is_bound, locate, module_of, original_of, signature_of

__all__ = ["ANY", "Distribution", "Expectation", "match_signature", "verify"]

ANY = "*"
"""The series of a symbol whose signature holds for every release of its distribution."""


@dataclass(frozen=True)
class Distribution:
    """A package as its registry names it, and where its modules state their version.

    `version_at` ("module:attribute") comes before the registry's metadata, since a source checkout on the path
    shadows an installed package without touching its metadata. `releases` are the supported series: what is not
    recorded for one of them, it does not have, and nothing asks it for.
    """

    name: str
    version_at: str | None = None
    releases: tuple[str, ...] = ()

    def version(self) -> str:
        """Return the version that an import would load. Raises UpstreamError when the package is absent."""
        try:
            if self.version_at is None:
                return metadata.version(self.name)
            module, _, attribute = self.version_at.partition(":")
            # The modules in DeepSpeed's source archives have a blank behind it.
            return str(getattr(import_module(module), attribute)).strip()
        except (ImportError, AttributeError) as error:
            raise UpstreamError(f"{self.name} is not installed ({error}): install it in this environment") from error

    def series(self, supported: Iterable[str], version: str | None = None) -> str:
        """Which of `supported` a version, by default the installed one, belongs to: 0.16.1 and 0.16.1+abc to "0.16".

        Raises UpstreamError when it belongs to none, as pre-releases (0.17.0rc1, 0.17.0.dev0) do: they may lack what
        their series is recorded with.
        """
        version = self.version() if version is None else version
        for series in supported:
            if series == ANY or re.fullmatch(rf"{re.escape(series)}(\.\d+)*(\.post\d+)?(\+.+)?", version):
                return series
        known = ", ".join(supported)
        raise UpstreamError(f"{self.name} {version}: unknown release, expected one of {known}: install one of these")


@dataclass(frozen=True)
class Expectation:
    """An upstream symbol that EvenPipe calls, and its recorded signature per supported series.

    `symbol` is "module.path:attribute.path"; `versions` maps a series ("0.16", or ANY) to what `signature_of` returned
    for it when it was recorded, or to PRESENT: what is not loaded is looked for in its source. With a `reason`,
    EvenPipe sets it on single objects, such as the optimizer of a run, without a patch of all.
    """

    symbol: str
    distribution: Distribution
    versions: Mapping[str, str]
    reason: str | None = None

    def verify(self, read: Read | None = None) -> None:
        """Raises UpstreamError for an unknown release, a missing symbol or a changed signature."""
        series = self.distribution.series(self.distribution.releases or self.versions)
        expected = self.versions.get(series)
        if expected == PRESENT:
            if not is_bound(self.symbol):
                found_in(_root(self.symbol), self.symbol, PRESENT, {} if read is None else read)
        elif expected is not None:
            found = signature_of(original_of(locate(self.symbol).value))
            match_signature(self.symbol, self.distribution, found, expected)


def verify(expectations: Iterable[Expectation]) -> None:
    """Raise UpstreamError naming the first of these that does not hold for what an import would load."""
    read: Read = {}
    for expectation in expectations:
        expectation.verify(read)


def _root(symbol: str) -> Path:
    """Return the folder that the package of `symbol` would be imported from; nothing is imported."""
    package = ".".join(module_of(symbol).split(".")[:2])  # of a namespace, such as megatron, each may have another
    spec = find_spec(package.partition(".")[0])
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        if path_of(Path(folder).parent, package) is not None:
            return Path(folder).parent
    raise UpstreamError(f"{symbol}: there is no source of {package} here: install a supported release")


def match_signature(symbol: str, distribution: Distribution, found: str, expected: str) -> None:
    """Raises UpstreamError unless the two signatures are equal."""
    if found != expected:
        raise UpstreamError(
            f"{symbol}: {distribution.name} {distribution.version()} has signature {found}, expected {expected}: "
            f"use an unmodified supported release, or remove the patch that changed it"
        )
