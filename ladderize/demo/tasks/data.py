"""The test split of each genre, made on the fly: the demo needs no data files and no network."""

from functools import partial

from ladderize.demo.corpus import dataset

agreement, arithmetic, copying = (partial(dataset, genre) for genre in ("agreement", "arithmetic", "copying"))
