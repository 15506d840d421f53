"""Does the documentation name everything that is public, and do its pages, links and notebooks hold?"""

import json
import pathlib
import re

import optax_globalclip as ogc
import pytest

DOCS = pathlib.Path(__file__).parents[1] / "docs"
PAGES = sorted(DOCS.glob("*.md"))
NOTEBOOKS = sorted(DOCS.glob("notebooks/*.ipynb"))
pytestmark = pytest.mark.usefixtures("as_users_run_it")


def test_the_api_page_has_every_public_name_once():
  named = re.findall(r"^\.\. auto(?:function|class):: (\w+)$", (DOCS / "api.md").read_text(), re.MULTILINE)
  assert sorted(named) == sorted(ogc.__all__)


def test_every_page_is_in_a_table_of_contents():
  index = (DOCS / "index.md").read_text()
  listed = {line.removesuffix("?") for line in re.findall(r"^[a-z_/]+\??$", index, re.MULTILINE)}
  assert {page.stem for page in PAGES} - {"index"} <= listed
  assert {f"notebooks/{path.stem}" for path in NOTEBOOKS} <= listed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
  def anchors(text):
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    if include := re.search(r"\{include\} (\S+)", (DOCS / target).read_text()):
      text = (DOCS / include[1]).read_text()
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in re.findall(r"^#+ (.*)", text, re.MULTILINE)}
  for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)]*)\)", page.read_text()):
    target = target or page.name
    assert (DOCS / target).exists(), target
    if anchor:
      assert anchor in anchors((DOCS / target).read_text()), f"{target}#{anchor}"


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run_in_order(notebook):
  matplotlib = pytest.importorskip("matplotlib")
  matplotlib.use("Agg")
  namespace = {}
  for cell in json.loads(notebook.read_text())["cells"]:
    if cell["cell_type"] == "code":
      exec("".join(cell["source"]), namespace)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(notebook):
  cells = json.loads(notebook.read_text())["cells"]
  assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
