"""ROOT/**/picture without labels: every label is -1 and there are no classes."""

from __future__ import annotations

import numpy as np

from packshift.errors import SourceError
from packshift.record import UNLABELLED, Listing, Names
from packshift.sources._labelling import Labelling
from packshift.sources._tree import Tree


class Flat:
    """Found by itself where pictures lie directly in the root and in no folder below; when asked for, takes all levels.

    Records are ordered by the bytes of their path.
    """

    name = "flat"

    def fits(self, tree: Tree) -> bool:
        return bool(tree.pictures) and not any(b"/" in picture for picture in tree.pictures)

    def arrange(self, tree: Tree, labelling: Labelling) -> Listing:
        if labelling.names is not None:
            raise SourceError(
                f"{tree.root}: pictures without class folders get no labels: expected folders with names of "
                f"{labelling.origin}; move the pictures into such folders, or leave --classes-from out"
            )
        pictures = sorted(tree.pictures)
        return Listing(
            root=str(tree.root),
            layout=self.name,
            classes=(),
            names=Names.of(pictures),
            labels=np.full(len(pictures), UNLABELLED, np.int64),
            ignored=dict(tree.ignored),
            ignored_examples=tree.all_examples,
        )


LAYOUT = Flat()
