"""How the documentation is built."""

import logging

from pillarbox import __version__

project = "Pillarbox"
copyright = "the Pillarbox maintainers"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]
html_theme = "furo"
html_title = "Pillarbox"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
autodoc_typehints = "none"
autodoc_member_order = "bysource"
# Names of the standard library, for which no inventory is fetched while building.
nitpick_ignore_regex = [("py:.*", r"(?!pillarbox).*")]

# Alembic, which autodoc imports, tells of its plugins.
logging.getLogger("alembic").setLevel(logging.WARNING)
