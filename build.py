"""From a recipe to objects, with build_data and build_heads: only these read both. What they build takes plain arguments."""

from collections.abc import Sequence

from .data.chat import Sample, prompt_ids, samples
from .data.conversations import Conversation, spread
from .data.packing import batch_plan
from .data.skips import Skips
from .errors import UserError
from .evaluation.evaluate import Evaluator, Prompt
from .evaluation.sampling import Sampling
from .evaluation.tree import AnyTree, DynamicTree, StaticTree, chain
from .heads.verifier import Verifier
from .training.recipe import Recipe
from .training.sections.tree import ChainSection, DynamicSection, StaticSection
from .training.trainer import Settings


def build_verifier(recipe: Recipe, dtype: str | None = None) -> Verifier:
    """dtype: of its weights, in place of the recipe's."""
    section = recipe.verifier
    return Verifier.load(section.model, dtype or section.dtype, section.device, section.adapter, section.bits)


def build_judge(recipe: Recipe, verifier: Verifier | None = None) -> Verifier:
    """The verifier in the precision it judges in: the one given where that is the same."""
    dtype = recipe.evaluation.dtype or recipe.verifier.dtype
    if verifier is not None and (recipe.evaluation.dtype is None or f"torch.{dtype}" == str(verifier.dtype)):
        return verifier
    return build_verifier(recipe, dtype)


def build_settings(recipe: Recipe) -> Settings:
    fields = Settings.__dataclass_fields__
    return Settings(**{name: getattr(recipe.training, name) for name in fields})


def build_plan(recipe: Recipe, rows: Sequence[Sample]) -> list[list[int]]:
    """The batches of the whole training, an entry a step."""
    section, lengths = recipe.training, [len(sample.ids) for sample in rows]
    return batch_plan(
        lengths, section.batch_tokens, section.seed, section.steps, section.epochs, recipe.data.packing, section.group_lengths
    )


def build_tree(section: ChainSection | StaticSection | DynamicSection) -> AnyTree:
    if isinstance(section, ChainSection):
        return chain(section.depth)
    if isinstance(section, StaticSection):
        return StaticTree(section.paths)
    return DynamicTree(section.depth, section.top_k, section.nodes)


def build_samplings(recipe: Recipe) -> list[Sampling]:
    """One for each temperature."""
    section = recipe.evaluation
    names = ("rule", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    return [Sampling(temperature, **{name: getattr(section, name) for name in names}) for temperature in section.temperatures]


def build_prompts(verifier: Verifier, conversations: Sequence[Conversation], limit: int | None) -> list[Prompt]:
    """Held-out prompts: each conversation up to its last question."""
    prompts = []
    for conversation in spread(conversations, limit):
        if messages := conversation.asked:
            ids = prompt_ids(verifier.tokenizer, messages, conversation.tools)
            prompts.append(Prompt(ids, conversation.id, conversation.category, str(messages[-1]["content"])))
    if not prompts:
        raise UserError("evaluation: no held-out conversation asks a question")
    return prompts


def build_evaluator(recipe: Recipe, verifier: Verifier, conversations: Sequence[Conversation]) -> Evaluator:
    section = recipe.evaluation
    prompts = build_prompts(verifier, conversations, section.prompts)
    limit = verifier.facts.max_position_embeddings
    for prompt in prompts:
        if len(prompt.ids) + section.max_new_tokens > limit:
            raise UserError(f"evaluation: prompt {prompt.id} has {len(prompt.ids)} tokens; with max_new_tokens="
                            f"{section.max_new_tokens} it passes the verifier's limit of {limit}")  # fmt: skip
    return Evaluator(verifier, prompts, section.max_new_tokens, section.batch, section.timing_prompts, section.timing_repeats)


def build_texts(recipe: Recipe, evaluator: Evaluator, conversations: Sequence[Conversation]) -> list[Sample]:
    """Held-out answers of the kind that the recipe trains on: the files', or the verifier's own of before it had an adapter."""
    verifier, prompts = evaluator.verifier, evaluator.prompts
    assert verifier.adapter is not None
    answered = [c for c in conversations if any(message["role"] == "assistant" for message in c.messages)]
    if recipe.data.answers.mode == "keep" and answered:
        return list(samples(verifier.tokenizer, answered, recipe.data.max_length, Skips()))
    with verifier.adapter.off():
        answers, _ = evaluator.decode(None, chain(0), prompts, evaluator.batch)
    pairs = [(prompt.ids, answer.tokens) for prompt, answer in zip(prompts, answers, strict=True)]
    return [Sample(ids + tokens, [False] * len(ids) + [True] * len(tokens)) for ids, tokens in pairs]
