"""Settings of the documentation: `sphinx-build -nW docs DIRECTORY`. Every block is executed while it is built."""

import os
import sys
from datetime import date
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_extensions"), str(HERE.parent)]

import rma_mm  # noqa: E402

project = "rma_mm"
author = "the rma_mm authors"
version = release = rma_mm.__version__
project_copyright = f"{date.today().year}, {author}"

extensions = ["myst_nb", "sphinx.ext.autodoc", "numpydoc", "executed", "algorithm_pages"]
exclude_patterns = ["_extensions", "_build"]
default_role = "code"

nb_execution_mode = "force"
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_execution_in_temp = True
nb_merge_streams = True
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
myst_heading_anchors = 3
myst_links_external_new_tab = False
os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")

autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

html_theme = "pydata_sphinx_theme"
html_title = f"rma_mm {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
