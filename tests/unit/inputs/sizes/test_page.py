"""The generated tables of docs/sizes.md."""

from tests import sizes_page


def test_the_tables_match_the_current_estimate():
    """`make docs` writes the tables."""
    page = sizes_page.PAGE.read_text()
    assert sizes_page.BEGIN in page
    assert page == sizes_page.render()
