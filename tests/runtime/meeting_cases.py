"""One rank of each meeting: prints a JSON object of its error (or null), its seconds and its warnings, case by case."""

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

from evenpipe.runtime.meeting import Meeting, NotMet

ALIKE = {"EvenPipe": "1.0", "--bpipe": "True"}
#: What each rank says; None: it was started without flags; "absent": it does not come.
CASES = {
    "alike": [ALIKE, ALIKE, ALIKE],
    "another version": [ALIKE, ALIKE, {**ALIKE, "EvenPipe": "0.9"}],
    "another setting": [ALIKE, {**ALIKE, "--bpipe": "False"}, ALIKE],
    "without flags": [ALIKE, None, ALIKE],
    "rank 0 without flags": [None, ALIKE, ALIKE],
    "absent": [ALIKE, ALIKE, "absent"],
}


def main(folder: Path, port_of_rank_0: int) -> None:
    rank, found = int(os.environ["RANK"]), {}
    of_rank_0 = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port_of_rank_0)}
    stores = []
    meetings = [*((name, os.environ) for name in CASES), ("alike", of_rank_0), ("another setting", of_rank_0)]
    for name, environ in meetings:
        row, warned, error, started = CASES[name][rank], [], None, time.monotonic()
        place = f"{name}{', held by rank 0' if environ is of_rank_0 else ''}"
        meeting = Meeting(3, rank, environ, f"{name}/")
        try:
            if row is None:
                meeting.tell(None)
            elif row != "absent":
                stores.append(meeting.agree(row, timedelta(seconds=3 if name == "absent" else 30), warned.append))
        except NotMet as wrong:
            error = str(wrong)
        found[place] = {"error": error, "seconds": time.monotonic() - started}
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
