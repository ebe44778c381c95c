"""The test split of each genre, made on the fly: the demo needs no data files and no network."""

from functools import partial

from ladderize.demo.corpus import dataset

agreement, arithmetic, copying = (partial(dataset, genre) for genre in ("agreement", "arithmetic", "copying"))
# the questions of the demo's sweep: as many as the margin needs; of arithmetic nearly all that there are
sentences, sums = partial(dataset, "agreement", 400), partial(dataset, "arithmetic", 220)
repeating = partial(dataset, "copying", 300, "Repeat")
first, last = partial(dataset, "copying", 400, "First"), partial(dataset, "copying", 400, "Last")
