"""Pictures of plans, machines, timelines and results: pure functions -> Figure; see figure.py.

    rings(plan)                      which way keys and values travel
    hops(plan, step=2)               one step: what each link carries, who has what afterwards
    links([(label, plan)])           how much each link carries, how many work in each step
    mask(plan or docs, rank=, step=) which pairs are visible, who computes them, when
    balance([(label, plan)])         who computes how much, and when
    memory(plan, rank=)              what lies in a rank's buffers
    lowering(plan, rank=)            what each pass of lowering makes of a rank's steps
    timeline([(label, simulated)])   who computes, sends and waits, when
    compare([(label, simulated)])    how long each plan takes
    topology(machine)                ranks, links, switches, NICs and their capacities
    results(path)                    measured, modelled, quoted and counted figures of a result file
    together([figure, figure])       figures below each other

Sliders over these: visualize/widgets.py. Files a picture passes: marks.py -> svg.py, plotly_json.py.
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
    "balance",
    "compare",
    "hops",
    "links",
    "lowering",
    "mask",
    "memory",
    "rings",
    "timeline",
    "together",
    "topology",
]
