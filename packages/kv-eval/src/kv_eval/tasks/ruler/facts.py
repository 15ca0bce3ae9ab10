"""Questions about generated facts, in place of the SQuAD and HotpotQA questions of RULER.

RULER's `qa_1` and `qa_2` put the paragraphs of a question of these data sets among others. Here
documents and questions are generated, so that no data is shipped or fetched: `qa_1` is answered by
one document, `qa_2` by two, the second of which is found through the first.
"""

import random
from collections.abc import Sequence
from functools import partial
from typing import Final

from kv_eval.tasks.puzzle import Puzzle

NEW_TOKENS: Final = 32
TOKENS_OF_DOCUMENT: Final = 12  # minimum tokens of a document
CONSONANTS, VOWELS, SYLLABLES = "bdfgklmnprstvz", "aeiou", 3
INTRO: Final = "Below are documents. Remember what they say."
ONE_HOP: Final = ("{person} was born in the town of {town}.",)
TWO_HOPS: Final = (
    "{person} works for a company named {company}.",
    "The company {company} has its house in the town of {town}.",
)
MORE: Final = (
    "{person} likes to talk about the weather.",
    "Many people know {person} by name.",
    "{person} walks to work every day.",
    "Nobody plays chess as well as {person}.",
)
QUESTIONS: Final = (
    "In which town was {person} born?",
    "In which town does the company that {person} works for have its house?",
)
OPENINGS: Final = (
    "{person} was born in the town of",
    "The company that {person} works for has its house in the town of",
)


def questions(hops: int, length: int, samples: int, seed: int) -> list[Puzzle]:
    """Create questions about documents among others of the same kind.

    Every name is of one person, company or town alone, so the answer stands in one place.

    Args:
        hops: 1 or 2, the documents that a question needs.
        length: Tokens of a prompt with its question.
        samples: Number of puzzles.
        seed: Of the names and of the order.
    """
    others = length // (hops * TOKENS_OF_DOCUMENT)
    puzzles = []
    for i in range(samples):
        random_ = random.Random(f"qa {hops} {seed} {i}")
        names = iter(_names(random_, 3 * (others + 1)))
        facts = [_documents(random_, hops, *each) for each in zip(names, names, names, strict=True)]
        (person, _, town), wanted = facts[0]
        depth = (i + 0.5) / samples
        places = [depth] if hops == 1 else [depth, random_.random()]
        puzzles.append(
            Puzzle(
                intro=INTRO,
                body=partial(
                    _text, wanted, places, [said for _, said in facts[1:]], random_.random()
                ),
                available=others,
                source="of documents",
                question=QUESTIONS[hops - 1].format(person=person),
                opening=OPENINGS[hops - 1].format(person=person),
                answers=(town,),
                depth=places[-1],
                new_tokens=NEW_TOKENS,
            )
        )
    return puzzles


Fact = tuple[tuple[str, str, str], tuple[str, ...]]


def _documents(random_: random.Random, hops: int, person: str, company: str, town: str) -> Fact:
    """Return the names of a fact, and its documents."""
    names = {"person": person, "company": company, "town": town}
    first, *rest = ONE_HOP if hops == 1 else TWO_HOPS
    more = random_.sample(MORE, 2)
    said = (" ".join((more[0], first, more[1])), *rest)
    return (person, company, town), tuple(each.format(**names) for each in said)


def _text(
    wanted: Sequence[str],
    places: Sequence[float],
    others: Sequence[tuple[str, ...]],
    order: float,
    count: int,
) -> str:
    """Number the documents of `count` other facts in a random order, with the wanted ones put in.

    Args:
        wanted: the documents with the fact that the question is about.
        places: their depths, from 0 to 1.
        others: the documents of each other fact.
        order: seed of the order.
        count: number of other facts.
    """
    found = [document for fact in others[:count] for document in fact]
    random.Random(order).shuffle(found)
    for document, place in zip(wanted, places, strict=True):
        found.insert(round(place * len(found)), document)
    return "\n\n".join(f"Document {i}:\n{document}" for i, document in enumerate(found, 1))


def _names(random_: random.Random, count: int) -> list[str]:
    """Return distinct names of equally many letters, so that none is a part of another."""
    found: dict[str, None] = {}
    while len(found) < count:
        letters = (random_.choice(kind) for _ in range(SYLLABLES) for kind in (CONSONANTS, VOWELS))
        found["".join(letters).capitalize()] = None
    return list(found)
