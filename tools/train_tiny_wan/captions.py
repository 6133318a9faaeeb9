"""Slots, sentences and the tokenizer: what a prompt of tiny-wan can say."""

from __future__ import annotations

import dataclasses
import itertools
import random

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

COLOURS = ("red", "yellow", "green", "cyan", "blue", "purple")
SHAPES = ("circle", "square", "triangle", "star", "ring")
MOTIONS = ("left", "right", "up", "down")
BACKGROUNDS = ("meadow", "brick wall", "cat", "coffee cup", "rocket")
PANS = ("still", "left", "right", "up", "down")

PAD, END, UNKNOWN = "<pad>", "</s>", "<unk>"

_SUBJECTS = ("a {colour} {shape}", "the {colour} {shape}", "one {colour} {shape}")
_VERBS = ("moves", "drifts", "slides", "is moving")
_PLACES = ("over a {background}", "in front of a {background}", "over the {background}")
_STILL = ("camera is still", "the camera is still", "the camera stays still")
_PANNING = ("camera pans {pan}", "the camera pans {pan}", "the camera is panning {pan}")
_JOINS = (", ", " while ", " and ")


@dataclasses.dataclass(frozen=True, slots=True)
class Scene:
    """What one clip shows, as indices into the slot tuples of this module.

    The shape's motion is relative to the frame; ``pan`` moves the background only.
    """

    colour: int
    shape: int
    motion: int
    background: int
    pan: int

    def words(self) -> dict[str, str]:
        """Return the slot words by slot name."""
        return {
            "colour": COLOURS[self.colour],
            "shape": SHAPES[self.shape],
            "motion": MOTIONS[self.motion],
            "background": BACKGROUNDS[self.background],
            "pan": PANS[self.pan],
        }


def is_held_out(scene: Scene) -> bool:
    """Tell whether a scene is kept out of training.

    One in ten combinations of colour, shape, motion and background, whatever the pan: those whose
    weighted index sum is 7 modulo 10. Every value of every slot occurs on both sides.
    """
    total = scene.colour + 2 * scene.shape + 3 * scene.motion + 4 * scene.background
    return total % 10 == 7


def all_scenes(*, held_out: bool) -> list[Scene]:
    """List the scenes on one side of the split, in a fixed order."""
    slots = (COLOURS, SHAPES, MOTIONS, BACKGROUNDS, PANS)
    scenes = (Scene(*indices) for indices in itertools.product(*(range(len(s)) for s in slots)))
    return [scene for scene in scenes if is_held_out(scene) == held_out]


def plain_caption(scene: Scene) -> str:
    """Write the canonical sentence: ``a red ring moves left over a cat, camera is still``."""
    camera = _STILL[0] if PANS[scene.pan] == "still" else _PANNING[0]
    sentence = f"{_SUBJECTS[0]} {_VERBS[0]} {{motion}} {_PLACES[0]}, {camera}"
    return sentence.format(**scene.words())


def caption(scene: Scene, rng: random.Random) -> str:
    """Write a sentence in one of many wordings; one in eight leaves a clause out."""
    camera = rng.choice(_STILL if PANS[scene.pan] == "still" else _PANNING)
    clauses = [rng.choice(_VERBS) + " {motion}", rng.choice(_PLACES)]
    join = rng.choice(_JOINS)
    if rng.random() < 0.125:
        dropped = rng.randrange(3)
        if dropped < len(clauses):
            del clauses[dropped]
        else:
            camera = ""
    sentence = " ".join([rng.choice(_SUBJECTS), *clauses])
    sentence = f"{sentence}{join}{camera}" if camera else sentence
    if rng.random() < 0.25:
        sentence += "."
    return sentence.format(**scene.words())


def held_out_prompts(count: int = 16, seed: int = 5) -> list[Scene]:
    """Choose held-out scenes that use every slot value about equally often.

    Args:
        count: Number of scenes.
        seed: Seed of the order in which scenes are considered.

    Returns:
        The chosen scenes, no two alike but for the pan, each picked for the rarest slot values.
    """
    candidates = all_scenes(held_out=True)
    random.Random(seed).shuffle(candidates)
    used: dict[tuple[str, str], int] = {}
    chosen: list[Scene] = []
    for _ in range(count):
        best = min(candidates, key=lambda s: sum(used.get(w, 0) ** 2 for w in s.words().items()))
        chosen.append(best)
        same = {dataclasses.replace(best, pan=pan) for pan in range(len(PANS))}
        candidates = [scene for scene in candidates if scene not in same]
        for word in best.words().items():
            used[word] = used.get(word, 0) + 1
    return chosen


def vocabulary() -> list[str]:
    """List the tokens in index order: special tokens, then every word of every sentence."""
    pieces = [*_SUBJECTS, *_VERBS, *_PLACES, *_STILL, *_PANNING, *_JOINS]
    words = {word for piece in pieces for word in piece.split() if "{" not in word}
    for slot in (COLOURS, SHAPES, MOTIONS, BACKGROUNDS, PANS):
        words |= {word for value in slot for word in value.split()}
    return [PAD, END, UNKNOWN, ",", ".", *sorted(words - {",", "."})]


def build_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """Build the word-level tokenizer that ends every prompt with ``</s>``.

    Args:
        max_length: Stored as ``model_max_length``.

    Returns:
        A tokenizer that lower-cases, splits at white space and punctuation, and looks words up.
    """
    index = {token: i for i, token in enumerate(vocabulary())}
    tokenizer = Tokenizer(models.WordLevel(index, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {END}", special_tokens=[(END, index[END])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        model_max_length=max_length,
        padding_side="right",
    )
