"""Every example in the package's docstrings, in README.md and in docs/ runs and prints what it says."""

import doctest
import importlib
import pathlib
import re

import optax
import optax_globalclip as ogc
import pytest

ROOT = pathlib.Path(__file__).parents[1]
NAMES = sorted(path.stem for path in pathlib.Path(ogc.__file__).parent.glob("*.py"))
MODULES = [importlib.import_module(f"optax_globalclip.{name}".removesuffix(".__init__")) for name in NAMES]
DOCSTRINGS = [found for module in MODULES for found in doctest.DocTestFinder().find(module) if found.examples]
# Public names without an example of their own, and the one whose example makes or reads what they name.
SHOWN_BY = {
    "ClipState": "clip_metrics",
    "ClippedMultiStepsState": "has_updated",
    "DynamicLossScale": "current_loss_scale",
    "LeafReport": "leaf_report",
    "LeafRow": "leaf_report",
    "LossScaleState": "current_loss_scale",
}
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS

pytestmark = pytest.mark.usefixtures("as_users_run_it", "folder_of_its_own")
HOSTS = ("equinox", "haiku", "numpyro", "penzai", "tunix")  # whose sections of docs/hosts.md need them


@pytest.fixture
def folder_of_its_own(tmp_path, monkeypatch):
  """For what an example writes."""
  monkeypatch.chdir(tmp_path)


def check(example):
  runner = doctest.DocTestRunner(optionflags=FLAGS)
  runner.run(example, clear_globs=False)
  assert runner.summarize() == doctest.TestResults(failed=0, attempted=len(example.examples))


@pytest.mark.parametrize("docstring", DOCSTRINGS, ids=lambda docstring: docstring.name)
def test_the_examples_of_a_docstring_print_what_they_say(docstring):
  check(docstring)


def test_every_public_name_has_an_example():
  names = {docstring.name.rpartition(".")[2] for docstring in DOCSTRINGS}
  assert [name for name in ogc.__all__ if SHOWN_BY.get(name, name) not in names] == []
  assert SHOWN_BY.keys() <= set(ogc.__all__)


def test_every_public_name_says_what_it_is():
  assert [name for name in ogc.__all__ if not (getattr(ogc, name).__doc__ or "").strip()] == []


def blocks(text):
  return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run_in_order(name, text):
  namespace = {"__name__": name}
  assert blocks(text)
  for number, block in enumerate(blocks(text)):
    if ">>>" in block:
      example = doctest.DocTestParser().get_doctest(block, namespace, f"{name} block {number}", name, 0)
      check(example)
      namespace.update(example.globs)
    else:
      exec(compile(block, f"{name} block {number}", "exec"), namespace)


HOST_PAGE = ROOT / "docs/hosts.md"
PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("**/*.md"))
                               if page != HOST_PAGE and blocks(page.read_text()))]
HOST_SECTIONS = [section for section in HOST_PAGE.read_text().split("\n## ") if blocks(section)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # for what a page writes
  run_in_order(page.stem, page.read_text())


@pytest.mark.parametrize("section", HOST_SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_the_program_of_a_framework_runs(section, monkeypatch):
  monkeypatch.setattr(optax, "clip_by_global_norm", optax.clip_by_global_norm)  # one section replaces it
  try:
    run_in_order("hosts", section)
  except ModuleNotFoundError as error:
    if error.name.partition(".")[0] not in HOSTS:
      raise
    pytest.skip(f"{error.name} is not installed (pip install '.[hosts]'; ci/tunix.sh)")
