"""Which states a parameter of some shape can have."""

import pytest

from ckpt_formats.core.geometry import Shape
from ckpt_formats.state_dicts.parameter_order import is_state_of


@pytest.mark.parametrize(
    ("state", "shape", "fits"),
    [
        ("exp_avg", (2, 3, 4), True),
        ("exp_avg", (2, 3), False),
        ("exp_avg_sq_row", (2, 3), True),
        ("row_var", (2, 3, 1), True),
        ("row_var", (2, 3, 4), False),
        ("exp_avg_sq_col", (2, 4), True),
        ("col_var", (2, 1, 4), True),
        ("col_var", (2, 3), False),
    ],
)
def test_numbering_takes_states_of_the_parameters_size_or_an_axis_less(state: str, shape: Shape, fits: bool) -> None:
    assert is_state_of(state, shape, (2, 3, 4)) is fits


def test_numbering_takes_no_rows_of_a_vector() -> None:
    assert [is_state_of(state, (3,), (3,)) for state in ("row_var", "col_var")] == [True, True]
    assert [is_state_of(state, (), (3,)) for state in ("row_var", "col_var")] == [False, False]
