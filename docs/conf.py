"""Sphinx configuration."""

import inspect
import os
import shutil
import tomllib
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

from polarquant_nb.cli import _parser

HERE = Path(__file__).parent

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
_PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))
numpydoc_validation_checks = set(_PROJECT["tool"]["numpydoc_validation"]["checks"])

myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3
nb_execution_raise_on_error = True
nb_execution_timeout = 600
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars

html_title = "polarquant_nb"
html_theme = "pydata_sphinx_theme"
html_theme_options = {"show_prev_next": False}
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_copy_source = False


def write_pages(_app: object) -> None:
    """Pages that are made of other files: the notebooks, and what ``--help`` prints."""
    folder = HERE / "tutorial" / "notebooks"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(HERE.parent / "notebooks", folder, ignore=shutil.ignore_patterns(".*"))

    os.environ["COLUMNS"] = "90"
    parser = _parser()
    commands = next(action.choices for action in parser._actions if action.choices)
    text = ["# Command line\n"]
    for each in (parser, *commands.values()):
        text.append(f"## {each.prog}\n\n```text\n{each.format_help()}```\n")
    (HERE / "reference" / "cli.md").write_text("\n".join(text), encoding="utf-8")


def init_signature(
    _app: object, what: str, _name: str, found: Any, _options: object, signature: str, _returns: str
) -> tuple[str, str] | None:
    """Of a class whose base is mocked: what Sphinx would find is the signature of the mock."""
    if what != "class" or signature != "(*args, **kwargs)":
        return None
    _self, *parameters = inspect.signature(found.__init__).parameters.values()
    bare = [each.replace(annotation=inspect.Parameter.empty) for each in parameters]
    return str(inspect.Signature(bare)), ""


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", write_pages)
    app.connect("autodoc-process-signature", init_signature)
