"""Every example in the package's docstrings, in README.md and in docs/ runs and prints what it says."""

import doctest
import importlib
import pathlib
import re

import jax
import optax_globalclip as ogc
import pytest

ROOT = pathlib.Path(__file__).parents[1]
MODULES = sorted("optax_globalclip." + module.stem for module in pathlib.Path(ogc.__file__).parent.glob("*.py"))
PAGES = [page for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))] if page.exists()]
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


@pytest.fixture(autouse=True)
def as_users_run_it():
  with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
    yield


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_print_what_they_say(name):
  module = importlib.import_module(name.removesuffix(".__init__"))
  failed, _ = doctest.testmod(module, optionflags=FLAGS)
  assert failed == 0


def test_every_public_name_says_what_it_is():
  assert [name for name in ogc.__all__ if not (getattr(ogc, name).__doc__ or "").strip()] == []


def blocks(page):
  return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run_in_order(page):
  namespace = {"__name__": page.stem}
  for number, block in enumerate(blocks(page)):
    if ">>>" in block:
      test = doctest.DocTestParser().get_doctest(block, namespace, f"{page.name} block {number}", str(page), 0)
      runner = doctest.DocTestRunner(optionflags=FLAGS)
      runner.run(test, clear_globs=False)
      namespace.update(test.globs)
      assert runner.summarize().failed == 0
    else:
      exec(compile(block, f"{page.name} block {number}", "exec"), namespace)
