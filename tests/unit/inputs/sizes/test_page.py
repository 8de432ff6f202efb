"""docs/sizes.md."""

from tests import sizes_page


def test_the_tables_are_those_of_todays_estimate():
    """`make docs` writes them."""
    page = sizes_page.PAGE.read_text()
    assert sizes_page.BEGIN in page
    assert page == sizes_page.render()
