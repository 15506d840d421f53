"""The documentation site: `ci/docs.sh` builds it, with warnings as errors."""

import optax_globalclip

project = "optax_globalclip"
release = version = optax_globalclip.__version__
copyright = "the optax_globalclip authors"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon", "sphinx_copybutton"]
copybutton_prompt_text = ">>> "
html_theme = "furo"
html_title = f"optax_globalclip {version}"
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "cache"  # ci/docs.sh starts with an empty one
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 300

default_role = "code"  # docstrings write `names` as Markdown does
napoleon_google_docstring = True
autodoc_typehints = "none"  # the signature would be longer than the text
autodoc_member_order = "bysource"
nitpicky = False
suppress_warnings = ["toc.not_included"]
