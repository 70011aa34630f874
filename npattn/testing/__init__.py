"""Tests for an attention: gradient checks, strategies for whole problems, laws, a naive oracle, bounds that are honest.

- `check_attention`: everything below on an attention of your own; `attention_checks` for one test a law;
- `check_backward`, `check_jvp`, `check_symmetric`: derivatives against finite differences, for any function of arrays;
- `compare`: a learner's own chain of steps beside ours;
- `attention_problem` and the Hypothesis strategy `attention_problems`: inputs, options and cotangents, printed as code;
- ``LAWS``: what holds for every attention, each law named by what it says;
- `naive`: the loops that everything is held against, themselves held against numbers of others;
- `Candidate`: an attention under test, npattn's own or another's.

Hypothesis is imported when a strategy is asked for, and not before.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from npattn.testing.candidates import Answer, Candidate, Run, naive, naive_candidate, npattn_candidate
from npattn.testing.check import Check, attention_checks, check_attention
from npattn.testing.comparison import Comparison, compare
from npattn.testing.gradients import check_backward, check_jvp, check_symmetric, complex_step, numerical_jacobian
from npattn.testing.laws import LAWS, ORDINARY, LawBroken
from npattn.testing.libraries import Library, Unavailable, available_libraries, open_library, to_numpy
from npattn.testing.multi_head import MultiHeadProblem, check_multi_head, multi_head_problem, naive_multi_head
from npattn.testing.oracle import naive_backward, naive_forward
from npattn.testing.plain import CandidateRaised
from npattn.testing.problems import Alibi, AttentionProblem, Relative, attention_problem
from npattn.testing.scales import attention_scales, autodiff_bound, difference_bound, difference_step, precision_bound

if TYPE_CHECKING:
    from npattn.testing.multi_head_strategies import multi_head_problems
    from npattn.testing.strategies import attention_problems, mask_trees, multiples_of

__all__ = [
    "LAWS",
    "ORDINARY",
    "Alibi",
    "Answer",
    "AttentionProblem",
    "Candidate",
    "CandidateRaised",
    "Check",
    "Comparison",
    "LawBroken",
    "Library",
    "MultiHeadProblem",
    "Relative",
    "Run",
    "Unavailable",
    "attention_checks",
    "attention_problem",
    "attention_problems",
    "attention_scales",
    "autodiff_bound",
    "available_libraries",
    "check_attention",
    "check_backward",
    "check_jvp",
    "check_multi_head",
    "check_symmetric",
    "compare",
    "complex_step",
    "difference_bound",
    "difference_step",
    "mask_trees",
    "multi_head_problem",
    "multi_head_problems",
    "multiples_of",
    "naive",
    "naive_backward",
    "naive_candidate",
    "naive_forward",
    "naive_multi_head",
    "npattn_candidate",
    "numerical_jacobian",
    "open_library",
    "precision_bound",
    "to_numpy",
]

_STRATEGIES = {
    "attention_problems": "strategies", "mask_trees": "strategies", "multiples_of": "strategies",
    "multi_head_problems": "multi_head_strategies",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """The strategies, once they are wanted."""
    if name not in _STRATEGIES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"npattn.testing.{_STRATEGIES[name]}"), name)
