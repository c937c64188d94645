"""How well models know the classes of the nodes that use them, in the shares in which these hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np

from edgefl.data import Batch
from edgefl.data.partition import label_table
from edgefl.experiment.build import Built
from edgefl.experiment.threads import one_thread
from edgefl.learning.work import Evaluate, Evaluation
from edgefl.parameters import Vector


@one_thread()
def own_mix_accuracy(built: Built, models: Mapping[int, Vector]) -> float | None:
    """The mean, over nodes with data, of their model's test accuracy with classes weighted as they have them.

    models: by node: each one's own, or that of a node without data, which all use. Classes that the test
    set lacks are left out. None where nothing is classified, and for methods whose nodes train for
    themselves alone.
    """
    if built.dataset.task != "classification" or built.plan.method.evaluates not in ("server", "personal"):
        return None
    first = len(built.plan.nodes) - len(built.parts)
    y, known = built.dataset.y_test, np.unique(built.dataset.y_test.numpy())
    tests = [Batch(built.dataset.x_test[y == c], y[y == c]) for c in known.tolist()]
    distinct = {id(model): model for model in models.values()}
    work = [Evaluate(model, test) for model in distinct.values() for test in tests]
    found = [cast(Evaluation, one).metrics["accuracy"] for one in built.executor.run(work)]
    by_class = dict(zip(distinct, np.reshape(found, (len(distinct), len(tests))), strict=True))
    scores = []
    for k, counts in enumerate(label_table(built.parts, built.dataset.num_classes)[:, known]):
        model = models.get(first + k, models.get(0))
        if model is not None and counts.sum():
            scores.append(float(by_class[id(model)] @ counts / counts.sum()))
    return sum(scores) / len(scores) if scores else None
