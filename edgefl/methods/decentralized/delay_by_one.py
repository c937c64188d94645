"""Delay-by-one SGD between sites (Cui et al. 2021, https://arxiv.org/abs/2110.11199): the mean of the last
step's models is formed beside this step.

While the learners of site m take the mean gradient at x_m^k, the heads form the exact mean of all x_j^k by
ring all-reduce; then x_m^{k+1} = (1/M) sum_j x_j^k - g grad_m(x_m^k). Synchronous, with communication hidden.
The exact form is our reading of the name (choice). With one site it is plain SGD. The optimiser's step is
taken at the mean. A learner that is lost stops the run.
"""

from __future__ import annotations

from edgefl.errors import PeerGone
from edgefl.learning.work import GradientResult
from edgefl.methods.decentralized.h_adpsgd import SitesConfig, refuse_impossible
from edgefl.nodes import Faults, Method, Node
from edgefl.parameters import Vector
from edgefl.patterns.all_reduce import Chunk, all_reduce_mean
from edgefl.patterns.reports import ALL_FINITE
from edgefl.patterns.sites import MESSAGES, Site


async def learner(node: Node) -> Vector:
    G = node.config.learners_per_site
    site = Site(node, G)
    heads = range(0, len(node.fleet.ids()), G)
    for k in node.rounds():
        computing = node.start(site.mean_gradient(site.x, k))
        if site.leads:
            mean = await all_reduce_mean(node, heads, site.x, weight=None, tag=2 * k + 1)
        r: GradientResult | None = await computing
        if r is None:
            raise PeerGone(site.members.lost)
        if site.leads:
            site.x, site.state = node.optimizer.step(mean, r.gradient, site.state, k)
            site.step = k + 1
            site.order(changed=True)
        else:
            site.x = await site.model_of_step(k)
        node.record(train_loss=r.loss)
        node.publish(site.x, step=k + 1)
    return site.x


METHOD = Method(
    name="delay-by-one",
    title="SGD whose averaging lags a step, all-reduce within sites",
    paper="Cui et al. 2021, https://arxiv.org/abs/2110.11199",
    roles={"learner": learner},
    messages=(Chunk, *MESSAGES),
    config=SitesConfig,
    ends_with=("learner",),
    needs="complete",
    evaluates="each",
    prepare=refuse_impossible,
    tolerates=Faults(partitions=True),
    invariants=(ALL_FINITE,),
)
