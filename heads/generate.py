"""Plain batched greedy decoding with a key/value cache: how the verifier answers prompts, and what speculation must equal."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .batch import sent
from .verifier import Features, Verifier

Choose = Callable[[Tensor, list[int]], Tensor]  # logits [B, V] and the prompt's number of each row -> next tokens [B]


def generate(
    verifier: Verifier,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """The greedy continuation of each prompt, up to and including its first stop token, at most `max_new_tokens` tokens.

    Prompts of any lengths go together; a finished row leaves the batch. `on_tokens(n)` is told of every n new tokens.
    """
    return generate_with_features(verifier, prompts, max_new_tokens, None, on_tokens)[0]


def generate_with_features(
    verifier: Verifier,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    layers: Sequence[int] | None,
    on_tokens: Callable[[int], None] = lambda count: None,
    choose: Choose | None = None,
) -> tuple[list[list[int]], list[Features]]:
    """Answers, and the states of prompt and answer that decoding computed anyway (none when `layers` is None).

    choose: which token follows; the likeliest when None.
    The features of a row cover every token but the answer's last, which is never fed: last [T, d], layers [T, L * d].
    """
    cache = verifier.new_cache(len(prompts), max(map(len, prompts)) + max_new_tokens)
    features, _ = verifier.prefill(prompts, cache, layers or ())
    recorder = None if layers is None else Recorder(features, list(cache.lengths), max_new_tokens)
    rows = torch.arange(len(prompts), device=verifier.device)
    hidden = features.last[rows, sent(cache.lengths, verifier.device) - 1]
    one = torch.ones(1, 1, 1, dtype=torch.bool, device=verifier.device)
    depth = torch.zeros(1, 1, dtype=torch.long, device=verifier.device)
    answers: list[list[int]] = [[] for _ in prompts]
    active = list(range(len(prompts)))
    while True:
        logits = verifier.logits(hidden)
        tokens = logits.argmax(-1) if choose is None else choose(logits, active)
        going = []
        for row, token in enumerate(tokens.tolist()):
            answer = answers[active[row]]
            answer.append(token)
            if token not in verifier.facts.stop_ids and len(answer) < max_new_tokens:
                going.append(row)
        on_tokens(len(active))
        if not going:
            return answers, [] if recorder is None else recorder.rows([len(answer) for answer in answers])
        if len(going) < len(active):
            cache.keep_rows(going)
            tokens, active = tokens[going], [active[row] for row in going]
        features = verifier.decode(tokens[:, None], one, depth, cache, layers or ())
        if recorder is not None:
            recorder.add(active, features)
        hidden = features.last[:, 0]
        cache.advance([1] * len(active))


class Recorder:
    """Collects the states of ragged rows: prompts at once, then one token a step."""

    def __init__(self, prompts: Features, lengths: list[int], steps: int) -> None:
        self.prompts, self.lengths, self.step = prompts, lengths, 0
        self.last = torch.zeros(len(lengths), steps, prompts.last.shape[-1], dtype=prompts.last.dtype)
        self.layers = torch.zeros(len(lengths), steps, prompts.layers.shape[-1], dtype=prompts.layers.dtype)

    def add(self, rows: list[int], features: Features) -> None:
        self.last[rows, self.step] = features.last[:, 0].to("cpu")
        self.layers[rows, self.step] = features.layers[:, 0].to("cpu")
        self.step += 1

    def rows(self, answer_lengths: list[int]) -> list[Features]:
        def join(prompt: Tensor, steps: Tensor, row: int) -> Tensor:
            return torch.cat([prompt[row, : self.lengths[row]].to("cpu"), steps[row, : answer_lengths[row] - 1]])

        return [
            Features(join(self.prompts.last, self.last, row), join(self.prompts.layers, self.layers, row))
            for row in range(len(self.lengths))
        ]
