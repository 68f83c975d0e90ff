"""The frozen model that drafts are verified by. Only this file and facts.py know a transformers model's insides.

Shapes: B rows, T tokens, S slots or positions, d hidden size, L captured layers, V rows of the verifier's lm_head.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import UserError, first_line
from .adapters import Adapter, load_adapter
from .batch import sent
from .cache import RaggedCache, additive, visible, within_documents
from .capture import captured, concatenate
from .facts import attention_windows, check_attends, find_layers, read_facts
from .loading import load_model, load_tokenizer
from .packed import pack_linears
from .repeated import Inputs, Repeated


@dataclass(frozen=True)
class Features:
    """What a draft head reads of the verifier.

    last: [B, T, d], after the verifier's final norm, so lm_head(last[t]) gives the logits for token t + 1.
    layers: [B, T, L * d], the states entering the asked decoder layers (transformers' hidden_states[i]), side by side.
    choice: [B, T], the verifier's own next token (its argmax) where an answer's token follows, -1 elsewhere; for training.
    """

    last: Tensor
    layers: Tensor
    choice: Tensor | None = None


class Verifier:
    """A decoder-only causal language model, frozen, with the few operations that drafting and verification need."""

    sharded = False  # over processes: then a pass needs all of them

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str, adapter: Adapter | None = None) -> None:
        """adapter: one that is in the model already."""
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.adapter = adapter
        self.config = model.config.get_text_config(decoder=True)
        check_attends(self.config)
        self.decoder: nn.Module = model.get_decoder()
        self.lm_head: nn.Linear = model.get_output_embeddings()
        self.layers = find_layers(self.decoder, self.config.num_hidden_layers)
        self._windows = attention_windows(self.config)
        self.repeated = Repeated()
        self.facts = read_facts(model, self.lm_head)
        accepted = inspect.signature(self.decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        check_rebuilt_logits(self)
        check_tree_states(self)

    @classmethod
    def load(
        cls, spec: str, dtype: torch.dtype | str = torch.float32, device: str = "auto", adapter: str | None = None,
        bits: int | None = None,
    ) -> "Verifier":  # fmt: skip
        """spec: hub id, folder, .gguf file or `builtin:` name; adapter: folder or hub id of a peft LoRA on top of it; bits: 4
        or 8 of bitsandbytes, on a GPU. Raises UserError when it cannot be loaded or does not fit."""
        model = load_model(spec, dtype, device, bits)
        pack_linears(model)
        its = None if adapter is None else load_adapter(model, adapter, spec)
        return cls(model, load_tokenizer(spec), spec, its)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of every weight, an adapter's too, the configuration and the chat template: what stored answers and states
        depend on."""
        digest = hashlib.blake2b(digest_size=32)
        elsewhere = ("_name_or_path", "transformers_version")  # say nothing of the model
        config = {key: value for key, value in self.config.to_dict().items() if key not in elsewhere}
        digest.update(json.dumps(config, sort_keys=True, default=str).encode())
        digest.update(str(getattr(self.tokenizer, "chat_template", None)).encode())
        if self.adapter is not None:
            digest.update(json.dumps(self.adapter.scaling, sort_keys=True).encode())
        for name, parameter in self.model.named_parameters():
            digest.update(f"{name}{parameter.dtype}{tuple(parameter.shape)}".encode())
            digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return digest.hexdigest()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def architecture(self) -> str:
        """The model's class, as its config.json names it."""
        return type(self.model).__name__

    @property
    def embedding_table(self) -> Tensor:
        """The rows [V, d] that an engine looks up for its draft model, before any scaling by the verifier."""
        return self.model.get_input_embeddings().weight

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings as the first decoder layer of a position-free model receives them: [..., d]."""
        embeddings = self.model.get_input_embeddings()(ids)
        return embeddings * getattr(self.config, "embedding_multiplier", 1.0)  # Granite scales outside its module

    def logits(self, hidden: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """The verifier's own logits [..., V] of final hidden states [..., d]; `vocabulary` (ids) asks for some columns only."""
        return self.logits_over(vocabulary)(hidden)

    def logits_over(self, vocabulary: Tensor | None) -> Callable[[Tensor], Tensor]:
        """`logits` for many calls over the same columns, whose weights are gathered once."""
        if vocabulary is None:
            output: Callable[[Tensor], Tensor] = self.lm_head
        else:
            bias = None if self.lm_head.bias is None else self.lm_head.bias[vocabulary]
            output = partial(nn.functional.linear, weight=self.lm_head.weight[vocabulary], bias=bias)
        scale = self.logit_multiplier
        cap = getattr(self.config, "final_logit_softcapping", None)  # Gemma 2

        def logits(hidden: Tensor) -> Tensor:
            raw = output(hidden)
            raw = raw if scale == 1.0 else raw * scale
            return raw if cap is None else cap * torch.tanh(raw / cap)

        return logits

    @property
    def logit_multiplier(self) -> float:
        """The constant that the verifier's raw lm_head output is multiplied with (Cohere's scale, Granite's divisor)."""
        return (getattr(self.config, "logit_scale", None) or 1.0) / (getattr(self.config, "logits_scaling", None) or 1.0)

    def features(
        self, ids: Tensor, layers: Sequence[int] = (), positions: Tensor | None = None, learning: bool = False
    ) -> Features:
        """States of right-padded sequences ids [B, T]. Padding cannot reach real positions: attention is causal.

        positions: [B, T], each token's position within its document where a row is several of them (see `Batch`); a document's
        states are then those it has alone. learning: with gradients to an adapter that is being trained.
        """
        packed = {}
        if positions is not None:
            mask = self._masks({kind: within_documents(positions, window) for kind, window in self._windows.items()})
            packed = {"position_ids": positions, "attention_mask": mask}
        with torch.set_grad_enabled(learning), captured(self.layers, layers) as states:
            last = self.decoder(input_ids=ids, use_cache=False, **packed).last_hidden_state
        return Features(last, concatenate(states, last))

    def attach(self, make: Callable[[PreTrainedModel], Adapter]) -> Adapter:
        """Put an adapter that is to be trained into the model; the fingerprint stays the original's."""
        assert self.adapter is None
        _ = self.fingerprint
        self.adapter = make(self.model)
        return self.adapter

    def new_cache(self, batch: int, capacity: int) -> RaggedCache:
        """An empty cache for `batch` sequences of at most `capacity` tokens (drafted ones included)."""
        return RaggedCache(self.config.num_hidden_layers, batch, capacity)

    @torch.no_grad()
    def decode(self, ids: Tensor, tree: Tensor, depth: Tensor, cache: RaggedCache, layers: Sequence[int] = ()) -> Features:
        """Run new tokens ids [B, T] after what the cache holds; nothing is committed.

        tree: bool [B or 1, T, N], whom the new tokens see among the N uncommitted ones, of which they are the last; depth:
        [B or 1, N], position after the row's length.
        """
        starts = sent(cache.lengths, ids.device)[:, None]
        positions = (starts + depth[:, -ids.shape[1] :]).clamp(max=self.facts.max_position_embeddings - 1)
        seen = {kind: visible(cache.lengths, tree, depth, window) for kind, window in self._windows.items()}
        extra = {self._cache_argument: cache, "use_cache": True}

        def compute(inputs: Inputs, seen: Inputs) -> list[Tensor]:
            with captured(self.layers, layers) as states:
                last = self.decoder(**inputs, attention_mask=self._masks(seen), **extra).last_hidden_state
            return [last, concatenate(states, last)]

        inputs = {"input_ids": ids, "position_ids": positions}
        if self.sharded:  # its other owners would have to record with it
            return Features(*compute(inputs, seen))
        return Features(*self.repeated.run(cache, f"verifier, layers {[*layers]}", ids.shape[1], inputs, seen, compute))

    def _masks(self, seen: dict[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Who sees whom, bool [B, T, S] for each kind of layer, as a decoder takes it: by kind where there are several."""
        masks = {kind: additive(mask, self.dtype) for kind, mask in seen.items()}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def prefill(
        self, prompts: Sequence[Sequence[int]], cache: RaggedCache, layers: Sequence[int] = ()
    ) -> tuple[Features, Tensor]:
        """Fill an empty cache with prompts of any lengths. Returns their right-padded features and ids [B, T].

        A prompt that comes several times is read once.
        """
        distinct = {prompt: row for row, prompt in enumerate(dict.fromkeys(map(tuple, prompts)))}
        lengths = [len(prompt) for prompt in distinct]
        cache.keep_rows(list(range(len(distinct))))
        ids = torch.zeros(len(distinct), max(lengths), dtype=torch.long)
        for prompt, row in distinct.items():
            ids[row, : len(prompt)] = torch.as_tensor(prompt)
        ids = ids.to(self.device)
        size = ids.shape[1]
        causal = torch.ones(1, size, size, dtype=torch.bool, device=ids.device).tril()
        features = self.decode(ids, causal, torch.arange(size, device=ids.device)[None], cache, layers)
        cache.advance(lengths)
        if len(distinct) < len(prompts):
            rows = [distinct[tuple(prompt)] for prompt in prompts]
            cache.keep_rows(rows)
            features, ids = Features(features.last[rows], features.layers[rows]), ids[rows]
        return features, ids


@torch.no_grad()
def check_rebuilt_logits(verifier: Verifier) -> None:
    """Prove that logits(features) are the model's own, else every teacher and every acceptance would be wrong."""
    ids = torch.randint(verifier.facts.vocab_size, (1, 8), generator=torch.Generator().manual_seed(0)).to(verifier.device)
    own = verifier.model(input_ids=ids, use_cache=False).logits.float()
    rebuilt = verifier.logits(verifier.features(ids).last).float()
    tolerance = 1e-4 if verifier.dtype == torch.float32 else 0.05
    every = torch.arange(verifier.facts.vocab_size, device=ids.device)  # asked by columns it must say the same
    by_columns = verifier.logits(verifier.features(ids).last, every).float()
    rebuilt = max(rebuilt, by_columns, key=lambda logits: (own - logits).abs().max().item())
    worst = (own - rebuilt).abs().max().item()
    if not worst <= tolerance * max(1.0, own.abs().max().item()):
        ratio = (own / rebuilt).median().item()
        raise UserError(f"verifier {verifier.name}: logits rebuilt from its hidden states differ from its own by {worst:.3g} "
                        f"(median ratio own/rebuilt {ratio:.4g}); this architecture scales its logits in a way not "
                        "supported")  # fmt: skip


@torch.no_grad()
def check_tree_states(verifier: Verifier) -> None:
    """Prove that a token behind six rejected siblings, in a ragged batch, is what it is in a plain pass."""
    ids = torch.randint(verifier.facts.vocab_size, (16,), generator=torch.Generator().manual_seed(1)).to(verifier.device)
    plain = verifier.features(ids[None, :8]).last[0].float()
    lengths, decoys = (6, 3), ids[8:14]
    nodes = torch.stack([torch.cat([ids[n : n + 1], decoys, ids[n + 1 : n + 2]]) for n in lengths])
    tree = torch.eye(8, dtype=torch.bool, device=verifier.device)
    tree[:, 0] = True  # a root and its seven children, the last of which is the true one
    depth = torch.tensor([[0, *[1] * 7]], device=verifier.device)
    cache = verifier.new_cache(2, 16)
    try:
        verifier.prefill([ids[:n].tolist() for n in lengths], cache)
        states = verifier.decode(nodes, tree[None], depth, cache).last[:, [0, 7]].float()
    except Exception as error:  # whatever a model's own code trips over
        raise UserError(f"verifier {verifier.name}: it cannot decode a tree: {first_line(error)}") from error
    worst = (states - torch.stack([plain[n : n + 2] for n in lengths])).abs().max().item()
    tolerance = 1e-4 if verifier.dtype in (torch.float32, torch.float64) else 0.1
    if not worst <= tolerance * max(1.0, plain.abs().max().item()):
        raise UserError(f"verifier {verifier.name}: its states differ by {worst:.3g} between a tree and a plain pass; its kind "
                        "of attention is not supported")  # fmt: skip
