"""What stacks share: their number of blocks, and the norm after the last one."""

from __future__ import annotations

from typing import Any

from npattn._arrays.checks import host_int
from npattn._arrays.namespace import Array
from npattn.models.config import BlockConfig
from npattn.models.norm import NormParams, NormSaved, norm_backward, norm_forward


def check_blocks(op: str, count: Any) -> None:
    """One block at least: with none, out would be x itself."""
    host_int(op, "the number of blocks", count, least=1)


def init_norm(wanted: bool | None, width: int, config: BlockConfig, *, bias: bool = True, **place: Any) -> NormParams | None:
    """The last norm's parameters, if there is one; by default where blocks normalise before what they do."""
    if not (config.norm_order == "pre" if wanted is None else wanted):
        return None
    names = ("xp", "dtype", "device")  # what else there is concerns blocks
    return NormParams.init(width=width, bias=bias and config.norm == "layer", **{name: place[name] for name in names})


def last_norm_forward(op: str, params: NormParams | None, x: Array, config: BlockConfig) -> tuple[Array, NormSaved | None]:
    return (x, None) if params is None else norm_forward(op, params, x, config)


def last_norm_backward(dout: Array, saved: NormSaved | None) -> tuple[Array, NormParams | None]:
    return (dout, None) if saved is None else norm_backward(dout, saved)
