"""Pictures of plans, machines, timelines and results: pure functions -> Figure; see figure.py.

    rings(plan)                      the routes of the KV shares
    hops(plan, step=2)               one step: what each link carries, which KV each rank has afterwards
    links([(label, plan)])           how much each link carries, how many links work in each step
    mask(plan or docs, rank=, step=) which pairs are visible, which rank computes them, in which step
    balance([(label, plan)])         the work of each rank in each step
    memory(plan, rank=)              the content of a rank's buffers, step by step
    lowering(plan, rank=)            what each pass of lowering makes of a rank's steps
    timeline([(label, simulated)])   when each rank computes, communicates and waits
    compare([(label, simulated)])    how long each plan takes
    topology(machine)                ranks, links, switches, NICs and their capacities
    results(path)                    measured, modelled, quoted and counted figures of a result file
    together([figure, figure])       figures below each other

Sliders over these: visualize/widgets.py. A picture is made of marks (marks.py), which svg.py and
plotly_json.py write.
Importing this package imports no tensor library, no plotly, no ipywidgets.
`python -m visualize RESULT.json -o OUT.svg` draws a demo result.
"""

from .balance import balance
from .compare import compare
from .figure import Figure, together
from .hops import hops
from .links import links
from .lowering import lowering
from .machines import topology
from .masks import mask
from .memory import memory
from .results import View, results
from .rings import rings
from .timeline import timeline

__all__ = [
    "Figure",
    "View",
    "balance",
    "compare",
    "hops",
    "links",
    "lowering",
    "mask",
    "memory",
    "results",
    "rings",
    "timeline",
    "together",
    "topology",
]
