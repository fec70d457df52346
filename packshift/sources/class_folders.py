"""ROOT/CLASS/**/picture: the label is the first-level folder's, by default the one that torchvision's ImageFolder gives."""

from __future__ import annotations

import numpy as np

from packshift.record import Listing, Names, decode_name, encode_name
from packshift.sources._labelling import Labelling
from packshift.sources._tree import OUTSIDE_CLASS, Tree


class ClassFolders:
    """Classes are all first-level folders, or those of a list; one without a picture keeps its place.

    Records are ordered by class, then by the bytes of their path, whatever the platform, locale or file system.
    """

    name = "class-folders"

    def fits(self, tree: Tree) -> bool:
        return any(b"/" in picture for picture in tree.pictures)

    def arrange(self, tree: Tree, labelling: Labelling) -> Listing:
        classes = labelling.arrange(str(tree.root), [decode_name(folder) for folder in tree.folders])
        index = {encode_name(name): label for label, name in enumerate(classes)}
        inside = []
        for picture in sorted(tree.pictures):
            if b"/" in picture:
                inside.append((index[picture.split(b"/", 1)[0]], picture))
            else:
                tree.ignore(OUTSIDE_CLASS, picture)
        inside.sort()
        return Listing(
            root=str(tree.root),
            layout=self.name,
            classes=classes,
            class_order=labelling.recorded,
            names=Names.of(picture for _, picture in inside),
            labels=np.array([label for label, _ in inside], np.int64),
            ignored=dict(tree.ignored),
            ignored_examples=tree.all_examples,
        )


LAYOUT = ClassFolders()
