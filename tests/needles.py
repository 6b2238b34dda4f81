"""Prompts of any length: eight documents, one of which holds the needle, then question and answer.

The sentences are drawn from a few words for each document, from one seed: nothing but the needle
answers the question.
"""

import random
import re
from typing import NamedTuple

__all__ = ["Prompt", "prompt"]

# Of each document: who, did what, to what, where or when.
_WORDS = {
    "harbour": (
        "The ferry/The captain/A fisherman/The pilot/The old sailor/The lighthouse keeper",
        "repaired/watched/painted/sold/left/cleaned",
        "the nets/a small boat/the broken mast/three barrels/the anchor/two ropes",
        "beside the pier/near the wall/on the quay/behind the lighthouse/at low tide/in the storm",
    ),
    "kitchen": (
        "The cook/The baker/Her grandmother/The waiter/A guest/The apprentice",
        "baked/tasted/carried/burned/covered/sliced",
        "the bread/a pot of soup/the onions/four cakes/the salt/some apples",
        "in the kitchen/before noon/on the stove/under a cloth/for the guests/with care",
    ),
    "museum": (
        "The guard/A visitor/The painter/The curator/The schoolchildren/An expert",
        "admired/moved/photographed/restored/described/counted",
        "the portrait/an old coin/the marble statue/two vases/a torn map/the golden crown",
        "in the first room/behind the glass/on Sunday/without a word/beside the stairs/until noon",
    ),
    "garden": (
        "The gardener/Maria/Her neighbour/The children/An old woman/The boy",
        "watered/planted/picked/measured/buried/trimmed",
        "the roses/a pear tree/the tomatoes/nine bulbs/the hedge/some seeds",
        "along the fence/after the rain/near the gate/in early spring/before supper/at the window",
    ),
    "railway": (
        "The conductor/A passenger/The engineer/The porter/The clerk/A soldier",
        "stopped/missed/checked/loaded/greeted/followed",
        "the night train/a heavy trunk/the tickets/the last wagon/the signal/two bicycles",
        "at the station/on platform four/before midnight/in the tunnel/near the border/with a bell",
    ),
    "farm": (
        "The farmer/The shepherd/His brother/The dog/A trader/The miller",
        "fed/chased/bought/counted/led/washed",
        "the sheep/a brown horse/the geese/twelve hens/the goats/a young bull",
        "on the hill/beside the barn/at dawn/across the valley/in the mud/for the market",
    ),
    "theatre": (
        "The singer/The violinist/An actor/The director/The audience/A dancer",
        "rehearsed/forgot/praised/heard/repeated/opened",
        "the second act/a sad song/the curtain/the overture/three verses/the letter",
        "on the stage/in the last row/at the premiere/without music/after the break/in the dark",
    ),
    "mountain": (
        "The climber/A guide/The doctor/The students/A hunter/The ranger",
        "reached/marked/crossed/drew/found/avoided",
        "the summit/a narrow path/the glacier/an empty hut/the river/some tracks",
        "in thick fog/above the forest/with a rope/on the third day/before the snow/near the pass",
    ),
}
_NEEDLE = "The code of the iron door is seven blue lanterns."


class Prompt(NamedTuple):
    """A text, and where its parts are.

    Attributes:
        text: documents, question and answer.
        documents: for each a pattern that finds it.
        asked: patterns of what stands before the question, and of what predicts the answer.
    """

    text: str
    documents: dict[str, str]
    asked: dict[str, str]


def prompt(sentences: int, needle_in: str) -> Prompt:
    """A prompt whose documents have so many sentences each, the needle in the middle of one."""
    draw = random.Random(0)
    documents: dict[str, str] = {}
    for name, words in _WORDS.items():
        choices = [each.split("/") for each in words]
        lines = [" ".join(map(draw.choice, choices)) + "." for _ in range(sentences)]
        if name == needle_in:
            lines.insert(sentences // 2, _NEEDLE)
        documents[name] = " ".join(lines)
    question = "Question: What is the code of the iron door?"
    answer = "Answer: The code of the iron door is seven blue lanterns."
    text = "\n".join(["Read these documents.", *documents.values(), question, answer])
    patterns = {name: re.escape(document) for name, document in documents.items()}
    # The token before each token of the answer predicts it.
    asked = {"before": "\n(Question:)", "answer": "Answer: .* (is seven blue lanterns)"}
    return Prompt(text, patterns, asked)
