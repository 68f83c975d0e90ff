"""Multi-token prediction beside a frozen verifier, in three forms; all go through the verifier's own embedding and lm_head.

parallel (Gloeckle 2024): module k is a decoder layer on the verifier's last states and predicts token t + 1 + k on its own.
sequential (DeepSeek-V3): module k reads module k - 1's state at t and token t + k, and predicts token t + 1 + k.
recursive (FastMTP): one such module does it again and again, trained as it drafts.

k counts from 1 here as in the papers; in the code modules and depths count from 0, and depth i predicts token t + 2 + i.
"""

from collections.abc import Iterator

from torch import Tensor

from .base import register
from .batch import Batch
from .layers import DecoderLayer
from .mtp_base import MtpConfig, MtpHead
from .mtp_parallel import ParallelMtp
from .mtp_sequential import SequentialMtp
from .recurrent import RecurrentHead
from .verifier import Features, Verifier


class RecursiveMtp(MtpHead, RecurrentHead):
    """One module, again and again. Shapes as in mtp_base.py and recurrent.py."""

    def __init__(self, config: MtpConfig, target_ids: Tensor | None = None) -> None:
        super().__init__(config, target_ids, modules=1, joins=True)

    @property
    def block(self) -> DecoderLayer:
        return self.blocks[0].layer

    def source(self, features: Features) -> Tensor:
        return features.last.float()

    def join(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return self.blocks[0].join(embedding, hidden)

    def log_q(self, state: Tensor, verifier: Verifier) -> Tensor:
        return self.verifier_log_q(self.blocks[0].norm(state), verifier)

    def supervised_states(self, batch: Batch, features: Features, verifier: Verifier, supervised: Tensor) -> Iterator[Tensor]:
        rows, states = self.training_states(batch, features, verifier, supervised.any(0), self.config.depth)
        for its, state in zip(supervised, states, strict=True):
            yield self.blocks[0].norm(state[its.gather(1, rows.clamp(min=0)) & (rows >= 0)])


FORMS: dict[str, type[ParallelMtp] | type[SequentialMtp] | type[RecursiveMtp]] = {
    "parallel": ParallelMtp,
    "sequential": SequentialMtp,
    "recursive": RecursiveMtp,
}


def new_mtp(config: MtpConfig, target_ids: Tensor | None = None) -> MtpHead:
    """An untrained head of the config's form."""
    return FORMS[config.form](config, target_ids)


def build(config: dict[str, object]) -> MtpHead:
    return new_mtp(MtpConfig.model_validate(config))


register("mtp", build)
