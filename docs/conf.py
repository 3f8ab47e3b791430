"""Sphinx configuration."""

from importlib.metadata import version as package_version

project = "polarquant_nb"
author = "The polarquant_nb developers"
copyright = author
release = version = package_version("polarquant-nb")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
    "myst_nb",
]
exclude_patterns = ["_build"]
templates_path = ["_templates"]
nitpicky = True

autodoc_mock_imports = ["torch", "transformers"]
# Types stand in the Parameters sections; links to other projects would need a network.
autodoc_typehints = "none"
autosummary_generate = True
numpydoc_show_class_members = False

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3
nb_execution_raise_on_error = True
nb_execution_timeout = 300

html_theme = "pydata_sphinx_theme"
html_theme_options = {"show_prev_next": False}
