"""Every law of a method, run on this package's own."""

from collections.abc import Callable

import pytest

from gossamer.testing import METHOD_LAWS


@pytest.mark.parametrize("law", METHOD_LAWS, ids=lambda law: law.__name__)
def test_law(law: Callable[[str], None]) -> None:
    """Run one law."""
    law("near-frames")
