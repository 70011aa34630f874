"""A few problems that have, together, every option in company of every other kind: what chance may not draw."""

from __future__ import annotations

import numpy as np

from npattn import Dropout, causal_mask, causal_mask_end, length_mask, segment_mask, window_mask
from npattn.testing import Alibi, Relative, attention_problem

BY_HEAD = np.random.default_rng(0).random((6, 5, 7)) < 0.6
BY_ENTRY = np.random.default_rng(1).random((2, 1, 1, 7)) < 0.6
PACKED = segment_mask([0, 0, 1, 1, 2], [0, 0, 0, 1, 1, 2, 3])

EVERY_OPTION = {
    "bare": attention_problem((2, 3, 5, 7), (2, 3, 11, 7), (2, 3, 11, 2)),
    "causal, grouped, capped, with a sink": attention_problem(
        (2, 6, 5, 3), (2, 2, 7, 3), (2, 2, 7, 5), mask=causal_mask(1), softcap=1.0, sinks=True, dlse=True, seed=1
    ),
    "hiding bias, dropout, broadcast values": attention_problem(
        (3, 2, 5, 3), (2, 7, 3), (1, 1, 7, 2), bias=(2, 1, 7), hidden=0.3, dropout=Dropout(0.4, 3), scale=0.7, seed=2
    ),
    "lengths, segments, alibi": attention_problem(
        (2, 2, 5, 3), (2, 1, 7, 3), (2, 1, 7, 2), mask=length_mask([4, 0], [5, 2]) & PACKED, bias=Alibi(2, 1), dlse=True, seed=3
    ),
    "windows or an array, relative bias, without heads": attention_problem(
        (5, 3), (7, 3), (7, 2), mask=window_mask(1, 0) | (np.arange(7) == 3), bias=Relative(8, 1), sinks=True, softcap=3.0, seed=4
    ),
    "a mask of its own for every head of a group, dropout": attention_problem(
        (2, 6, 5, 3),
        (2, 2, 7, 3),
        (2, 2, 7, 2),
        mask=BY_HEAD & causal_mask(3),
        dropout=Dropout(0.3, 5),
        sinks=True,
        dlse=True,
        seed=5,
    ),
    "a wide bias over shared keys, a mask by entry, capped": attention_problem(
        (2, 4, 5, 3),
        (2, 7, 3),
        (2, 1, 7, 2),
        mask=BY_ENTRY,
        bias=(2, 4, 5, 7),
        hidden=0.2,
        softcap=0.8,
        dropout=Dropout(0.5, 8),
        seed=6,
    ),
    "leading axes of values alone, more queries than keys": attention_problem(
        (4, 7, 3),
        (1, 2, 5, 3),
        (3, 2, 2, 5, 2),
        mask=causal_mask_end() | ~length_mask(4),
        bias=(4, 7, 1),
        scale=-0.6,
        dlse=True,
        seed=7,
    ),
}
