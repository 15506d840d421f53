"""Real text in several kinds, and the mixture of them that a training run draws from.

Every batch is a function of the corpus, the seed and the step alone, so a second
run, a resumed one, or every process of a sharded one sees the same data in the
same order.
"""

import bisect
import importlib.util
import itertools
import pathlib
import re
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pydoc_data import topics
from typing import NamedTuple

import numpy as np
import tokenizers

PHASE_LENGTHS = (7, 14, 21, 28, 42)

# A prompt and what follows it up to a blank line or the end of the docstring.
EXAMPLE = re.compile(r'^[ \t]*>>> .*\n(?:(?![ \t]*(?:"""|\'\'\'))[ \t]*\S.*\n)*', re.MULTILINE)


class CorpusError(ValueError):
  """A source that gives no usable text; the message names it."""


def _read_text(path: pathlib.Path) -> str | None:
  try:
    return path.read_text(encoding="utf-8")
  except UnicodeDecodeError:
    return None


def _standard_library(pattern: str) -> list[str]:
  root = pathlib.Path(sysconfig.get_path("stdlib"))
  skipped = {"site-packages", "dist-packages", "test", "tests"}
  return [
    text
    for path in sorted(root.glob(pattern))
    if not skipped & set(path.relative_to(root).parts)
    if (text := _read_text(path))
  ]


def _package(name: str) -> list[str]:
  root = pathlib.Path(importlib.util.find_spec(name).origin).parent
  return [text for path in sorted(root.rglob("*.py")) if (text := _read_text(path))]


def installed_sources() -> dict[str, list[str]]:
  """The three kinds of text that come with Python and with what JAX itself needs.

  Returns:
    Documents by source: `docs`, the reference documentation behind `help()`;
    `code`, the top-level modules of the standard library; `qa`, the interactive
    examples (prompt and answer) in the docstrings of the standard library, NumPy
    and SciPy. The examples are taken out of `code`, so that no held-out example
    is trained on under another name.
  """
  commented = _standard_library("**/*.py") + _package("numpy") + _package("scipy")
  return {
    "docs": [topics.topics[title] for title in sorted(topics.topics)],
    "code": [EXAMPLE.sub("", text) for text in _standard_library("*.py")],
    "qa": [textwrap.dedent(example) for text in commented for example in EXAMPLE.findall(text)],
  }


def read_source(name: str, path: pathlib.Path) -> list[str]:
  """The UTF-8 text of a file, or of every file below a folder that holds any.

  Hidden files and folders are passed over, as are files that are not UTF-8.

  Raises:
    CorpusError: nothing at `path`, or no text in it.
  """
  if not path.exists():
    raise CorpusError(f"source {name!r}: no file or folder at {path}")
  files = [path]
  if path.is_dir():
    files = [
      p
      for p in sorted(path.rglob("*"))
      if p.is_file() and not any(part.startswith(".") for part in p.relative_to(path).parts)
    ]
  try:
    documents = [text for p in files if (text := _read_text(p)) and text.strip()]
  except OSError as error:
    raise CorpusError(f"source {name!r}: {error}") from error
  if not documents:
    raise CorpusError(f"source {name!r}: no UTF-8 text in {path}")
  return documents


class Corpus(NamedTuple):
  """Token ids (int32, one dimension) by source, in the order of `names`."""

  names: tuple[str, ...]
  train: tuple[np.ndarray, ...]
  held_out: tuple[np.ndarray, ...]


def _learn_tokenizer(sources: Mapping[str, Sequence[str]], vocabulary: int) -> tokenizers.Tokenizer:
  # Equal shares keep the largest source from taking all the merges.
  characters = 500_000
  sample = (text for documents in sources.values() for text in first_characters(documents, characters))
  tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=vocabulary,
    initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    show_progress=False,
  )
  tokenizer.train_from_iterator(sample, trainer)
  return tokenizer


def first_characters(documents: Sequence[str], characters: int) -> Iterator[str]:
  for document in documents:
    if characters <= 0:
      return
    yield document[:characters]
    characters -= len(document)


def tokenize(sources: Mapping[str, Sequence[str]], vocabulary: int, length: int) -> Corpus:
  """Learns a byte-level BPE on the sources and encodes them with it.

  Args:
    sources: documents by name.
    vocabulary: the most token ids there may be, at least the 256 bytes.
    length: tokens in a training sequence; decides how short a source may be.

  Returns:
    The corpus; the last twentieth of each source (no less than one sequence) is
    held out.

  Raises:
    CorpusError: a source too short to train on and to hold out from.
  """
  tokenizer = _learn_tokenizer(sources, vocabulary)
  train, held_out = [], []
  for name, documents in sources.items():
    encoded = tokenizer.encode_batch([text + "\n\n" for text in documents])
    ids = np.concatenate([np.asarray(e.ids, np.int32) for e in encoded])
    if len(ids) < 2 * (length + 1):
      raise CorpusError(
        f"source {name!r}: {len(ids)} tokens, too few to train on and hold out from: needs {2 * (length + 1)}"
      )
    kept = len(ids) - max(len(ids) // 20, length + 1)
    train.append(ids[:kept])
    held_out.append(ids[kept:])
  return Corpus(tuple(sources), tuple(train), tuple(held_out))


class Phase(NamedTuple):
  """Steps `start` to `start + length - 1`, drawn with `weights` (they sum to one)."""

  start: int
  length: int
  weights: np.ndarray


def phases(num_sources: int, seed: int) -> Iterator[Phase]:
  """The bandit's schedule: endless phases, each with another favourite source.

  A phase lasts one of `PHASE_LENGTHS`. Its favourite, never the one before, gets
  0.55 to 0.8 of the mixture and the others share the rest at random, so weights
  jump at every boundary. They do not depend on the losses: two runs compared on
  one seed see the same data.
  """
  rng = np.random.default_rng([seed, 1])
  start, favourite = 0, int(rng.integers(num_sources))
  while True:
    weights = np.ones(1)
    if num_sources > 1:
      share = rng.uniform(0.55, 0.8)
      others = (1 - share) * rng.dirichlet(np.ones(num_sources - 1))
      weights = np.insert(others, favourite, share)
      favourite = int((favourite + rng.integers(1, num_sources)) % num_sources)
    length = int(rng.choice(PHASE_LENGTHS))
    yield Phase(start, length, weights)
    start += length


class Batch(NamedTuple):
  tokens: np.ndarray  # int32 [rows, length + 1]: inputs and, one later, targets
  source: np.ndarray  # int [rows]: which source each row is from


class Batches:
  """The batches of a run: `batch(step)` for training, `held_out()` for judging."""

  def __init__(
    self,
    corpus: Corpus,
    *,
    rows: int,
    length: int,
    seed: int,
    steps: int,
    schedule: Iterable[Phase] | None = None,  # from step 0 on; by default the bandit's
  ):
    self._corpus, self._rows, self._length = corpus, rows, length
    self._seed = seed
    self.names = corpus.names
    schedule = phases(len(corpus.names), seed) if schedule is None else schedule
    self.phases = list(itertools.takewhile(lambda phase: phase.start < steps, schedule))
    self._starts = [phase.start for phase in self.phases]

  def phase(self, step: int) -> Phase:
    return self.phases[bisect.bisect_right(self._starts, step) - 1]

  def batch(self, step: int) -> Batch:
    """Rows cut at random places of sources drawn with the phase's weights."""
    rng = np.random.default_rng([self._seed, 2, step])
    weights = self.phase(step).weights
    source = rng.choice(len(weights), size=self._rows, p=weights)
    texts = [self._corpus.train[s] for s in source]
    starts = [rng.integers(len(text) - self._length) for text in texts]
    return Batch(self._cut(texts, starts), source)

  def held_out(self, rows: int = 8) -> Batch:
    """`rows` evenly spaced sequences of every source's held-out text."""
    source = np.repeat(np.arange(len(self._corpus.names)), rows)
    texts = [self._corpus.held_out[s] for s in source]
    places = np.tile(np.linspace(0, 1, rows), len(self._corpus.names))
    starts = [int(place * (len(text) - self._length - 1)) for place, text in zip(places, texts, strict=True)]
    return Batch(self._cut(texts, starts), source)

  def _cut(self, texts: list[np.ndarray], starts: list[int]) -> np.ndarray:
    return np.stack([text[start : start + self._length + 1] for text, start in zip(texts, starts, strict=True)])
