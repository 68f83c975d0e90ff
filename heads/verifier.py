"""The frozen model that drafts are verified by. This is the only file that knows a transformers model's insides.

Shapes: B rows, T tokens, S slots or positions, d hidden size, L captured layers, V rows of the verifier's lm_head.
"""

import hashlib
import inspect
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from ..errors import UserError
from .builtin import builtin_folder
from .cache import RaggedCache, additive, visible

transformers_logging.disable_progress_bar()


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


@dataclass(frozen=True)
class Facts:
    """Sizes of the verifier that draft heads and masks are built from; `rope_parameters` is None where nothing rotates."""

    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any] | None
    stop_ids: tuple[int, ...]


class Verifier:
    """A decoder-only causal language model, frozen, with the few operations that drafting and verification need."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, name: str) -> None:
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config.get_text_config(decoder=True)
        check_attends(self.config)
        self.decoder: nn.Module = model.get_decoder()
        self.lm_head: nn.Linear = model.get_output_embeddings()
        self.layers = find_layers(self.decoder, self.config.num_hidden_layers)
        self._windows = attention_windows(self.config)
        self.facts = read_facts(model, self.lm_head)
        accepted = inspect.signature(self.decoder.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        check_rebuilt_logits(self)
        check_tree_states(self)

    @classmethod
    def load(cls, spec: str, dtype: torch.dtype | str = torch.float32, device: str = "auto") -> "Verifier":
        """spec: hub id, folder, .gguf file or `builtin:` name. Raises UserError when it cannot be loaded or does not fit."""
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype)
        place = resolve_device(device)
        source = resolve(spec)
        try:
            config = None if "gguf_file" in source else load_config(source)
            options = {"attn_implementation": "eager"} if needs_eager(config) else {}
            model, info = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, output_loading_info=True, **options)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise UserError(f"verifier {spec}: cannot be loaded: {first_line(error)}") from error
        check_complete(model, info, spec)
        return cls(model.to(place), load_tokenizer(spec), spec)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of every weight, the configuration and the chat template: what stored answers and states depend on."""
        digest = hashlib.blake2b(digest_size=32)
        digest.update(json.dumps(self.config.to_dict(), sort_keys=True, default=str).encode())
        digest.update(str(getattr(self.tokenizer, "chat_template", None)).encode())
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

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings as the first decoder layer of a position-free model receives them: [..., d]."""
        embeddings = self.model.get_input_embeddings()(ids)
        return embeddings * getattr(self.config, "embedding_multiplier", 1.0)  # Granite scales outside its module

    def logits(self, hidden: Tensor, vocabulary: Tensor | None = None) -> Tensor:
        """The verifier's own logits [..., V] of final hidden states [..., d]; `vocabulary` (ids) asks for some columns only."""
        if vocabulary is None:
            raw = self.lm_head(hidden)
        else:
            bias = None if self.lm_head.bias is None else self.lm_head.bias[vocabulary]
            raw = nn.functional.linear(hidden, self.lm_head.weight[vocabulary], bias)
        raw = raw * self.logit_multiplier
        cap = getattr(self.config, "final_logit_softcapping", None)  # Gemma 2
        return raw if cap is None else cap * torch.tanh(raw / cap)

    @property
    def logit_multiplier(self) -> float:
        """The constant that the verifier's raw lm_head output is multiplied with (Cohere's scale, Granite's divisor)."""
        return (getattr(self.config, "logit_scale", None) or 1.0) / (getattr(self.config, "logits_scaling", None) or 1.0)

    @torch.no_grad()
    def features(self, ids: Tensor, layers: Sequence[int] = ()) -> Features:
        """States of right-padded sequences ids [B, T]. Padding cannot reach real positions: attention is causal."""
        with self._captured(layers) as states:
            last = self.decoder(input_ids=ids, use_cache=False).last_hidden_state
        return Features(last, concatenate(states, last))

    def llama_layer(self, index: int) -> dict[str, Tensor]:
        """Weights of a decoder layer and of the final norm under Llama's names, where the architecture has those.

        Raises UserError for a layer of another build.
        """
        names = [f"self_attn.{p}_proj" for p in "qkvo"] + [f"mlp.{p}_proj" for p in ("gate", "up", "down")]
        names += ["input_layernorm", "post_attention_layernorm"]
        weights = dict(self.layers[index].named_parameters())
        found = {name: weights.get(f"{name}.weight") for name in names}
        found["norm"] = getattr(getattr(self.decoder, "norm", None), "weight", None)
        if missing := [name for name, weight in found.items() if weight is None]:
            raise UserError(f"verifier {self.name}: its layers are not Llama-like ({missing[0]} is missing); "
                            "set head.start_from_last_layer: false")  # fmt: skip
        norm: Any = self.decoder.norm
        if not torch.allclose(norm(1e3 * torch.ones_like(norm.weight)), norm.weight, rtol=1e-2, atol=1e-2):
            raise UserError(f"verifier {self.name}: its norms do not multiply by their weight alone (Gemma's add one); "
                            "set head.start_from_last_layer: false")  # fmt: skip
        return {name: weight.detach() for name, weight in found.items() if weight is not None}

    def new_cache(self, batch: int, capacity: int) -> RaggedCache:
        """An empty cache for `batch` sequences of at most `capacity` tokens (drafted ones included)."""
        return RaggedCache(self.config.num_hidden_layers, batch, capacity)

    @torch.no_grad()
    def decode(self, ids: Tensor, tree: Tensor, depth: Tensor, cache: RaggedCache, layers: Sequence[int] = ()) -> Features:
        """Run new tokens ids [B, T] after what the cache holds; nothing is committed.

        tree: bool [B or 1, T, T], who sees whom among the new tokens; depth: [B or 1, T], position after the row's length.
        """
        starts = torch.tensor(cache.lengths, device=ids.device)[:, None]
        positions = (starts + depth).clamp(max=self.facts.max_position_embeddings - 1)
        masks = {
            kind: additive(visible(cache.lengths, tree, depth, window), self.dtype) for kind, window in self._windows.items()
        }
        mask = masks if len(masks) > 1 else next(iter(masks.values()))
        extra = {self._cache_argument: cache, "use_cache": True}
        with self._captured(layers) as states:
            out = self.decoder(input_ids=ids, position_ids=positions, attention_mask=mask, **extra)
        return Features(out.last_hidden_state, concatenate(states, out.last_hidden_state))

    def prefill(
        self, prompts: Sequence[Sequence[int]], cache: RaggedCache, layers: Sequence[int] = ()
    ) -> tuple[Features, Tensor]:
        """Fill an empty cache with prompts of any lengths. Returns their right-padded features and ids [B, T]."""
        lengths = [len(prompt) for prompt in prompts]
        ids = torch.zeros(len(prompts), max(lengths), dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.as_tensor(prompt)
        ids = ids.to(self.device)
        size = ids.shape[1]
        causal = torch.ones(1, size, size, dtype=torch.bool, device=ids.device).tril()
        features = self.decode(ids, causal, torch.arange(size, device=ids.device)[None], cache, layers)
        cache.advance(lengths)
        return features, ids

    @contextmanager
    def _captured(self, layers: Sequence[int]) -> Iterator[list[Tensor]]:
        """Collect the states entering the given decoder layers during one forward pass, in the order asked."""
        found: dict[int, Tensor] = {}

        def hook(index: int) -> Any:
            def take(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                found[index] = args[0] if args else kwargs["hidden_states"]

            return take

        handles = [self.layers[i].register_forward_pre_hook(hook(i), with_kwargs=True) for i in set(layers)]
        states: list[Tensor] = []
        try:
            yield states
            states.extend(found[i] for i in layers)
        finally:
            for handle in handles:
                handle.remove()


def concatenate(states: list[Tensor], last: Tensor) -> Tensor:
    return torch.cat(states, -1) if states else last[..., :0]


def resolve(spec: str) -> dict[str, str]:
    """The from_pretrained arguments of a verifier's name."""
    if spec.startswith("builtin:"):
        return {"pretrained_model_name_or_path": str(builtin_folder(spec.removeprefix("builtin:")))}
    path = Path(spec).expanduser()
    if spec.endswith(".gguf"):
        if not path.is_file():
            raise UserError(f"verifier {spec}: no such file")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    looks_local = spec.startswith((".", "/", "~")) or spec.count("/") > 1
    if looks_local and not path.is_dir():
        raise UserError(f"verifier {spec}: no such folder")
    return {"pretrained_model_name_or_path": str(path) if path.is_dir() else spec}


def load_tokenizer(spec: str) -> PreTrainedTokenizerBase:
    """The verifier's tokenizer. Raises UserError when there is none."""
    try:
        return AutoTokenizer.from_pretrained(**resolve(spec))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"verifier {spec}: its tokenizer cannot be loaded: {first_line(error)}") from error


def load_config(source: dict[str, str]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(source["pretrained_model_name_or_path"]).get_text_config(decoder=True)


def needs_eager(config: Any) -> bool:
    """Attention soft-capping (Gemma 2) is not in the fused kernels."""
    return getattr(config, "attn_logit_softcapping", None) is not None


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError(f"device {device}: no CUDA device is visible; use device: cpu or auto")
    return torch.device(device)


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


def check_complete(model: PreTrainedModel, info: dict[str, Any], spec: str) -> None:
    """Refuse weights that transformers would have made up, or left untied against the configuration (C09)."""
    if missing := sorted(info["missing_keys"]):
        more = f" (and {len(missing) - 1} more)" if missing[1:] else ""
        raise UserError(f"verifier {spec}: weight {missing[0]}{more} is missing from its files")
    if model.config.get_text_config(decoder=True).tie_word_embeddings:
        head, table = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        if head is not table and not torch.equal(head, table):
            raise UserError(f"verifier {spec}: its configuration ties lm_head to the embeddings, its files hold two different "
                            "tensors; set tie_word_embeddings in its config.json")  # fmt: skip


def check_attends(config: Any) -> None:
    """Refuse builds whose memory of earlier tokens is not masked keys and values, or whose masks no known field announces."""
    name = config.model_type
    if getattr(config, "num_attention_heads", None) is None:
        raise UserError(f"verifier {name}: it has no attention heads; a recurrent state cannot be rolled back or branched")
    if "local" in (getattr(config, "attention_layers", None) or ()):  # GPT-Neo
        raise UserError(f"verifier {name}: its local attention layers are not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type"), *(value.get("rope_type") for value in rope.values() if isinstance(value, dict))}
    if "longrope" in kinds:
        raise UserError(f"verifier {name}: longrope turns all positions by the longest row of a batch; not supported")


def find_layers(decoder: nn.Module, count: int) -> nn.ModuleList:
    for module in decoder.children():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    raise UserError(f"verifier {type(decoder).__name__}: no list of {count} decoder layers found; not supported")


def attention_windows(config: Any) -> dict[str, int | None]:
    """Kinds of attention layer and how far each sees (None: everything)."""
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    known = {"full_attention": None, "sliding_attention": window}
    if unknown := kinds - known.keys():
        raise UserError(f"verifier {config.model_type}: {', '.join(sorted(unknown))} layers keep a state that cannot be "
                        "rolled back or branched; trees and drafts are not supported")  # fmt: skip
    return {kind: known[kind] for kind in sorted(kinds)}


def read_facts(model: PreTrainedModel, lm_head: nn.Linear) -> Facts:
    config = model.config.get_text_config(decoder=True)
    hidden, heads = config.hidden_size, config.num_attention_heads
    try:
        head_dim = getattr(config, "head_dim", None)
    except Exception as error:  # layers with head sizes of their own (Gemma 4)
        raise UserError(f"verifier {config.model_type}: its layers differ in head size; not supported") from error
    if head_dim is None:
        if hidden % heads:
            raise UserError(f"verifier {config.model_type}: hidden size {hidden} is not divisible by {heads} heads and no "
                            "head_dim is given")  # fmt: skip
        head_dim = hidden // heads
    rope = getattr(config, "rope_parameters", None) or None
    if rope is not None and "rope_type" not in rope:  # one set of parameters a kind of layer (Gemma 3)
        rope = rope.get("full_attention") or next(iter(rope.values()))
    stop = model.generation_config.eos_token_id if model.generation_config is not None else None
    stop = config.eos_token_id if stop is None else stop
    return Facts(
        hidden_size=hidden,
        vocab_size=lm_head.weight.shape[0],
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=head_dim,
        intermediate_size=getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden,
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-5,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
        stop_ids=tuple(stop) if isinstance(stop, list | tuple) else () if stop is None else (stop,),
    )


@torch.no_grad()
def check_rebuilt_logits(verifier: Verifier) -> None:
    """Prove that logits(features) are the model's own, else every teacher and every acceptance would be wrong (C19, C20)."""
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
    """Prove that a token behind six rejected siblings, in a ragged batch, is what it is in a plain pass (C31, C34)."""
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
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise UserError(f"verifier {verifier.name}: it cannot decode a tree: {first_line(error)}") from error
    worst = (states - torch.stack([plain[n : n + 2] for n in lengths])).abs().max().item()
    tolerance = 1e-4 if verifier.dtype in (torch.float32, torch.float64) else 0.1
    if not worst <= tolerance * max(1.0, plain.abs().max().item()):
        raise UserError(f"verifier {verifier.name}: its states differ by {worst:.3g} between a tree and a plain pass; its kind "
                        "of attention is not supported")  # fmt: skip
