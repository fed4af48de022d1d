"""Prefill as a service: prompts are computed in the idle time of a pipeline training.

`PrefillWork` runs in the bubbles of the training's ranks. `PrefillService` runs in the process that
decodes: it decides which requests are accepted and receives their keys and values. `serve` offers
it over HTTP.
"""

# Paper: BUBBLETEA §5

from torch_resilient.prefill.controller import Rejected
from torch_resilient.prefill.decoder import decode
from torch_resilient.prefill.handover import Link
from torch_resilient.prefill.model import ModelPart, ModelShape, plain_prefill
from torch_resilient.prefill.server import Server
from torch_resilient.prefill.service import Prefilled, PrefillService
from torch_resilient.prefill.worker import PrefillWork

__all__ = [
    "Link",
    "ModelPart",
    "ModelShape",
    "PrefillService",
    "PrefillWork",
    "Prefilled",
    "Rejected",
    "Server",
    "decode",
    "plain_prefill",
]
