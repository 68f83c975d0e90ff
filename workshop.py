"""What runs with the same verifier and data share: the verifier, samples, states and held-out prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from .build import build_evaluator, build_judge
from .build_data import Conversations, build_conversations, build_samples, check_author, held_out
from .build_drafters import check_drafters
from .build_features import fill_features
from .build_heads import check_head, needed_layers
from .build_strategy import build_training_verifier
from .data.chat import Sample, counts
from .data.conversations import Conversation
from .data.features import FeatureSource
from .evaluation.evaluate import Evaluator
from .heads.verifier import Verifier
from .progress import say
from .ranks import in_turn, is_first
from .training.recipe import Recipe
from .training.strategies.sharded import leading


@dataclass
class Workshop:
    """What runs with the same verifier and data can share: built once, from the first recipe."""

    verifier: Verifier
    evaluator: Evaluator  # with the verifier in evaluation.dtype
    conversations: Conversations
    holdout: Sequence[Conversation]  # what heads are judged on
    samples: Sequence[Sample]
    features: FeatureSource
    layers: tuple[int, ...]  # that the features hold


def open_workshop(recipe: Recipe) -> Workshop:
    """Load the verifier, read the conversations, have them answered."""
    with in_turn():
        conversations = build_conversations(recipe)  # files first: they are the likelier mistake and cost nothing
        holdout = held_out(recipe, conversations)
    verifier = build_training_verifier(recipe)
    check_head(recipe, verifier)
    check_drafters(recipe, verifier)
    with leading(verifier) as leads:  # what the first process has the verifier answer, the others find stored
        if leads:
            samples, features = build_samples(recipe, verifier, conversations)
            if verifier.sharded:
                fill_features(features)
    if not is_first():
        samples, features = build_samples(recipe, verifier, conversations)
    fill_features(features)  # each with a verifier of its own, the processes share the work
    for line in conversations.skips.summary(conversations.skips.read):
        say(f"left out: {line}")
    counted = counts(samples)
    say(f"training on {counted['samples']} samples: {counted['tokens']} tokens, {counted['supervised']} supervised")
    if found := check_author(recipe, samples, features):
        say(f"the verifier would choose {found.share:.1%} of {found.tokens} supervised tokens itself")
        if found.warning:
            say(f"warning: {found.warning}")
    judge = build_judge(recipe, verifier) if is_first() else verifier  # only the first process judges
    evaluator = build_evaluator(recipe, judge, holdout)
    return Workshop(verifier, evaluator, conversations, holdout, samples, features, needed_layers(recipe, verifier))
