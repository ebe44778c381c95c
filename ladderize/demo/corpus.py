"""The demo's language: short English-like items that a tiny model learns and that a conversion can break.

Everything follows from an integer seed. An item belongs to the test split when the checksum of its key (the part that
has to be generalised, for example the two operands) is divisible by 8, so no test item is ever trained on. The bundled
model is too small to learn ``stories`` (0.4 of the answers right, where chance is 0.33): they are no task, and count in
the perplexity only.
"""

import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

TEST_FRACTION = 8  # one key in so many belongs to the test split

NOUNS = [
    (noun, f"{noun}es" if noun.endswith("x") else f"{noun}s")
    for noun in (
        *("dog", "cat", "bird", "boy", "girl", "king", "tree", "house", "river"),
        *("box", "car", "book", "star", "table", "horse", "key", "garden", "boat"),
    )
]
VERBS = [(f"{verb}s", verb) for verb in ("run", "sleep", "sing", "wait", "fall", "shine", "move", "stop")]
ADJECTIVES = ["old", "red", "small", "quiet", "green", "happy", "tall", "dark", "bright", "round"]
PREPOSITIONS = ["near", "behind", "under", "with", "by", "above"]
PEOPLE = ["Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Henry", "Iris", "Jack", "Lucy", "Max"]
OBJECTS = ["ball", "lamp", "coin", "cup", "hat", "ring", "drum", "kite", "map", "pen", "shell", "stone"]
PLACES = ["park", "school", "market", "forest", "beach", "kitchen", "station", "castle"]
WORDS = sorted({word for pair in NOUNS for word in pair[:1]} | set(ADJECTIVES) | set(OBJECTS) | set(PLACES))


@dataclass(frozen=True)
class Item:
    """A line of the corpus: ``prompt + answer``."""

    genre: str
    prompt: str
    answer: str
    choices: tuple[str, ...]  # the answers that a reader could take for right
    key: str  # the part that has to be generalised

    @property
    def text(self) -> str:
        return self.prompt + self.answer

    @property
    def in_test_split(self) -> bool:
        return zlib.crc32(f"{self.genre}:{self.key}".encode()) % TEST_FRACTION == 0


def agreement_item(rng: random.Random) -> Item:
    """Return an item as ``The old dog near the trees runs .``: the verb follows ``dog``, not ``trees``."""
    number = rng.randrange(2)
    subject, verb = rng.choice(NOUNS), rng.choice(VERBS)
    phrase = ["The", *rng.sample(ADJECTIVES, rng.randrange(2)), subject[number]]
    for _ in range(rng.randint(1, 3)):
        phrase += [rng.choice(PREPOSITIONS), "the", *rng.sample(ADJECTIVES, rng.randrange(2))]
        phrase.append(rng.choice(NOUNS)[rng.randrange(2)])
    prompt = " ".join(phrase)
    return Item("agreement", prompt, f" {verb[number]} .", (f" {verb[0]} .", f" {verb[1]} ."), prompt)


def arithmetic_item(rng: random.Random) -> Item:
    """Return an item such as ``47 + 8 = 55 .`` or ``47 - 8 = 39 .``, with a second operand of one digit."""
    a, b = rng.randrange(10, 100), rng.randrange(10)
    sign, result = ("+", a + b) if rng.randrange(2) else ("-", a - b)
    near = tuple(f" {result + step} ." for step in (0, 1, -1, 10))
    return Item("arithmetic", f"{a} {sign} {b} =", f" {result} .", near, f"{a}{sign}{b}")


def copying_item(rng: random.Random) -> Item:
    """Return an item such as ``Repeat : kite park old ; kite park old .``, ``First : ...`` or ``Last : ...``."""
    listed = rng.sample(WORDS, rng.randint(3, 6))
    order = rng.choice(["Repeat", "Repeat", "First", "Last"])
    wanted = {"Repeat": listed, "First": listed[:1], "Last": listed[-1:]}[order]
    wrong = listed[1:] + listed[:1] if order == "Repeat" else [listed[1]]
    prompt = f"{order} : {' '.join(listed)} ;"
    choices = (f" {' '.join(wanted)} .", f" {' '.join(wrong)} .")
    return Item("copying", prompt, choices[0], choices, prompt)


def story_item(rng: random.Random) -> Item:
    """Return a story of three people with one object each, perhaps a walk and a gift, that asks who has an object."""
    people, things = rng.sample(PEOPLE, 3), rng.sample(OBJECTS, 3)
    holder = dict(zip(things, people, strict=True))
    sentences = [f"{holder[thing]} has the {thing} ." for thing in things]
    if rng.randrange(2):
        sentences.append(f"{rng.choice(people)} goes to the {rng.choice(PLACES)} .")
    if rng.randrange(2):
        thing = rng.choice(things)
        receiver = rng.choice([person for person in people if person != holder[thing]])
        sentences.append(f"{holder[thing]} gives the {thing} to {receiver} .")
        holder[thing] = receiver
    asked = rng.choice(things)
    prompt = " ".join([*sentences, f"Who has the {asked} now ?"])
    return Item("stories", prompt, f" {holder[asked]} .", tuple(f" {person} ." for person in people), prompt)


GENRES: dict[str, Callable[[random.Random], Item]] = {
    "agreement": agreement_item,
    "arithmetic": arithmetic_item,
    "copying": copying_item,
    "stories": story_item,
}

# The weights of the data for alignment and retraining. Arithmetic breaks first and comes back last, so there is more of
# it
REPAIR_WEIGHTS = {"agreement": 2, "arithmetic": 12, "copying": 3, "stories": 1}
GENRE_WEIGHTS = {"agreement": 2, "arithmetic": 3, "copying": 3, "stories": 3}  # sums are short, so they come often


def items(genre: str, count: int, *, test: bool, seed: int = 0, begin: str = "") -> Iterator[Item]:
    """Yield ``count`` different items of one genre from one split, whose prompts begin with ``begin``."""
    rng = random.Random(f"{genre}/{test}/{seed}")
    seen: set[str] = set()
    for _ in range(200 * count):
        item = GENRES[genre](rng)
        if item.in_test_split == test and item.text not in seen and item.prompt.startswith(begin):
            seen.add(item.text)
            yield item
            if len(seen) == count:
                return
    raise ValueError(f"{genre} has only about {len(seen)} different items in this split, not {count}")


def documents(count: int, *, test: bool, seed: int = 0, weights: Mapping[str, int] = GENRE_WEIGHTS) -> Iterator[str]:
    """Yield ``count`` documents of one to six lines of mixed genres. Lines may repeat across documents."""
    rng = random.Random(f"documents/{test}/{seed}")
    for _ in range(count):
        lines: list[str] = []
        wanted = rng.randint(1, 6)
        while len(lines) < wanted:
            (genre,) = rng.choices(list(weights), list(weights.values()))
            item = GENRES[genre](rng)
            if item.in_test_split == test:
                lines.append(item.text)
        yield "\n".join(lines) + "\n"


def dataset(genre: str, count: int = 200, begin: str = "", **_: object) -> dict:
    """Return the test split of one genre, of prompts that begin with ``begin``, for lm-eval's ``custom_dataset``."""
    from datasets import Dataset

    rng = random.Random(f"order/{genre}")
    rows = []
    for item in items(genre, count, test=True, begin=begin):
        choices = list(item.choices)
        rng.shuffle(choices)
        rows.append(
            {"prompt": item.prompt, "answer": item.answer, "choices": choices, "gold": choices.index(item.answer)}
        )
    return {"test": Dataset.from_list(rows)}
