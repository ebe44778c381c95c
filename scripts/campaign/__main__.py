"""Kill commands at random moments, give them damaged files, and put obstacles in their way; count what does not end as
it should.

    python scripts/campaign --kills 100 --inputs 100 --obstacles 100 [--seed N] [--only COMMAND] [--out FILE]

A command that was killed (SIGKILL, SIGTERM, Ctrl-C once, twice or on a terminal; or one of its ranks) ends within a
minute with one sentence, leaves no process behind, and makes, when it is given again, what an uninterrupted one makes.
A command with a damaged file or a strange argument ends with 0, or with 1 or 2 and one sentence, within 10 seconds of
CPU time. Exits 1 if anything was otherwise. --out: the counts are added to those of the file.
"""

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from scripts.campaign.inputs import add_files, give_one
from scripts.campaign.kills import EARLY, Killer
from scripts.campaign.obstacles import no_permission, no_room
from scripts.campaign.places import COMMANDS, make_place
from tests import warm

RIGHT = ("equal", "accepted", "refused", EARLY)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--inputs", type=int, default=0)
    parser.add_argument("--obstacles", type=int, default=0)
    parser.add_argument("--only", action="append", choices=COMMANDS)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    draw, counts = random.Random(given.seed), Counter[str]()
    print(f"seed {given.seed}", flush=True)

    def note(kind: str, result: str) -> None:
        counts[f"{kind}: {result if result in RIGHT else 'wrong'}"] += 1
        if result not in RIGHT:
            print(f"{kind}: {result}", flush=True)
        if given.out is not None:
            _keep(given.out, given.seed, counts)

    warm.warm_python().preload("accelerate", "datasets", "peft")
    with tempfile.TemporaryDirectory(prefix="campaign-") as temporary:
        place = make_place(Path(temporary) / "place")
        killer, names = (
            Killer(place.parent, place, draw),
            given.only or [*COMMANDS, *(name for name in COMMANDS if "ranks" not in name and name != "sweep")],
        )
        for number in range(given.kills):
            name = names[number % len(names)]
            note(f"kill {name}", killer.kill_one(name))
        if given.inputs:
            add_files(place)
        for number in range(given.inputs):
            folder = place.parent / f"input-{number}"
            folder.mkdir()
            note("input", give_one(draw, place, folder))
            shutil.rmtree(folder)
        for number in range(given.obstacles):
            folder = place.parent / f"obstacle-{number}"
            folder.mkdir()
            name, obstacle = names[number // 2 % len(names)], (no_room, no_permission)[number % 2]
            note(f"{obstacle.__name__} {name}", obstacle(draw, name, place, folder))
            shutil.rmtree(folder)
    for line, count in sorted(counts.items()):
        print(f"{count:5}  {line}")
    return int(any(line.endswith(": wrong") for line in counts))


def _keep(path: Path, seed: int, counts: Counter[str]) -> None:
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[str(seed)] = dict(sorted(counts.items()))
    path.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
