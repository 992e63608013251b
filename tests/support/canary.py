"""An assert that must fail: it proves that the asserts of this package are at work under -O too."""


def fail_an_assert(value: int) -> None:
    """Assert what is not so."""
    assert value == value + 1, "this assert of tests/support is rewritten"
