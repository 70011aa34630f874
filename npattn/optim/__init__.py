"""Optimisers over trees of parameters: pure functions ``init`` and ``update`` of a rule that never changes.

``state = rule.init(params)``, then ``params, state = rule.update(params, grads, state)`` once a step. The gradient of a tree is a
tree of the same type, and so are the moments. `SGD`, `Adam` and `AdamW` are rules; `clip_global_norm` shortens gradients before
a step, and `WarmupCosine` gives its learning rate: ``rule.update(params, grads, state, lr=schedule(step))``.
"""

from npattn.optim.adam import Adam, AdamState, AdamW, decays_matrices
from npattn.optim.clip import clip_global_norm, global_norm
from npattn.optim.schedule import WarmupCosine
from npattn.optim.sgd import SGD, SGDState

__all__ = [
    "SGD",
    "Adam",
    "AdamState",
    "AdamW",
    "SGDState",
    "WarmupCosine",
    "clip_global_norm",
    "decays_matrices",
    "global_norm",
]
