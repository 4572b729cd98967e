"""How well 2BW trains by its paper (Narayanan et al. 2021, PipeDream-2BW); pages quote its figures from here."""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["QUALITY", "SHARE", "Passage"]


class Passage(NamedTuple):
    """Words of one line of the paper's text as it was read; each ``{}`` stands for a figure, in the same order."""

    line: int
    words: str
    figures: tuple[str, ...]

    @property
    def text(self) -> str:
        """The words with their figures."""
        return self.words.format(*self.figures)


QUALITY: Final = {
    # Table 2: percent of BERT finetuned, after all iterations with flushes, after a share of them, and under 2BW.
    "mnli": Passage(289, "MNLI Overall Acc. {}% N/A {}%", ("87.77", "87.82")),
    "race": Passage(290, "RACE Overall Acc. {}% {}% {}%", ("80.06", "79.30", "79.48")),
    "curves": Passage(294, "track the vanilla runs almost identically after the first {}k iterations", ("100",)),
    "race_share": Passage(296, "finetuning numbers from a pretrained model trained using {}% of iterations", ("90",)),
    # GPT on Wikitext-103, with flushes and under 2BW.
    "perplexities": Passage(296, "similar test perplexities ({} vs. {})", ("19.28", "19.56")),
    "fewer": Passage(296, "match *exactly* when “Vanilla” is run for {}% fewer iterations", ("20",)),
}
#: Iterations after which a run with flushes is as good as 2BW after all of its own.
SHARE: Final = 1 - float(QUALITY["fewer"].figures[0]) / 100
