"""Every example in the package's docstrings, in README.md and in docs/ runs and prints what it says."""

import doctest
import importlib
import pathlib
import re

import jax
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


@pytest.fixture(autouse=True)
def as_users_run_it():
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


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


def blocks(page):
  return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


PAGES = [ROOT / "README.md", *(page for page in sorted((ROOT / "docs").glob("**/*.md")) if blocks(page))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run_in_order(page):
  namespace = {"__name__": page.stem}
  assert blocks(page)
  for number, block in enumerate(blocks(page)):
    if ">>>" in block:
      example = doctest.DocTestParser().get_doctest(block, namespace, f"{page.name} block {number}", str(page), 0)
      check(example)
      namespace.update(example.globs)
    else:
      exec(compile(block, f"{page.name} block {number}", "exec"), namespace)
