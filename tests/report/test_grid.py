"""The text grid looks like the papers' figures."""

from __future__ import annotations

from textwrap import dedent

from evenpipe.report.grid import timeline_grid
from evenpipe.schedule import KINDS
from tests.schedules import program


def drawn(*args: object, width: int = 200, batches: int = 1) -> str:
    lines = timeline_grid(program(*args, batches=batches), width).plain.splitlines()  # type: ignore[arg-type]
    return "\n".join(line.rstrip() for line in lines)


def test_1f1b() -> None:
    assert drawn("1f1b", 3, 4) == dedent("""\
        slot     0  1  2  3  4  5  6  7  8  9  10 11
        stage 0  F0 F1 F2       B0 F3 B1    B2    B3
        stage 1     F0 F1    B0 F2 B1 F3 B2    B3
        stage 2        F0 B0 F1 B1 F2 B2 F3 B3

        F forward  B backward""")


def test_transfers_stand_under_the_compute_that_they_run_beside() -> None:
    assert drawn("1f1b", 4, 4, 1, True) == dedent("""\
        slot     0    1    2    3    4    5    6    7    8    9    10   11   12   13
        stage 0  F0   F1   F2   F3                  B0        B1        B2        B3
                           E1                                 L1
        stage 1       F0   F1   F2             B0   F3   B1        B2        B3
        stage 2            F0   F1        B0   F2   B1   F3   B2        B3
        stage 3                 F0   B0   F1   B1   F2   B2   F3   B3
                           A1@0                               R1@0

        F forward  B backward  E evict  L load  A accept  R return""")


def test_updates_stand_under_the_compute_that_comes_next() -> None:
    assert drawn("2bw", 2, 2, batches=3) == dedent("""\
        slot     0  1  2  3  4  5  6  7  8  9  10 11 12 13 14
        stage 0  F0 F1    B0 F2 B1 F3 B2 F4 B3 F5 B4    B5
                                      U0          U1       U2
        stage 1     F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
                                         U0          U1 U2

        F forward  B backward  U update""")


def test_a_line_with_nothing_in_a_block_is_left_out() -> None:
    blocks = drawn("2bw", 2, 2, batches=3, width=9 + 7 * 3).split("\n\n")
    assert [len(block.splitlines()) for block in blocks] == [3, 5, 4, 1]


def test_a_narrow_terminal_gets_blocks() -> None:
    assert drawn("gpipe", 2, 2, width=20) == dedent("""\
        slot     0  1  2
        stage 0  F0 F1
        stage 1     F0 F1

        slot     3  4  5
        stage 0     B0 B1
        stage 1  B0 B1

        F forward  B backward""")


def test_kinds_differ_in_colour() -> None:
    shown = program("2bw", 4, 4, bpipe=True, batches=2)
    styles = {str(span.style) for span in timeline_grid(shown).spans}
    kinds = {action.kind for row in shown.schedule.actions for action in row}
    assert all(any(KINDS[kind].colour in style for style in styles) for kind in kinds)
