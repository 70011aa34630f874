"""Laws of attention: true for every problem, whoever computes it.

Each is a function of a candidate and a problem that raises `LawBroken`; its docstring states it as mathematics and says what
fault it catches. Where a problem has an option that a law does not hold for, the law is checked on the same problem without it.
``LAWS`` has them by name.
"""

from npattn.testing.gradient_laws import (
    cotangents_enter_linearly,
    gradients_are_derivatives,
    keys_moved_together_have_no_gradient,
    products_with_gradients_agree,
    score_gradients_of_a_row_sum_to_zero,
)
from npattn.testing.law import LAWS, ORDINARY, Law, LawBroken
from npattn.testing.mask_laws import (
    cuts_merge_to_the_whole,
    dead_rows_are_zero,
    decoding_is_the_whole,
    poison_stays_out,
    poison_stays_where_it_is_seen,
    unseen_keys_leave_no_trace,
)
from npattn.testing.state_laws import (
    dtype_and_device_are_kept,
    inputs_are_not_written,
    memory_layout_does_not_matter,
    nothing_is_shared,
    the_same_bits_again,
)
from npattn.testing.value_laws import (
    a_number_added_to_a_row_changes_nothing,
    batched_is_looped,
    broadcasting_is_repeating,
    grouped_is_repeated,
    heads_are_independent,
    is_as_precise_as_the_naive_formula,
    is_what_the_loops_say,
    keys_have_no_order,
    moving_all_keys_changes_nothing,
    outputs_lie_between_the_values,
    queries_are_independent,
    repeated_keys_share_their_weight,
    scale_multiplies_the_scores,
    values_enter_linearly,
    weights_sum_to_one_or_nothing,
)

# They say nothing of an attention that has no backward.
OF_GRADIENTS = frozenset(
    {
        "cotangents_enter_linearly",
        "gradients_are_derivatives",
        "keys_moved_together_have_no_gradient",
        "products_with_gradients_agree",
        "score_gradients_of_a_row_sum_to_zero",
    }
)

__all__ = [
    "LAWS",
    "OF_GRADIENTS",
    "ORDINARY",
    "Law",
    "LawBroken",
    "a_number_added_to_a_row_changes_nothing",
    "batched_is_looped",
    "broadcasting_is_repeating",
    "cotangents_enter_linearly",
    "cuts_merge_to_the_whole",
    "dead_rows_are_zero",
    "decoding_is_the_whole",
    "dtype_and_device_are_kept",
    "gradients_are_derivatives",
    "grouped_is_repeated",
    "heads_are_independent",
    "inputs_are_not_written",
    "is_as_precise_as_the_naive_formula",
    "is_what_the_loops_say",
    "keys_have_no_order",
    "keys_moved_together_have_no_gradient",
    "memory_layout_does_not_matter",
    "moving_all_keys_changes_nothing",
    "nothing_is_shared",
    "outputs_lie_between_the_values",
    "poison_stays_out",
    "poison_stays_where_it_is_seen",
    "products_with_gradients_agree",
    "queries_are_independent",
    "repeated_keys_share_their_weight",
    "scale_multiplies_the_scores",
    "score_gradients_of_a_row_sum_to_zero",
    "the_same_bits_again",
    "unseen_keys_leave_no_trace",
    "values_enter_linearly",
    "weights_sum_to_one_or_nothing",
]
